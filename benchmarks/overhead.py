"""Steps per second of stormo's loop against a hand-written DDP loop that does the same work, on two CPU processes.

    python -m benchmarks.overhead [--pairs 60] [--steps 20]

Both run in the same two processes (Gloo, one thread each), in turns of a few steps, in random order within a pair, so
that other load on the machine affects both equally. stormo's turns are its true `loop.train` with the parts that a
real worker puts together and everything on that is on by default: votes, records to console, event file and
TensorBoard, sample-order digest, signs of life; no checkpoints. The hand-written loop has the same network, data in
memory, batch, loss and fused optimizer, and DDP with its defaults. A second hand-written loop gives DDP the options
that stormo gives it (no broadcast of buffers, gradients as views), which leaves the loop alone to compare.
A ratio is stormo's steps per second over the other's, pair by pair; its median must reach 0.98. CPU time a step is
shown beside, which shows on a busy machine whether a difference is work or waiting.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from benchmarks.command import data_folder, result_line, small_task
from benchmarks.paired_timing import NUM_WORKERS, Times, ratios, take_turns, times_of_workers

if TYPE_CHECKING:
    from stormo.training.context import RunContext
    from stormo.training.loop import Outcome

PROMISED = 0.98
SIDES = ("stormo", "hand-written", "hand-written, stormo's DDP options")
_LEARNING_RATE, _MOMENTUM = 0.01, 0.9


def stormo_side(run: RunContext) -> Callable[[int], None]:
    """Turns of stormo's loop; a turn begins an epoch and is ended by the stop flag, as a signal would end it."""
    from stormo.system.signals import StopFlag
    from stormo.training.loop import train

    progress = run.state.progress

    def turn(num_steps: int) -> None:
        flag = StopFlag()
        last_step = progress.step + num_steps
        progress.epoch, progress.position = progress.epoch + 1, 0
        run.state.loss_sum.zero_()

        def heartbeat(step: int) -> None:
            run.heartbeat(step)
            if step == last_step - 1:
                flag.signal_number = signal.SIGTERM  # agreed on in the step to come, the last one

        outcome = train(dataclasses.replace(run, stop_flag=flag, heartbeat=heartbeat, save=lambda metric: None))
        assert (outcome.stopped_by, progress.step) == ("signal", last_step)

    return turn


def hand_written_side(run: RunContext, *, is_tuned: bool) -> Callable[[int], None]:
    """Turns of a loop as a user of DDP would write it; nothing but the network and the data comes from stormo."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel

    from stormo.parallel.ddp import replica

    task, rank = run.state.strategy.task, run.world.rank
    global_batch_size = run.plan.global_batch_size
    batch_size = global_batch_size // NUM_WORKERS
    images, labels = task.train_data().tensors  # type: ignore[attr-defined]
    model = task.model()
    wrapped = replica(model, gradient_as_bucket_view=True) if is_tuned else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE, momentum=_MOMENTUM, fused=True)
    generator = torch.Generator().manual_seed(0)

    def turn(num_steps: int) -> None:
        model.train()
        order = torch.randperm(len(images), generator=generator)
        for step in range(num_steps):
            start = step * global_batch_size + rank * batch_size
            rows = order[start : start + batch_size]
            batch = images[rows].unsqueeze(1).float().div_(255)
            optimizer.zero_grad()
            loss = F.cross_entropy(wrapped(batch), labels[rows])
            loss.backward()
            optimizer.step()
        dist.all_reduce(torch.zeros(1))  # stormo's turns end with the slowest worker too

    return turn


def measure(run: RunContext, num_pairs: int, num_steps: int) -> Times:
    """Let the sides take turns."""
    turns = (stormo_side(run), hand_written_side(run, is_tuned=False), hand_written_side(run, is_tuned=True))
    return take_turns(run.world, turns, num_pairs, num_steps)


def work(folder: Path, flags: Sequence[str], num_pairs: int, num_steps: int) -> int:
    """Be one of the two workers: put a real one together, and measure where it would train."""
    from stormo.config.layout import resolve_layout
    from stormo.distributed.store import Store
    from stormo.launch import open_failure_reporter
    from stormo.launch.environments import local
    from stormo.training import trainer
    from stormo.training.loop import Outcome
    from stormo.training.settings import read_settings

    def measure_instead(run: RunContext) -> Outcome:
        times = measure(run, num_pairs, num_steps)
        if run.world.is_main:
            times.save(folder)
        return Outcome("epochs")

    config, task_class = read_settings(list(flags))
    rank_info = local.rank_info(os.environ)
    reporter = open_failure_reporter(rank_info)
    store = Store(rank_info, config.workers.timeout)
    task = task_class(config.task_options)
    with mock.patch.object(trainer, "train", measure_instead):
        code = trainer.run_worker(config, resolve_layout(config, []), task, rank_info, store, reporter)
    reporter.close()
    return code


def flags(options: argparse.Namespace, folder: Path) -> list[str]:
    """The settings of stormo's side."""
    num_samples = options.steps * options.batch_size * NUM_WORKERS * 2  # a turn never reaches the end of an epoch
    arguments = [
        small_task("Small"),
        *("--task.width", str(options.width), "--task.dropout", "0", "--task.train-samples", str(num_samples)),
        *("--task.validation-samples", "10", "--batch-size", str(options.batch_size), "--device", "cpu"),
        *("--num-gpus", str(NUM_WORKERS), "--base-lr", str(_LEARNING_RATE), "--lr-rule", "none"),
        *("--momentum", str(_MOMENTUM), "--warmup-epochs", "0", "--epochs", "1000000", "--checkpoint-every", "0"),
        *("--runs-folder", str(folder), "--run-name", "overhead"),
    ]
    return [*arguments, "--task.data-folder", options.data_folder]


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the two workers, which are this very command, and print what they measured."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60, help="turns of each side (default: 60)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of a turn (default: 20)")
    parser.add_argument("--batch-size", type=int, default=64, help="samples of one worker in a step (default: 64)")
    parser.add_argument("--width", type=int, default=2, help="of the small network (default: 2)")
    parser.add_argument("--data-folder", help="with the files of Fashion-MNIST; default: where stormo keeps them")
    parser.add_argument("--worker-folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.data_folder = data_folder(options.data_folder)
    if options.worker_folder:
        return work(options.worker_folder, flags(options, options.worker_folder), options.pairs, options.steps)
    times = times_of_workers("benchmarks.overhead", arguments)
    for side, name in enumerate(SIDES):
        step_ms, cpu_ms = (
            1e3 * statistics.median(pair[side] for pair in seconds) / options.steps
            for seconds in (times.wall_s, times.cpu_s)
        )
        against = ""
        if side:
            median, lower, upper = ratios(times.wall_s, side)
            against = f"; stormo / it: median {median:.4f}, quartiles {lower:.4f} to {upper:.4f}"
        print(f"{name}: {step_ms:.2f} ms a step, {cpu_ms:.2f} ms of CPU{against}")
    median, lower, upper = ratios(times.wall_s, 1)
    figures = {"median_ratio": median, "q25": lower, "q75": upper, "pairs": len(times.wall_s)}
    figures |= {"same_ddp_median_ratio": ratios(times.wall_s, 2)[0], "cpu_median_ratio": ratios(times.cpu_s, 1)[0]}
    print(result_line(figures))
    return 0 if median >= PROMISED else 1


if __name__ == "__main__":
    sys.exit(main())
