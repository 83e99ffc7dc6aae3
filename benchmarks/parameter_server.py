"""Time of a step under --strategy server against one under ddp, and with workers that are held up, on two processes.

    python -m benchmarks.parameter_server [--pairs 10] [--steps 40] [--width 512] [--delay-ms 40] [--staleness 4]

All sides run in the same two processes, in turns, in random order within a pair. Each step is one of stormo's loop:
forward, backward, the vote, and the way to the servers and back; a turn ends when all workers have the same weights.
Held up means a sleep before a pass: `now and then` is one step in four of each worker, drawn by itself; `always` is
every step of one worker. Ratios are of one side's time over another's, pair by pair.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.command import result_line
from benchmarks.paired_timing import Times, Turn, ratios, take_turns, times_of_workers, work

if TYPE_CHECKING:
    from stormo.distributed.world import World

_SHARE_HELD_UP = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One way to train."""

    strategy: str = "server"
    servers: int = 1
    is_stale: bool = False
    held_up: str = ""

    def __str__(self) -> str:
        label = self.strategy if self.strategy != "server" else f"{self.servers} server{'s' * (self.servers > 1)}"
        return label + ", stale" * self.is_stale + (f", held up {self.held_up}" if self.held_up else "")


SIDES = (
    Side(strategy="ddp"),
    Side(servers=1),
    Side(servers=2),
    Side(held_up="now and then"),
    Side(held_up="now and then", is_stale=True),
    Side(held_up="always"),
    Side(held_up="always", is_stale=True),
)
# What each figure is the ratio of: the numbers of two sides.
FIGURES = {"one_server": (1, 0), "two_servers": (2, 0), "stale_now_and_then": (4, 3), "stale_always": (6, 5)}


def side(world: World, one: Side, options: argparse.Namespace, stack: contextlib.ExitStack) -> Turn:
    """Steps as the loop takes them; what runs beside them runs until the stack is left."""
    from benchmarks.strategy_tasks import Wide
    from benchmarks.strategy_worker import batches
    from stormo.config.layout import resolve_layout
    from stormo.config.plan import resolve
    from stormo.config.schema import Batch, Optimizer, Speed, TrainConfig, Workers
    from stormo.distributed.world import AsyncAllReduce
    from stormo.parallel.table import strategy_class
    from stormo.training.trainer import make_loader

    staleness = options.staleness if one.is_stale else 0
    config = TrainConfig(
        workers=Workers(
            num_gpus=world.size,
            strategy=one.strategy,  # type: ignore[arg-type]
            servers=one.servers,
            staleness=staleness,
            device="cpu",
        ),
        batch=Batch(batch_size=options.batch_size),
        optimizer=Optimizer(noise_scale=False),
        speed=Speed(precision="fp32"),
    )
    task = Wide(options.width)
    plan = resolve(config, resolve_layout(config, ()), task.facts())
    made = strategy_class(plan.layout)(world, plan, task, config)
    loader, vote = make_loader(config, plan, task, world), AsyncAllReduce(world, max(0, staleness - 1))
    made.warm_up(loader)
    stack.enter_context(made.running())
    following, draw = batches(loader), random.Random(world.rank)

    def is_held_up() -> bool:
        if one.held_up == "now and then":
            return draw.random() < _SHARE_HELD_UP
        return one.held_up == "always" and world.rank == world.size - 1

    def turn(num_steps: int) -> None:
        for _ in range(num_steps):
            vote.start(0)
            if is_held_up():
                time.sleep(1e-3 * options.delay_ms)
            made.micro_step(next(following))
            made.step(0.01)
            vote.outcome()
        vote.drain()
        made.synchronize()

    return turn


def measure(world: World, options: argparse.Namespace) -> Times:
    """Let all sides take their turns."""
    with contextlib.ExitStack() as stack:
        turns = [side(world, one, options, stack) for one in SIDES]
        return take_turns(world, turns, options.pairs, options.steps)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the two workers, which are this very command, and print what they measured."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, help="turns of each side (default: 10)")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of a turn (default: 40)")
    parser.add_argument("--width", type=int, default=512, help="of the network's four layers (default: 512)")
    parser.add_argument("--batch-size", type=int, default=32, help="samples of one worker in a step (default: 32)")
    parser.add_argument("--delay-ms", type=float, default=40.0, help="by which a step is held up (default: 40)")
    parser.add_argument("--staleness", type=int, default=4, help="of the stale sides (default: 4)")
    parser.add_argument("--worker-folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker_folder:
        return work(options.worker_folder, lambda world: measure(world, options))
    _show(times_of_workers("benchmarks.parameter_server", arguments), options.steps)
    return 0


def _show(times: Times, num_steps: int) -> None:
    for index, one in enumerate(SIDES):
        step_ms = 1e3 * sum(pair[index] for pair in times.wall_s) / len(times.wall_s) / num_steps
        print(f"{one}: {step_ms:.2f} ms a step (mean)")
    figures: dict[str, float] = {}
    for name, (above, below) in FIGURES.items():
        found = ratios([[pair[below], pair[above]] for pair in times.wall_s], 1)
        figures |= dict(zip((name, f"{name}_q25", f"{name}_q75"), found, strict=True))
    print(result_line(figures | {"pairs": len(times.wall_s)}))


if __name__ == "__main__":
    sys.exit(main())
