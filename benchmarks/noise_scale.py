"""What measuring the gradient noise scale costs: the time of a step with it against one without it.

    python -m benchmarks.noise_scale [--device cpu] [--pairs 40] [--steps 5] [--layers 25] [--width 400]
                                     [--batch-size 64] [--accumulate 1]

On the CPU two processes (Gloo, one thread each) compare their gradients; with --device cuda one process compares the
first of --accumulate micro-batches (4 there) with the whole step. Three copies of one network (by default 4 million
parameters) are trained by the true strategy: measured in every step, as at the start of a run; in none, as in seven of
eight steps later; and with --no-noise-scale. They take turns of a few steps in random order, so that other load on
the machine affects all equally, and must end with bit-identical weights. A ratio is a step's time over
that of --no-noise-scale, turn by turn, and its median is shown: 1 is for free.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from benchmarks.command import result_line
from benchmarks.paired_timing import Times, ratios, take_turns, times_of_workers, work

if TYPE_CHECKING:
    from stormo.distributed.world import World
    from stormo.parallel.base import Strategy
    from stormo.tasks.task import Task

# The step of the run that a side believes to be in: all up to 128 are measured, then one in eight.
SIDES = {"--no-noise-scale": 0, "not measured": 129, "measured": 0}
_LEARNING_RATE = 0.01


def make_task(options: argparse.Namespace, num_samples: int) -> Task:
    """A network of linear layers and a batch of made-up samples."""
    import torch
    from torch import Tensor, nn

    from stormo.data import TensorData
    from stormo.tasks.task import Task

    class Layers(Task):
        """Moves its inputs to zero."""

        name = "layers"

        def model(self) -> nn.Module:
            layers = [(nn.Linear(options.width, options.width), nn.ReLU()) for _ in range(options.layers)]
            return nn.Sequential(*itertools.chain(*layers))

        def train_data(self) -> Any:
            return TensorData(torch.randn(num_samples, options.width, generator=torch.Generator().manual_seed(0)))

        def validation_data(self) -> Any:
            return self.train_data()

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return model(batch[0]).square().mean()  # type: ignore[no-any-return]

    return Layers(None)


def make_side(
    world: World, options: argparse.Namespace, name: str, step: int
) -> tuple[Strategy, Callable[[int], None]]:
    """A strategy and turns of so many steps of it, always over the same batch."""
    import torch

    from stormo.config import options as settings
    from stormo.config.layout import resolve_layout
    from stormo.config.plan import resolve
    from stormo.data.loaders import ResidentLoader, Share
    from stormo.parallel.table import strategy_class
    from stormo.system.hardware import visible_gpus

    size = options.batch_size * options.accumulate * world.size
    task = make_task(options, size)
    flags = {"global_batch_size": size, "accumulate": options.accumulate, "num_gpus": world.size, "warmup_epochs": 0.0}
    flags |= {"device": world.device.type, "noise_scale": name != "--no-noise-scale", "base_lr": _LEARNING_RATE}
    config = settings.make_config(flags, None)
    gpus = visible_gpus()[:1] if world.device.type == "cuda" else ()
    plan = resolve(config, resolve_layout(config, gpus), task.facts())
    torch.manual_seed(0)
    strategy = strategy_class(plan.layout)(world, plan, task, config)
    share = Share(global_batch_size=size, accumulate=options.accumulate, worker=world.rank, num_workers=world.size)
    data: Any = task.train_data()
    loader = ResidentLoader(data, share, 0, task.num_draws, task.augment, world.device)
    strategy.warm_up(loader)
    strategy.clock = SimpleNamespace(epoch=1, step=step)
    batches = list(loader.epoch(1))

    def turn(num_steps: int) -> None:
        for _ in range(num_steps):
            for batch in batches:
                strategy.micro_step(batch)
            strategy.step(_LEARNING_RATE)
        if world.device.type == "cuda":
            torch.cuda.synchronize()

    return strategy, turn


def measure(world: World, options: argparse.Namespace) -> Times:
    """Let the sides take turns."""
    import torch

    sides = [make_side(world, options, name, step) for name, step in SIDES.items()]
    times = take_turns(world, [turn for _, turn in sides], options.pairs, options.steps)
    meters = [strategy.noise_scale for strategy, _ in sides]
    counts = [0.0 if meter is None else meter.collect_moments()[0] for meter in meters]
    assert [count > 0 for count in counts] == [name == "measured" for name in SIDES], counts
    for parameters in zip(*(strategy.module.parameters() for strategy, _ in sides), strict=True):
        assert all(torch.equal(parameter, parameters[0]) for parameter in parameters)
    return times


def on_gpu(options: argparse.Namespace) -> Times:
    """Measure in this process, on the first GPU."""
    import torch

    from stormo.distributed.world import World
    from stormo.launch import alone

    return measure(World(alone(), torch.device("cuda", 0)), options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, with workers that are this very command where it takes two, and print the ratios."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--pairs", type=int, default=40, help="turns of each side (default: 40)")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps of a turn (default: 5)")
    parser.add_argument("--layers", type=int, default=25, help="linear layers of the network (default: 25)")
    parser.add_argument("--width", type=int, default=400, help="of each layer (default: 400)")
    parser.add_argument("--batch-size", type=int, default=64, help="samples of one worker's micro-batch (default: 64)")
    parser.add_argument("--accumulate", type=int, help="micro-batches of a step (default: 1 on the CPU, 4 on a GPU)")
    parser.add_argument("--worker-folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.accumulate = options.accumulate or {"cpu": 1, "cuda": 4}[options.device]
    if options.worker_folder:
        return work(options.worker_folder, lambda world: measure(world, options))
    times = on_gpu(options) if options.device == "cuda" else times_of_workers("benchmarks.noise_scale", arguments)
    for side, name in enumerate(SIDES):
        step_ms, cpu_ms = (
            1e3 * statistics.median(pair[side] for pair in seconds) / options.steps
            for seconds in (times.wall_s, times.cpu_s)
        )
        median, lower, upper = ratios(times.wall_s, side)
        against = f"; median ratio {median:.4f}, quartiles {lower:.4f} to {upper:.4f}" if side else ""
        print(f"{name}: {step_ms:.2f} ms a step, {cpu_ms:.2f} ms of CPU{against}")
    figures = {
        "measured_ratio": ratios(times.wall_s, 2)[0],
        "unmeasured_ratio": ratios(times.wall_s, 1)[0],
        "cpu_measured_ratio": ratios(times.cpu_s, 2)[0],
        "cpu_unmeasured_ratio": ratios(times.cpu_s, 1)[0],
        "pairs": len(times.wall_s),
    }
    print(result_line(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
