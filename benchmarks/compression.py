"""Time of a step whose gradients travel in fewer bytes against one of ddp, over a slow link, on two CPU processes.

    python -m benchmarks.compression [--rate-mbit 100] [--pairs 10] [--steps 16] [--width 256]

Needs root: the two workers run in a network namespace whose link `tc` limits to that rate. All sides run in the
same processes, in turns, in random order: --compress none, bf16, fp16 and powersgd of stormo's own steps, a loop of
one's own as `world.wrap` has it, with compress="bf16" and without, and a plain DDP loop with torch's PowerSGD hook of
the same rank (torch's 16-bit hooks do not run on Gloo). A ratio is a side's time over that of --compress none, turn by
turn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.command import result_line
from benchmarks.paired_timing import Times, Turn, ratios
from benchmarks.slow_link import add_options, run, step_lines, steps_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stormo.distributed.world import World

METHODS = ("none", "bf16", "fp16", "powersgd")
SCRIPTS = {"script": "none", "script_bf16": "bf16"}
SIDES = (*METHODS, *SCRIPTS, "torch_powersgd")


def side(world: World, method: str, options: argparse.Namespace) -> Turn:
    """Steps of stormo by one method, or of a plain loop."""
    from stormo.config.schema import Batch, Optimizer, Speed, TrainConfig, Workers

    if method in SCRIPTS:
        return _script(world, options, SCRIPTS[method])
    if method not in METHODS:
        return _plain(world, options)
    workers = Workers(num_gpus=world.size, strategy="ddp", device="cpu", compress_rank=options.rank)
    workers = replace(workers, compress=method)  # type: ignore[arg-type]
    config = TrainConfig(
        workers=workers,
        batch=Batch(batch_size=options.batch_size),
        optimizer=Optimizer(noise_scale=False),
        speed=Speed(precision="fp32"),
    )
    return steps_of(world, config, options.width)


def _script(world: World, options: argparse.Namespace, compress: str) -> Turn:
    from benchmarks.strategy_tasks import Wide
    from stormo.parallel.exchange import GradientExchange

    model = Wide(options.width).model()
    exchange = GradientExchange(model, world, compress=compress)

    def backward(loss: Tensor) -> None:
        exchange.arm()
        (loss / world.size).backward()
        exchange.finish()

    return _loop(world, options, model, backward)


def _plain(world: World, options: argparse.Namespace) -> Turn:
    from torch import Tensor
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks.strategy_tasks import Wide

    model = DistributedDataParallel(Wide(options.width).model(), gradient_as_bucket_view=True)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=options.rank, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return _loop(world, options, model, Tensor.backward)


def _loop(world: World, options: argparse.Namespace, model: nn.Module, backward: Callable[[Tensor], None]) -> Turn:
    import torch

    from benchmarks.strategy_tasks import Wide

    task = Wide(options.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = task.train_data().tensors
    rows = torch.arange(options.batch_size) + world.rank * options.batch_size

    def turn(num_steps: int) -> None:
        for _ in range(num_steps):
            backward(task.loss(model, (x[rows], y[rows])))
            optimizer.step()
            optimizer.zero_grad()

    return turn


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the ratios."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=4, help="of PowerSGD (default: 4)")
    add_options(parser)
    options = parser.parse_args(arguments)
    return run("benchmarks.compression", arguments, options, SIDES, side, _show)


def _show(times: Times, options: argparse.Namespace) -> None:
    print(*step_lines(SIDES, times, options), sep="\n")
    medians = {name: ratios(times.wall_s, index)[0] for index, name in enumerate(SIDES) if index}
    print(result_line({**medians, "pairs": len(times.wall_s)}) + f" rate_mbit={options.rate_mbit}")


if __name__ == "__main__":
    sys.exit(main())
