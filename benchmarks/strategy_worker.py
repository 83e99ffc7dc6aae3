"""Inside a rank of a benchmark: builds a strategy as a worker does, takes steps, and returns its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from stormo.config import options
from stormo.config.layout import resolve_layout
from stormo.config.plan import Plan, resolve
from stormo.config.schema import TrainConfig
from stormo.data.generators import seed_generators
from stormo.data.loaders import Batch, Loader, ResidentLoader, Share
from stormo.data.order import derive_seed
from stormo.data.tensors import TensorData
from stormo.distributed.world import World
from stormo.launch import alone
from stormo.parallel.base import Strategy
from stormo.parallel.table import strategy_class
from stormo.system.hardware import visible_gpus
from stormo.tasks.task import Task
from stormo.training.trainer import set_arithmetic

Flags = Mapping[str, Any]  # settings by field name


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """One rank's chunk of a tensor: a weight, or a tensor of the optimizer's state."""

    name: str
    whole_shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: numpy.ndarray[Any, Any]
    is_saved: bool  # True on one rank per replica

    @property
    def slices(self) -> tuple[slice, ...]:
        """Its position in the whole tensor."""
        return tuple(slice(at, at + size) for at, size in zip(self.offset, self.values.shape, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """What a rank trains with."""

    config: TrainConfig
    plan: Plan
    strategy: Strategy
    loader: Loader


def build(world: World, task: Task, flags: Flags, change: Callable[[Strategy], None] | None = None) -> Built:
    """A strategy with the initial model of a single process; `change` is called before the first step."""
    backend = "nccl" if world.device.type == "cuda" else "gloo"  # each rank sees its own GPU alone
    given = {"device": world.device.type, "backend": backend, "num_gpus": world.size, "warmup_epochs": 0.0, **flags}
    config = options.make_config(given, None)
    plan = resolve(config, resolve_layout(config, visible_gpus()), task.facts())
    world.arrange(plan.layout.mesh, plan.layout.spec.data_axes)
    set_arithmetic(config, plan)
    torch.manual_seed(derive_seed(config.run.seed, "model"))
    strategy = strategy_class(plan.layout, task)(world, plan, task, config)
    seed_generators(derive_seed(config.run.seed, "worker", world.random_stream))
    if change is not None:
        change(strategy)
    strategy.module.train()
    return Built(config=config, plan=plan, strategy=strategy, loader=_loader(config, plan, task, world))


def _loader(config: TrainConfig, plan: Plan, task: Task, world: World) -> Loader:
    share = Share(
        global_batch_size=plan.global_batch_size,
        accumulate=plan.accumulate,
        worker=world.data.rank,
        num_workers=world.data.size,
    )
    data = task.datasets()[0]
    assert isinstance(data, TensorData)
    return ResidentLoader(data, share, config.run.seed, task.num_draws, task.augment, world.device)


def single_world(device: torch.device) -> World:
    """A world of this one process, with the process group that sharding needs."""
    return World(alone(), device, backend="nccl" if device.type == "cuda" else "gloo", needs_group=True)


def batches(loader: Loader) -> Iterator[Batch]:
    """Epoch after epoch, without end."""
    epoch = 0
    while True:
        epoch += 1
        yield from loader.epoch(epoch)


def train(world: World, built: Built, num_steps: int, learning_rate: float) -> list[float]:
    """Take steps with a learning rate that falls to half; return the loss of each global batch."""
    losses: list[float] = []
    loss = torch.zeros((), dtype=torch.float64)
    for batch in batches(built.loader):
        loss += built.strategy.micro_step(batch).cpu()
        if batch.span.is_last:
            built.strategy.step(learning_rate * (1 - len(losses) / (2 * num_steps)))
            built.strategy.exchange_weights()
            losses.append(float(world.sum(loss)))
            loss = torch.zeros((), dtype=torch.float64)
            if len(losses) == num_steps:
                break
    return losses


def chunks(strategy: Strategy) -> list[Chunk]:
    """Weights and optimizer state of this rank; what is a single number for a whole parameter has no shape."""
    found = []
    averages = {} if strategy.average is None else {part.local: {"ema": each} for part, each in strategy.average.shards}
    for part in strategy.shards():
        kept = {**strategy.optimizer.state.get(part.local, {}), **averages.get(part.local, {})}
        for name, value in {part.name: part.local, **{f"{part.name}/{key}": kept[key] for key in kept}}.items():
            if value is None:
                continue
            values = torch.as_tensor(value).detach().cpu().numpy().copy()
            is_number = not values.shape
            found.append(
                Chunk(
                    name=name,
                    whole_shape=() if is_number else part.whole_shape,
                    offset=() if is_number else part.offset,
                    values=values,
                    is_saved=part.is_saved,
                )
            )
    return found


def buffers(strategy: Strategy) -> dict[str, numpy.ndarray[Any, Any]]:
    """Running statistics and the like."""
    averages = {} if strategy.average is None else strategy.average.buffers
    found = {**dict(strategy.named_buffers()), **{f"{name}/ema": each for name, each in averages.items()}}
    return {name: buffer.detach().cpu().numpy().copy() for name, buffer in found.items()}
