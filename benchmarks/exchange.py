"""Time of a step with stormo's exchange of gradients against torch's DDP, on two CPU processes.

    python -m benchmarks.exchange [--pairs 40] [--steps 10] [--layers 30] [--width 400] [--batch-size 32]

Both run in the same two processes (Gloo, one thread each), in turns of a few steps, in random order within a pair, so
that whatever else the machine does hits both alike. Each has its own copy of the same network (with the defaults, 60
tensors of 4.8 million parameters together) and a fused optimizer; DDP has gradients as views of its buckets and no
buffers to broadcast. A ratio is DDP's time over stormo's, pair by pair: 1 is as fast. CPU time is shown beside, which
tells on a busy machine whether a difference is work or waiting.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.command import result_line
from benchmarks.turns import Times, Turn, ratios, take_turns, times_of_workers, work

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stormo.distributed.world import World

SIDES = ("stormo", "ddp")


def network(num_layers: int, width: int) -> nn.Module:
    """Linear layers, the same ones on every call."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(num_layers) for layer in (nn.Linear(width, width), nn.ReLU())))


def stormo_side(world: World, model: nn.Module, batch: Tensor) -> Turn:
    """Steps of the model itself, with stormo's exchange."""
    from stormo.parallel.exchange import GradientExchange

    exchange = GradientExchange(model, world)

    def backward(loss: Tensor) -> None:
        exchange.arm()
        (loss / world.size).backward()
        exchange.finish()

    return _steps(model, model, batch, backward)


def ddp_side(world: World, model: nn.Module, batch: Tensor) -> Turn:
    """Steps of the same model inside DDP."""
    from stormo.parallel.ddp import replica

    wrapped = replica(model, gradient_as_bucket_view=True)
    return _steps(model, wrapped, batch, lambda loss: loss.backward())


def _steps(model: nn.Module, called: nn.Module, batch: Tensor, backward: Callable[[Tensor], None]) -> Turn:
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)

    def turn(num_steps: int) -> None:
        for _ in range(num_steps):
            optimizer.zero_grad()
            backward(called(batch).square().mean())
            optimizer.step()

    return turn


def measure(world: World, options: argparse.Namespace) -> Times:
    """Let the sides take turns; both must have trained the same network in the end."""
    import torch

    batch = torch.randn(options.batch_size, options.width, generator=torch.Generator().manual_seed(world.rank))
    models = [network(options.layers, options.width) for _ in SIDES]
    turns = [side(world, model, batch) for side, model in zip((stormo_side, ddp_side), models, strict=True)]
    times = take_turns(world, turns, options.pairs, options.steps)
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours, theirs)
    return times


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the two workers, which are this very command, and print what they measured."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40, help="turns of each side (default: 40)")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps of a turn (default: 10)")
    parser.add_argument("--layers", type=int, default=30, help="of the network, two tensors each (default: 30)")
    parser.add_argument("--width", type=int, default=400, help="of a layer (default: 400)")
    parser.add_argument("--batch-size", type=int, default=32, help="samples of one worker in a step (default: 32)")
    parser.add_argument("--worker-folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.worker_folder:
        return work(options.worker_folder, lambda world: measure(world, options))
    times = times_of_workers("benchmarks.exchange", words)
    for side, name in enumerate(SIDES):
        step_ms, cpu_ms = (
            1e3 * sum(pair[side] for pair in seconds) / len(seconds) / options.steps
            for seconds in (times.wall_s, times.cpu_s)
        )
        print(f"{name}: {step_ms:.2f} ms a step, {cpu_ms:.2f} ms of CPU (means)")
    median, lower, upper = ratios(times.wall_s, 1)
    figures = {"median_ratio": median, "q25": lower, "q75": upper, "pairs": len(times.wall_s)}
    print(result_line(figures | {"cpu_median_ratio": ratios(times.cpu_s, 1)[0]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
