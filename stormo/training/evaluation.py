"""One rank of `stormo evaluate`: the whole model of a checkpoint on every rank, and the validation of the trainer."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stormo.config.layout import Layout
from stormo.config.plan.choices import choose_channels_last, choose_precision
from stormo.config.schema import TrainConfig
from stormo.data.generators import seed_generators
from stormo.data.order import derive_seed
from stormo.distributed.devices import device_of, share_cores
from stormo.distributed.store import Store
from stormo.distributed.world import World
from stormo.errors import EXIT_INTERRUPTED, EXIT_RESUMABLE
from stormo.launch import FailureReporter, RankInfo
from stormo.parallel.compression import HALF_DTYPES
from stormo.system.signals import stop_flag
from stormo.tasks.task import Task
from stormo.training.sanity_check import explain_errors
from stormo.training.trained_model import make_trained, read_weights
from stormo.training.trainer import make_batch, num_loader_workers, set_precision
from stormo.training.validation import Validation, metrics_or_signal


def evaluate(
    config: TrainConfig,
    layout: Layout,
    task: Task,
    find_checkpoint: Callable[[], Path],
    rank_info: RankInfo,
    store: Store | None,
    reporter: FailureReporter,
) -> dict[str, Any] | int:
    """The metrics of the whole validation set and of which checkpoint, on every rank; an exit code if a signal came.

    `find_checkpoint` is called on rank 0, which alone reads the checkpoint.
    """
    share_cores(rank_info)
    device = device_of(layout.device_type, rank_info, store, may_share=layout.may_share)
    with stop_flag(announces=rank_info.launcher == "alone") as flag:
        timeout_s = config.workers.timeout
        world = World(rank_info, device, store=store, backend=layout.backend, timeout_s=timeout_s, mesh=layout.mesh)
        with world.once_per_node() as is_fetcher:
            if is_fetcher:
                task.fetch()
        data = task.datasets()[1]
        checkpoint, step, weights = _weights(world, find_checkpoint)
        precision = choose_precision(config, layout)[0]
        set_precision(config, precision, autotune=bool(config.speed.autotune))
        torch.manual_seed(derive_seed(config.run.seed, "model"))
        model = make_trained(task, weights, checkpoint, precision).to(device)
        if choose_channels_last(config, layout, precision, compiled=False)[0]:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        seed_generators(derive_seed(config.run.seed, "worker", world.random_stream))
        validation = Validation(
            task,
            data,
            config.speed.validation_batch_size,
            world,
            resident=config.speed.loader != "streamed",
            num_loader_workers=num_loader_workers(config, world),
            make_batch=make_batch(task),
        )
        flag.is_training = True
        dtype = HALF_DTYPES.get(precision)
        autocast: Callable[[], Any] = nullcontext if dtype is None else partial(torch.autocast, device.type, dtype)
        with closing(validation), explain_errors(task, "validation_data", "metrics"):
            rounds = validation.run(model, autocast)
            metrics = metrics_or_signal(rounds, world, flag, lambda _: reporter.alive(step))
    world.close()
    if isinstance(metrics, int):
        return EXIT_INTERRUPTED if metrics == signal.SIGINT else EXIT_RESUMABLE
    return {"checkpoint": checkpoint, "step": step, "num_samples": validation.num_samples, "validation": metrics}


def _weights(world: World, find_checkpoint: Callable[[], Path]) -> tuple[str, int, dict[str, Tensor]]:
    """The checkpoint, its step and its weights, on all ranks."""
    weights: dict[str, Tensor] | None = None

    def read() -> list[Any]:
        nonlocal weights
        path = find_checkpoint()
        step, weights = read_weights(path)
        return [str(path), step]

    path, step = world.from_rank_0(read)
    return path, step, world.broadcast_tensors(weights)
