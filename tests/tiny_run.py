"""The parts of a run of the tiny task, put together as a worker does it, for tests that look inside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stormo import checkpoint
from stormo.config import options
from stormo.config.layout import resolve_layout
from stormo.config.plan import Plan, resolve
from stormo.config.schema import TrainConfig
from stormo.data.loaders import Batch, Loader, ResidentLoader, Share, StreamedLoader
from stormo.data.order import derive_seed
from stormo.data.tensors import TensorData
from stormo.distributed.world import World
from stormo.parallel.base import Strategy
from stormo.parallel.table import strategy_class
from stormo.system.hardware import visible_gpus
from stormo.tasks.task import Task
from stormo.training.state import Progress, RunState
from tests.tiny_task import Tiny, TinyOptions


@dataclass(kw_only=True)
class Parts:
    """What a worker holds before it trains."""

    world: World
    config: TrainConfig
    plan: Plan
    task: Task
    strategy: Strategy
    loader: Loader
    state: RunState


def build(
    world: World, task_options: dict[str, Any] | None = None, *, task_class: type[Task] = Tiny, **flags: Any
) -> Parts:
    """A run of the tiny task, not yet warmed up; sets torch's default type where the precision asks."""
    is_gpu = world.device.type == "cuda"
    backend = "nccl" if is_gpu else "auto"  # each rank sees its own GPU alone
    flags = {
        "warmup_epochs": 0.0,
        "lr_rule": "none",
        "base_lr": 0.1,
        "num_gpus": world.size,
        "backend": backend,
        **flags,
    }
    config = options.make_config(flags, None)
    task = task_class(TinyOptions(**(task_options or {})))
    plan = resolve(config, resolve_layout(config, visible_gpus() if is_gpu else ()), task.facts())
    world.arrange(plan.layout.mesh, plan.layout.spec.data_axes)
    torch.set_default_dtype(torch.float64 if plan.precision == "fp64" else torch.float32)
    torch.manual_seed(derive_seed(config.run.seed, "model"))
    strategy = strategy_class(plan.layout, task)(world, plan, task, config)
    torch.manual_seed(derive_seed(config.run.seed, "worker", world.random_stream))
    loss_sum = torch.zeros((), dtype=torch.float64, device=world.device)
    return Parts(
        world=world,
        config=config,
        plan=plan,
        task=task,
        strategy=strategy,
        loader=_loader(config, plan, task, world),
        state=RunState(progress=Progress(), strategy=strategy, loss_sum=loss_sum),
    )


def _loader(config: TrainConfig, plan: Plan, task: Task, world: World) -> Loader:
    share = Share(
        global_batch_size=plan.global_batch_size,
        accumulate=plan.accumulate,
        worker=world.data.rank,
        num_workers=world.data.size,
    )
    data = task.train_data()
    if isinstance(data, TensorData):
        return ResidentLoader(data, share, config.run.seed, task.num_draws, task.augment, world.device)
    return StreamedLoader(data, share, config.run.seed, task.num_draws, task.augment, world.device, 0)


def steps(parts: Parts, num_steps: int) -> list[float]:
    """Take so many steps, over the ends of epochs; return the loss of each global batch."""
    progress, losses, sum_of_passes = parts.state.progress, list[float](), torch.zeros(())
    for batch in _batches(parts):
        if batch.span.is_first:
            if len(losses) == num_steps:
                return losses
            sum_of_passes = torch.zeros((), dtype=torch.float64, device=parts.world.device)
        sum_of_passes += parts.strategy.micro_step(batch)
        if batch.span.is_last:
            parts.strategy.step(parts.plan.learning_rate)
            progress.advance(parts.loader.samples(batch.span))
            parts.strategy.exchange_weights()
            mean = parts.state.add_loss(sum_of_passes, batch.span.step_samples)
            losses.append(float(parts.world.sum(mean.detach().cpu().double())))
    raise AssertionError("epochs never end")


def _batches(parts: Parts) -> Iterator[Batch]:
    progress = parts.state.progress
    while True:
        yield from parts.loader.epoch(progress.epoch, progress.position)
        progress.epoch, progress.position = progress.epoch + 1, 0


def save(parts: Parts, folder: str) -> str:
    """Save a checkpoint of it into a folder; its path, on all workers."""
    world, saver = parts.world, checkpoint.Saver(parts.world, in_background=False)
    saving = checkpoint.RetentionPolicy(
        step=parts.state.progress.step, identity="x", keep_last=9, keep_best=0, metric=None
    )
    saver.begin(parts.state.content(world, 0), Path(folder) if world.is_main else None, saving)
    saver.wait()
    done = saver.finished()
    path: str = world.broadcast_object(str(done.saved.path) if done is not None else None)
    return path


def arrays(tensors: Any) -> dict[str, Any]:
    """Named tensors as NumPy arrays, which travel between processes by value."""
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in tensors}


def optimizer_arrays(strategy: Strategy) -> dict[str, Any]:
    """The optimizer's state by parameter and key."""
    return {
        f"{name}/{key}": value.detach().cpu().numpy().copy() if isinstance(value, torch.Tensor) else np.array(value)
        for name, parameter in strategy.module.named_parameters()
        for key, value in strategy.optimizer.state.get(parameter, {}).items()
        if value is not None
    }


def whole_state(parts: Parts) -> dict[str, Any]:
    """Everything that must be the same to the last bit in two runs that are one."""
    return {
        **arrays(parts.strategy.module.named_parameters()),
        **arrays(parts.strategy.module.named_buffers()),
        **optimizer_arrays(parts.strategy),
        **(
            {}
            if (average := parts.strategy.average) is None
            else arrays((s.name + "/ema", t) for s, t in average.shards)
        ),
        "loss_sum": float(parts.state.loss_sum),
        "torch_rng": torch.get_rng_state().numpy().copy(),
        "lr": [group["lr"] for group in parts.strategy.optimizer.param_groups],
        "scaler": dict(parts.strategy.scaler.state_dict()),
    }


def assert_same_bits(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Both hold the same names and the same bits."""
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert np.array_equal(value, second[name]), name
