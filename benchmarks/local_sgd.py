"""Time of a step under --strategy local against one under ddp, over a slow link, on two CPU processes.

    python -m benchmarks.local_sgd [--rate-mbit 100] [--average-every 16] [--pairs 10] [--steps 16] [--width 256]

Needs root: the two workers run in a network of their own, whose link is held to that rate by `tc`. Both strategies run
in the same processes, in turns, in random order within a pair. Each step is one of stormo's loop: forward, backward,
the vote that goes around in every step, the optimizer, and whatever of weights or gradients travels. A ratio is local's
time over ddp's, pair by pair; 1 / average-every is the least that the traffic alone would leave.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.command import result_line
from benchmarks.turns import Times, Turn, ratios, take_turns, times_of_workers, work

if TYPE_CHECKING:
    from stormo.data.loaders import Batch, Loader
    from stormo.progress import Progress
    from stormo.world.world import World

SIDES = ("ddp", "local")
_INSIDE = "STORMO_SLOW_LINK"


def side(world: World, strategy: str, options: argparse.Namespace) -> Turn:
    """Steps under a strategy, as the loop takes them."""
    from benchmarks.slow_task import Wide
    from stormo.config import Batch, Optimizer, Speed, TrainConfig, Workers
    from stormo.layout import resolve_layout
    from stormo.plan import resolve
    from stormo.progress import Progress
    from stormo.strategies.table import strategy_class
    from stormo.worker import make_loader
    from stormo.world.world import Vote

    config = TrainConfig(
        workers=Workers(num_gpus=world.size, strategy=strategy, device="cpu"),  # type: ignore[arg-type]
        batch=Batch(batch_size=options.batch_size),
        optimizer=Optimizer(average_every=str(options.average_every), noise_scale=False),
        speed=Speed(precision="fp32"),
    )
    task = Wide(options.width)
    plan = resolve(config, resolve_layout(config, ()), task.facts())
    made = strategy_class(plan.layout)(world, plan, task, config)
    loader, progress, vote = make_loader(config, plan, task, world), Progress(), Vote(world)
    made.clock = progress
    made.warm_up(loader)
    batches = _without_end(loader, progress)

    def turn(num_steps: int) -> None:
        for _ in range(num_steps):
            batch = next(batches)
            vote.cast(0)
            made.forward_backward(batch)
            made.step(0.01)
            progress.advance(loader.samples(batch.span))
            made.exchange_weights()
            vote.outcome()

    return turn


def _without_end(loader: Loader, progress: Progress) -> Iterator[Batch]:
    while True:
        yield from loader.epoch(progress.epoch, 0)
        progress.epoch, progress.position = progress.epoch + 1, 0


def _slowed(words: Sequence[str], rate_mbit: int) -> int:
    """This very command in a network of its own, whose only link is slow."""
    link = f"ip link set lo up && tc qdisc add dev lo root tbf rate {rate_mbit}mbit burst 256kb latency 200ms"
    command = ["unshare", "--net", "sh", "-c", f'{link} && exec "$@"', "sh", sys.executable, "-m"]
    done = subprocess.run(
        [*command, "benchmarks.local_sgd", *words],
        env={**os.environ, _INSIDE: "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        check=False,
    )
    return done.returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the two workers, which are this very command, and print what they measured."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate-mbit", type=int, default=100, help="of the link, in Mbit/s (default: 100)")
    parser.add_argument("--average-every", type=int, default=16, help="steps between averagings (default: 16)")
    parser.add_argument("--pairs", type=int, default=10, help="turns of each side (default: 10)")
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps of a turn (default: 16)")
    parser.add_argument("--width", type=int, default=256, help="of the network's four layers (default: 256)")
    parser.add_argument("--batch-size", type=int, default=32, help="samples of one worker in a step (default: 32)")
    parser.add_argument("--worker-folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.steps % options.average_every:
        parser.error("--steps must be a multiple of --average-every, so that every turn has its share of averagings")
    if options.worker_folder:
        return work(
            options.worker_folder,
            lambda world: take_turns(
                world, [side(world, name, options) for name in SIDES], options.pairs, options.steps
            ),
        )
    if _INSIDE not in os.environ:
        return _slowed(words, options.rate_mbit)
    _show(times_of_workers("benchmarks.local_sgd", words), options)
    return 0


def _show(times: Times, options: argparse.Namespace) -> None:
    for index, name in enumerate(SIDES):
        step_ms = 1e3 * sum(pair[index] for pair in times.wall_s) / len(times.wall_s) / options.steps
        print(f"{name}: {step_ms:.2f} ms a step (mean) at {options.rate_mbit} Mbit/s")
    median, lower, upper = ratios(times.wall_s, 1)
    print(
        result_line({"ratio": median, "q25": lower, "q75": upper, "pairs": len(times.wall_s)})
        + f" average_every={options.average_every}"
    )


if __name__ == "__main__":
    sys.exit(main())
