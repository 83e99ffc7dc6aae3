"""Time of a training step with and without a CUDA graph, at several batch sizes, on one GPU.

    python -m benchmarks.graph [--data-folder FOLDER] [--steps 60]

Loader, forward, backward and optimizer of the full reference network, after the same warm-up as a real run; the two
ways alternate. `host_ms` is what Python alone needs for a step: where it is above the step's time on the GPU, Python is
the limit.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from benchmarks.command import data_folder
from stormo.config.layout import resolve_layout
from stormo.config.plan import resolve
from stormo.distributed.world import World
from stormo.launch import alone
from stormo.parallel.table import STRATEGIES
from stormo.system.hardware import visible_gpus
from stormo.training.settings import read_settings
from stormo.training.trainer import make_loader, set_arithmetic

BATCH_SIZES = (32, 128, 256, 512)


def step_times_ms(world: World, flags: list[str], num_steps: int) -> tuple[float, float]:
    """Milliseconds of a step, and of its Python alone."""
    config, task_class = read_settings(flags)
    task = task_class(config.task_options)
    plan = resolve(config, resolve_layout(config, visible_gpus()), task.facts())
    set_arithmetic(config, plan)
    torch.manual_seed(0)
    strategy = STRATEGIES["single"](world, plan, task, config)
    loader = make_loader(config, plan, task, world)
    strategy.warm_up(loader)
    batches = loader.epoch(1)

    def run(count: int) -> tuple[float, float]:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            strategy.micro_step(next(batches))
            strategy.step(0.01)
        host_s = time.perf_counter() - began
        torch.cuda.synchronize()
        return (time.perf_counter() - began) * 1e3 / count, host_s * 1e3 / count

    run(15)
    return run(num_steps)


def main() -> None:
    """Print a table and the RESULT line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-folder", help="with the files of Fashion-MNIST; default: where stormo keeps them")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    data = ["--task.data-folder", data_folder(options.data_folder)]
    if not visible_gpus():
        sys.exit("this benchmark measures a GPU and none is visible; run it on a machine with one")
    world = World(alone(), torch.device("cuda", 0))
    figures = []
    for batch_size in BATCH_SIZES:
        for flag in ("--graph", "--no-graph"):
            step_ms, host_ms = step_times_ms(world, ["--batch-size", str(batch_size), flag, *data], options.steps)
            rate = batch_size / step_ms * 1e3
            print(
                f"batch {batch_size:>3} {flag:<10} {step_ms:7.2f} ms a step, {host_ms:6.2f} host, {rate:7.0f} images/s"
            )
            figures.append(f"{'graph' if flag == '--graph' else 'eager'}_{batch_size}_ms={step_ms:.2f}")
    print("RESULT " + " ".join(figures))


if __name__ == "__main__":
    main()
