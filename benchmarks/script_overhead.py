"""Steps per second of a script with `stormo.World` against the same script with DDP by hand, on two CPU processes.

    python -m benchmarks.script_overhead [--pairs 30] [--steps 20]

Both loops run in the same two processes (Gloo, one thread each), an epoch each in turns, in random order within a
pair, so that whatever else the machine does hits both alike. The hand-written loop is what the tutorials teach:
DistributedSampler, DataLoader, DistributedDataParallel, loss.backward(). Ours wraps the model, the optimizer and the
same DataLoader without that sampler. A ratio is ours over theirs, pair by pair; its median must reach 0.95.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.command import one_thread, result_line

PROMISED = 0.95
NUM_WORKERS = 2
_NUM_WARM_UP_PAIRS = 2


def work(folder: Path, num_pairs: int, num_steps: int, batch_size: int, width: int) -> None:
    """Be one of the two workers."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    import stormo

    world = stormo.World("cpu")

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(784, width), nn.ReLU()]
        model = nn.Sequential(*layers, nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    num_samples = num_steps * batch_size * NUM_WORKERS
    data = TensorDataset(torch.randn(num_samples, 784), torch.randint(10, (num_samples,)))

    model, optimizer = make()
    model, optimizer = world.wrap(model, optimizer)
    loader = world.loader(DataLoader(data, batch_size * NUM_WORKERS, shuffle=True))

    def ours() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            world.backward(F.cross_entropy(model(x), y))
            optimizer.step()

    other_model, other_optimizer = make()
    wrapped = DistributedDataParallel(other_model)
    sampler: DistributedSampler[object] = DistributedSampler(data, NUM_WORKERS, world.rank)
    other_loader = DataLoader(data, batch_size, sampler=sampler)

    def by_hand() -> None:
        for x, y in other_loader:
            other_optimizer.zero_grad()
            loss = F.cross_entropy(wrapped(x), y)
            loss.backward()
            other_optimizer.step()

    sides: tuple[Callable[[], None], ...] = (ours, by_hand)
    draw = random.Random(0)  # the same order on both workers
    times_s: list[list[float]] = []
    for pair in range(-_NUM_WARM_UP_PAIRS, num_pairs):
        taken_s = [0.0, 0.0]
        for side in draw.sample(range(2), 2):
            dist.barrier()
            began_s = time.perf_counter()
            sides[side]()
            dist.barrier()
            taken_s[side] = time.perf_counter() - began_s
        if pair >= 0:
            times_s.append(taken_s)
    if world.is_main:
        (folder / "times.json").write_text(json.dumps(times_s), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the two workers, which are this very command, and print what they measured."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30, help="epochs of each side (default: 30)")
    parser.add_argument("--steps", type=int, default=20, help="steps of an epoch (default: 20)")
    parser.add_argument("--batch-size", type=int, default=64, help="samples of one worker in a step (default: 64)")
    parser.add_argument("--width", type=int, default=512, help="of the hidden layers (default: 512)")
    parser.add_argument("--worker-folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.worker_folder:
        work(options.worker_folder, options.pairs, options.steps, options.batch_size, options.width)
        return 0
    from stormo.launch import Node, run_node

    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "benchmarks.script_overhead", *words, "--worker-folder", temporary]
        code = run_node(command, Node(num_workers=NUM_WORKERS), environ=one_thread())
        if code:
            return code
        times_s = json.loads((Path(temporary) / "times.json").read_text(encoding="utf-8"))
    for side, name in enumerate(("stormo.World", "DDP by hand")):
        print(f"{name}: {1e3 * statistics.median(pair[side] for pair in times_s) / options.steps:.2f} ms a step")
    ratios = [theirs / ours for ours, theirs in times_s]
    lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    print(result_line({"median_ratio": median, "q25": lower, "q75": upper, "pairs": len(ratios)}))
    return 0 if median >= PROMISED else 1


if __name__ == "__main__":
    sys.exit(main())
