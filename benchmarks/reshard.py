"""A checkpoint of every mesh restored by every other: the same bits of weights and optimizer state, or it fails.

    python -m benchmarks.reshard [--optimizer adamw] [--meshes "single,fsdp 4,..."]

A small GPT takes two steps under each mesh and is saved as `stormo train` saves it: whole by one process, or in chunks
by every rank. Then each mesh restores the checkpoints of all meshes, one after the other in the same processes, and
saves them again. One process reads both checkpoints whole and compares them: names, dtypes, shapes, and every bit.
After each restore the mesh takes one more step, whose loss must be that of the mesh that saved (float64, 1e-10).
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.command import aligned, result_line
from benchmarks.rank_pool import RankPool

if TYPE_CHECKING:
    from benchmarks.strategy_worker import Built
    from stormo.checkpoint import Snapshot
    from stormo.distributed.world import World

# Workers and settings; 3 workers do not divide the 32 rows of the layers, nor 4 the 12 rows of the positions evenly.
MESHES: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "single": (1, {}),
    "ddp 2": (2, {"strategy": "ddp"}),
    "zero1 2": (2, {"strategy": "zero1"}),
    "zero2 4": (4, {"strategy": "zero2"}),
    "fsdp 2": (2, {"strategy": "fsdp"}),
    "fsdp 3": (3, {"strategy": "fsdp"}),
    "fsdp 4": (4, {"strategy": "fsdp"}),
    "hsdp 2×2": (4, {"mesh": "replicate=2,shard=2"}),
    "tensor 2": (2, {"strategy": "tensor"}),
    "hybrid 2": (2, {"strategy": "hybrid"}),
    "pipeline 2": (2, {"strategy": "pipeline"}),
    "fsdp×tensor 2×2": (4, {"mesh": "shard=2,tensor=2"}),
    "pipeline×fsdp 2×2": (4, {"mesh": "pipeline=2,shard=2"}),
    "pipeline×tensor 2×2": (4, {"mesh": "pipeline=2,tensor=2"}),
    "zero1×tensor 2×2": (4, {"mesh": "shard=2,tensor=2", "zero": 1}),
}
NUM_STEPS = 2
RATE = 0.01
LIMIT = 1e-10  # of the relative difference of two losses
Left = tuple[str, float]  # a checkpoint, on rank 0, and the loss of the step after it
_NUM_SAMPLES = 24


def _build(world: World, name: str, optimizer: str) -> Built:
    from benchmarks.strategy_tasks import make_task
    from benchmarks.strategy_worker import build

    flags = {"optimizer": optimizer, "global_batch_size": 12, "lr_rule": "none", "precision": "fp64"}
    built = build(world, make_task("GPT", _NUM_SAMPLES), {**flags, **MESHES[name][1]})
    built.strategy.warm_up(built.loader)  # as before a resume, when memory is as a micro-batch has left it
    return built


def _save(world: World, built: Built, step: int, folder: str) -> str:
    """Save as a run does; the path on rank 0."""
    import torch

    from stormo.checkpoint import RetentionPolicy, Saver
    from stormo.training.state import Progress, RunState

    loss_sum = torch.zeros((), dtype=torch.float64)
    state = RunState(progress=Progress(step=step), strategy=built.strategy, loss_sum=loss_sum)
    saving = RetentionPolicy(step=step, identity="", keep_last=1)
    saver = Saver(world, in_background=False)
    saver.begin(state.content(world, 0), Path(folder) if world.is_main else None, saving)
    saver.wait()
    done = saver.finished()
    return "" if done is None else str(done.saved.path)


def train_and_save(world: World, name: str, optimizer: str, folder: str) -> Left:
    """In a rank: two steps and a checkpoint, then one more step."""
    from benchmarks.strategy_worker import train

    built = _build(world, name, optimizer)
    train(world, built, NUM_STEPS, RATE)
    path = _save(world, built, NUM_STEPS, folder)
    return path, train(world, built, 1, RATE)[0]


def restore_and_save(world: World, name: str, optimizer: str, sources: Sequence[str], folder: str) -> list[Left]:
    """In a rank: restore one checkpoint after the other, save each again, and take one more step."""
    import torch

    from benchmarks.strategy_worker import train
    from stormo.training.state import Progress, RunState

    built = _build(world, name, optimizer)
    left = []
    for number, source in enumerate(sources):
        loss_sum = torch.zeros((), dtype=torch.float64)
        state = RunState(progress=Progress(), strategy=built.strategy, loss_sum=loss_sum)
        state.restore(world, Path(source), 0)
        path = _save(world, built, state.progress.step, f"{folder}/{number}")
        left.append((path, train(world, built, 1, RATE)[0]))
    return left


def difference(ours: Snapshot, theirs: Snapshot) -> str:
    """The first tensor that differs in a bit; empty if none does."""
    for section in ("model", "optimizer"):
        a, b = getattr(ours, section), getattr(theirs, section)
        if a.keys() != b.keys():
            return f"names: {sorted(a.keys() ^ b.keys())[0]}"
        for name, one in a.items():
            other = b[name]
            if one.dtype != other.dtype or one.shape != other.shape or _bits(one) != _bits(other):
                return str(name)
    return ""


def _bits(tensor: Any) -> bytes:
    return bytes(tensor.contiguous().numpy().tobytes())


def main(arguments: Sequence[str] | None = None) -> int:
    """Save under every mesh, restore under every mesh, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", default="adamw", help="whose state is compared too (default: adamw)")
    parser.add_argument("--meshes", default=list(MESHES), type=mesh_names, help="some of them (default: all)")
    options = parser.parse_args(arguments)
    names = options.meshes
    began_s = time.perf_counter()
    from stormo.checkpoint import load

    found: dict[tuple[str, str], str] = {}
    with tempfile.TemporaryDirectory() as folder, RankPool() as pool:
        saved: list[Left] = []
        for number, name in enumerate(names):
            print(f"training under {name} ...", file=sys.stderr, flush=True)
            path = f"{folder}/from/{number}"
            saved.append(pool.run(train_and_save, MESHES[name][0], name, options.optimizer, path)[0])
        sources, wholes = [path for path, _ in saved], [load(path) for path, _ in saved]
        for number, name in enumerate(names):
            print(f"restoring under {name} ...", file=sys.stderr, flush=True)
            path = f"{folder}/to/{number}"
            taken = pool.run(restore_and_save, MESHES[name][0], name, options.optimizer, sources, path)[0]
            for source, whole, (_, before), (path, loss) in zip(names, wholes, saved, taken, strict=True):
                resumes_equal = math.isclose(loss, before, rel_tol=LIMIT)
                found[source, name] = difference(load(path), whole) or ("" if resumes_equal else "the next loss")
    head = ["saved under", *(f"to {number}" for number in range(1, len(names) + 1))]
    rows = [
        [f"{number} {source}", *("=" if not found[source, name] else "differs" for name in names)]
        for number, source in enumerate(names, start=1)
    ]
    print("\n".join(aligned([head, *rows])))
    for (source, name), what in found.items():
        if what:
            print(f"{source} to {name}: {what} differs")
    print(f"{time.perf_counter() - began_s:.0f} s in all; {options.optimizer}")
    identical = sum(not what for what in found.values())
    print(result_line({"pairs": len(found), "identical": identical}))
    return 0 if identical == len(found) else 1


def mesh_names(text: str) -> list[str]:
    """Names of the table, for argparse."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in MESHES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of: {', '.join(MESHES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
