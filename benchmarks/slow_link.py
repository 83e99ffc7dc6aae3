"""Steps of stormo's own loop, interleaved on two workers whose link is limited to a rate."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.paired_timing import Times, Turn, take_turns, times_of_workers, work

if TYPE_CHECKING:
    from stormo.config.schema import TrainConfig
    from stormo.data.loaders import Batch, Loader
    from stormo.distributed.world import World
    from stormo.training.state import Progress

_INSIDE = "STORMO_SLOW_LINK"


def steps_of(world: World, config: TrainConfig, width: int) -> Turn:
    """Steps by these settings, as the loop takes them."""
    from benchmarks.strategy_tasks import Wide
    from stormo.config.layout import resolve_layout
    from stormo.config.plan import resolve
    from stormo.distributed.world import AsyncAllReduce
    from stormo.parallel.table import strategy_class
    from stormo.training.state import Progress
    from stormo.training.trainer import make_loader

    task = Wide(width)
    plan = resolve(config, resolve_layout(config, ()), task.facts())
    made = strategy_class(plan.layout)(world, plan, task, config)
    loader, progress, vote = make_loader(config, plan, task, world), Progress(), AsyncAllReduce(world)
    made.clock = progress
    made.warm_up(loader)
    batches = _without_end(loader, progress)

    def turn(num_steps: int) -> None:
        for _ in range(num_steps):
            batch = next(batches)
            vote.start(0)
            made.micro_step(batch)
            made.step(0.01)
            progress.advance(loader.samples(batch.span))
            made.exchange_weights()
            vote.outcome()

    return turn


def _without_end(loader: Loader, progress: Progress) -> Iterator[Batch]:
    while True:
        yield from loader.epoch(progress.epoch, 0)
        progress.epoch, progress.position = progress.epoch + 1, 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """What all benchmarks over a slow link have."""
    parser.add_argument("--rate-mbit", type=int, default=100, help="of the link, in Mbit/s (default: 100)")
    parser.add_argument("--pairs", type=int, default=10, help="turns of each side (default: 10)")
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps of a turn (default: 16)")
    parser.add_argument("--width", type=int, default=256, help="of the network's four layers (default: 256)")
    parser.add_argument("--batch-size", type=int, default=32, help="samples of one worker in a step (default: 32)")
    parser.add_argument("--worker-folder", type=Path, help=argparse.SUPPRESS)


def run(
    module: str,
    arguments: Sequence[str],
    options: argparse.Namespace,
    names: Sequence[str],
    side: Callable[[World, str, argparse.Namespace], Turn],
    show: Callable[[Times, argparse.Namespace], None],
) -> int:
    """Start this command again in a network namespace, then as two workers, and show what they measured."""

    def sides(world: World) -> list[Turn]:
        return [side(world, name, options) for name in names]

    if options.worker_folder:
        return work(options.worker_folder, lambda world: take_turns(world, sides(world), options.pairs, options.steps))
    if _INSIDE not in os.environ:
        return _slowed(module, arguments, options.rate_mbit)
    show(times_of_workers(module, arguments), options)
    return 0


def _slowed(module: str, arguments: Sequence[str], rate_mbit: int) -> int:
    link = f"ip link set lo up && tc qdisc add dev lo root tbf rate {rate_mbit}mbit burst 256kb latency 200ms"
    command = ["unshare", "--net", "sh", "-c", f'{link} && exec "$@"', "sh", sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env={**os.environ, _INSIDE: "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}, check=False)
    return done.returncode


def step_lines(names: Sequence[str], times: Times, options: argparse.Namespace) -> list[str]:
    """The mean time of a step of each side."""
    lines = []
    for index, name in enumerate(names):
        step_ms = 1e3 * sum(pair[index] for pair in times.wall_s) / len(times.wall_s) / options.steps
        lines.append(f"{name}: {step_ms:.2f} ms a step (mean) at {options.rate_mbit} Mbit/s")
    return lines
