"""Time of a step under fsdp on one GPU, where it has no peer to shard with, against a step of plain single.

    python -m benchmarks.fsdp_overhead [--preset 350m] [--batch-size 32] [--pairs 30] [--steps 5] [--compile]

Both are stormo's own strategies in one process, with a GPT each, bf16, AdamW and clipping; fsdp speaks to itself over
NCCL. They take turns of a few steps in random order within a pair, so that other load on the machine affects both
equally; a turn ends when the GPU is done. No CUDA graph is replayed. A ratio is fsdp's time over single's, pair by
pair: the median is aimed at 1.02 or less. `--device cpu` is for trying the command, in fp32.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.command import result_line
from benchmarks.paired_timing import Times, Turn, ratios, take_turns

if TYPE_CHECKING:
    from stormo.distributed.world import World

AIM = 1.02
SIDES = ("single", "fsdp")


def side(world: World, strategy: str, options: argparse.Namespace) -> Turn:
    """Steps under one strategy."""
    import torch

    from benchmarks.strategy_tasks import Words
    from benchmarks.strategy_worker import batches, build
    from stormo.tasks.language_model import SIZES
    from stormo.training.trainer import set_arithmetic

    is_gpu = world.device.type == "cuda"
    flags: dict[str, Any] = {"strategy": strategy, "optimizer": "adamw", "clip_norm": 1.0, "graph": False}
    flags |= {"batch_size": options.batch_size, "compile": options.compile, "noise_scale": False}
    task = Words(SIZES[options.preset], 8 * options.batch_size)
    built = build(world, task, {**flags, "precision": "bf16" if is_gpu else "fp32"})
    set_arithmetic(built.config, built.plan)
    every = batches(built.loader)

    def turn(num_steps: int) -> None:
        for _ in range(num_steps):
            built.strategy.micro_step(next(every))
            built.strategy.step(1e-4)
        if is_gpu:
            torch.cuda.synchronize()

    return turn


def measure(world: World, options: argparse.Namespace) -> Times:
    """Let both take turns."""
    return take_turns(world, [side(world, name, options) for name in SIDES], options.pairs, options.steps)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="350m", help="size of the GPT (default: 350m)")
    parser.add_argument("--batch-size", type=int, default=32, help="windows in a step (default: 32)")
    parser.add_argument("--pairs", type=int, default=30, help="turns of each side (default: 30)")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps of a turn (default: 5)")
    parser.add_argument("--compile", action="store_true", help="both with torch.compile")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    from stormo.system.hardware import visible_gpus

    gpus = visible_gpus()
    if options.device == "cuda" and not gpus:
        parser.error("no GPU is visible, and the time of a step on a CPU says nothing; --device cpu tries the command")
    import torch

    from benchmarks.strategy_worker import single_world

    world = single_world(torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu"))
    try:
        times = measure(world, options)
    finally:
        world.close()
    for number, name in enumerate(SIDES):
        step_ms = 1e3 * statistics.median(pair[number] for pair in times.wall_s) / options.steps
        print(f"{name}: {step_ms:.2f} ms a step (median)")
    median, lower, upper = ratios(times.wall_s, 1)
    device = gpus[0].name if options.device == "cuda" else "CPU"
    compiled = ", compiled" if options.compile else ""
    print(f"{options.preset}, batch {options.batch_size}{compiled}, on {device}; aim: at most {AIM}")
    print(result_line({"median_ratio": median, "q25": lower, "q75": upper, "pairs": len(times.wall_s)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
