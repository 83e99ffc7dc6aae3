"""Time of a step under --strategy local against one under ddp, over a slow link, on two CPU processes.

    python -m benchmarks.local_sgd [--rate-mbit 100] [--average-every 16] [--pairs 10] [--steps 16] [--width 256]

Needs root: the two workers run in a network namespace whose link `tc` limits to that rate. Both strategies run
in the same processes, in turns, in random order within a pair. Each step is one of stormo's loop: forward, backward,
the vote that goes around in every step, the optimizer, and whatever of weights or gradients travels. A ratio is local's
time over ddp's, pair by pair; 1 / average-every is the least that the traffic alone would leave.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.command import result_line
from benchmarks.paired_timing import Times, Turn, ratios
from benchmarks.slow_link import add_options, run, step_lines, steps_of

if TYPE_CHECKING:
    from stormo.distributed.world import World

SIDES = ("ddp", "local")


def side(world: World, strategy: str, options: argparse.Namespace) -> Turn:
    """Steps under a strategy."""
    from stormo.config.schema import Batch, Optimizer, Speed, TrainConfig, Workers

    config = TrainConfig(
        workers=Workers(num_gpus=world.size, strategy=strategy, device="cpu"),  # type: ignore[arg-type]
        batch=Batch(batch_size=options.batch_size),
        optimizer=Optimizer(average_every=str(options.average_every), noise_scale=False),
        speed=Speed(precision="fp32"),
    )
    return steps_of(world, config, options.width)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the ratio."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--average-every", type=int, default=16, help="steps between averagings (default: 16)")
    add_options(parser)
    options = parser.parse_args(arguments)
    if options.steps % options.average_every:
        parser.error("--steps must be a multiple of --average-every, so that every turn has its share of averagings")
    return run("benchmarks.local_sgd", arguments, options, SIDES, side, _show)


def _show(times: Times, options: argparse.Namespace) -> None:
    print(*step_lines(SIDES, times, options), sep="\n")
    median, lower, upper = ratios(times.wall_s, 1)
    print(
        result_line({"ratio": median, "q25": lower, "q75": upper, "pairs": len(times.wall_s)})
        + f" average_every={options.average_every}"
    )


if __name__ == "__main__":
    sys.exit(main())
