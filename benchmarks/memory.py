"""Bytes that a rank really holds of weights, gradients and optimizer state, against the formula of ZeRO.

    python -m benchmarks.memory [--world-sizes 1,2,4,8] [--layers 8] [--width 512] [--quick]

A GPT in float32 under AdamW on Gloo ranks; for each of its P parameters there are 4 bytes of weight, 4 of gradient and
8 of state. ZeRO-0 (ddp) holds 16 P, ZeRO-1, 2 and 3 (zero1, zero2, fsdp) hold 16 P / N on each of N ranks between two
steps. In a step ZeRO-1 and 2 have 4 P more, of weights that are gathered once in a step and freed during backward.
Counted is the memory of every tensor that lives in the process when backward is done and the optimizer is about to
step, when all three are there; only the data set is left out. The rank that holds most is shown. `peak` is the most
over a whole step with all that comes and goes: activations and their gradients, the weights that are gathered, and the
gradients on their way.
That does not shrink with the ranks and is no part of the formula. The command fails above 5 %.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.command import aligned, largest, numbers, result_line
from benchmarks.rank_pool import RankPool

if TYPE_CHECKING:
    from stormo.distributed.world import World
    from stormo.tasks.language_model import Size

LIMIT = 0.05
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")  # by what is cut: nothing, state, gradients too, weights too
_BLOCK = 8  # tokens of a sample: activations stay small beside the weights
_NUM_STEPS = 3  # torch lays out its buckets again after the first


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldBytes:
    """Bytes of one rank."""

    weights: int
    gradients: int
    state: int
    total: int  # of all tensors, also of none of the three kinds
    peak: int


def formula(zero: int, num_parameters: int, num_ranks: int) -> float:
    """Bytes of weights, gradients and AdamW's state of a rank, in float32."""
    return num_parameters * 16 / (num_ranks if zero else 1)


def measure(world: World, strategy_name: str, size: Size) -> HeldBytes:
    """In a rank: take steps, look before the last, and watch from the one before to it."""
    from benchmarks import held_bytes
    from benchmarks.strategy_tasks import Words
    from benchmarks.strategy_worker import batches, build

    task = Words(size, num_windows=2 * world.size)
    task.datasets()
    before = held_bytes.living()  # the data, and what this process has of other things
    name = "single" if strategy_name == "ddp" and world.size == 1 else strategy_name
    built = build(world, task, {"strategy": name, "precision": "fp32", "optimizer": "adamw", "batch_size": 2})
    strategy = built.strategy
    steps, every = 0, batches(built.loader)
    while steps < _NUM_STEPS - 1:
        strategy.micro_step(next(every))
        steps += 1
        if steps < _NUM_STEPS - 1:
            strategy.step(1e-3)
    with held_bytes.Peak(before) as peak:
        strategy.step(1e-3)
        strategy.micro_step(next(every))
    strategy._collect_gradients()  # as the step does first
    time.sleep(0.5)  # Gloo's threads let go of a bucket a moment after it has been sent
    everything = held_bytes.living()
    held = HeldBytes(
        weights=held_bytes.num_bytes(held_bytes.weights(strategy)),
        gradients=held_bytes.num_bytes(held_bytes.gradients(strategy)),
        state=held_bytes.num_bytes(held_bytes.optimizer_state(strategy.optimizer)),
        total=held_bytes.num_bytes(everything, without=before),
        peak=peak.num_bytes,
    )
    world.barrier()
    return held


def rows(found: Sequence[tuple[int, int, HeldBytes]], num_parameters: int) -> list[str]:
    """The table, in millions of bytes."""
    head = ["ZeRO", "ranks", "weights", "gradients", "state", "held in all", "formula", "error", "peak"]
    table = [head]
    for zero, size, held in found:
        wanted = formula(zero, num_parameters, size)
        parts = (held.weights, held.gradients, held.state, held.total, wanted)
        error = f"{held.total / wanted - 1:+.2%}"
        table.append([f"{zero} ({STRATEGIES[zero]})", str(size), *map(_mb, parts), error, _mb(held.peak)])
    return aligned(table)


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every stage on every number of ranks, print a table and the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-sizes", type=numbers, default=(1, 2, 4, 8), help="ranks (default: 1,2,4,8)")
    parser.add_argument("--layers", type=int, default=8, help="of the GPT (default: 8)")
    parser.add_argument("--width", type=int, default=512, help="of the GPT (default: 512)")
    parser.add_argument("--quick", action="store_true", help="1 and 2 ranks, 4 layers of 128")
    options = parser.parse_args(arguments)
    if options.quick:
        options.world_sizes, options.layers, options.width = (1, 2), 4, 128
    from stormo.tasks.language_model import VOCABULARY, Size

    size = Size(options.layers, options.width, 8, _BLOCK)
    num_parameters = size.num_parameters(block=_BLOCK, vocabulary=VOCABULARY)
    found: list[tuple[int, int, HeldBytes]] = []
    with RankPool() as pool:
        for num_ranks in options.world_sizes:
            for zero, name in enumerate(STRATEGIES):
                ranks: list[Any] = pool.run(measure, num_ranks, name, size)
                found.append((zero, num_ranks, max(ranks, key=lambda held: held.total)))
                print(f"measured {name} on {num_ranks}", file=sys.stderr, flush=True)
    print(f"{num_parameters:,} parameters; millions of bytes on the rank that holds most")
    print("\n".join(rows(found, num_parameters)))
    errors = [abs(held.total / formula(zero, num_parameters, ranks) - 1) for zero, ranks, held in found]
    print(result_line({"cases": len(found), "max_relative_error": largest(errors)}))
    return 0 if largest(errors) <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
