"""A worker of a job that does not exist: any rank of hundreds, in one process, without memory for weights.

The process group is torch's "fake" one, whose collectives return at once; tensors are fake, with shapes and no values.
The strategies are the real ones. What cannot be had so is replaced: DDP, whose C++ part reads values; the exchange
between the stages of a pipeline, each of which is given an input of the right shape instead; and what workers of the
hybrid exchange their numbers of samples, which are equal here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.strategy_tasks import Words
from stormo.config import options
from stormo.config.layout import resolve_layout
from stormo.config.plan import resolve
from stormo.data.loaders import Batch
from stormo.data.order import MicroBatch
from stormo.distributed.world import World
from stormo.launch import RankInfo
from stormo.parallel import ddp, fsdp
from stormo.parallel.base import Strategy
from stormo.parallel.meta_init import materialize
from stormo.parallel.table import strategy_class
from stormo.parallel.tensor import hybrid
from stormo.tasks.language_model import Size
from stormo.tasks.task import Task

PER_NODE = 8
_BATCH = 4  # samples of a worker in a micro-batch; activations do not matter here


class FakeWorld(World):
    """One rank of a simulated job."""

    def __init__(self, rank: int, size: int) -> None:
        rank_info = RankInfo(
            launcher="local",
            rank=rank,
            world_size=size,
            local_rank=rank % PER_NODE,
            local_size=PER_NODE,
            node_id=rank // PER_NODE,
            num_nodes=size // PER_NODE,
            master_addr="127.0.0.1",
            master_port=29500,
            host="localhost",
        )
        super().__init__(rank_info, torch.device("cpu"))

    def _join(self, backend: str, timeout: Any) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=self.rank, world_size=self.size)


class _Copies(nn.Module):
    """In place of DDP: with gradients as views of its buckets, which is how stormo has it, it holds no other memory."""

    def __init__(self, module: nn.Module, **_: Any) -> None:
        super().__init__()
        self.module = module

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, names: list[str]) -> None:
        """Say which parameters are not copied."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        return self.module(*args, **kwargs)

    def no_sync(self) -> Any:
        """Nothing is exchanged anyway."""
        return nullcontext()


def _without_values(kind: type[Strategy], fake: FakeTensorMode, size: Size) -> type[Strategy]:
    """A strategy whose weights have only shapes, and whose pipeline stages need no peers."""

    class Unfilled(kind):  # type: ignore[misc, valid-type]
        def _make_model(self) -> nn.Module:
            if self.is_sharded:
                return super()._make_model()  # type: ignore[no-any-return]
            model, _ = _blank(self.world, self.task, [])
            with fake:
                model.to_empty(device="cpu")
            self._make_optimizer(model)
            return model

        def _fill(self, model: nn.Module, value: Any) -> None:
            with fake:
                materialize(model, torch.device("cpu"))

        def _costs(self, model: nn.Module, pieces: Any) -> list[float]:
            return [float(sum(parameter.numel() for parameter in piece.parameters())) for piece in pieces.items]

        def _forward_backward(self, model: nn.Module, data: Any, weight: float) -> Tensor:
            if not hasattr(self, "_stages"):
                return super()._forward_backward(model, data, weight)  # type: ignore[no-any-return]
            tokens = data[0].long()[:, :-1]
            for number, stage in zip(self._numbers, self._stages, strict=True):
                shape = (*tokens.shape, size.width)
                stage(tokens if number == 0 else torch.zeros(shape, requires_grad=True)).sum().backward()
            return torch.zeros(())

    return Unfilled


def _all_alike(exchange: Any, num_samples: int, is_random: bool) -> tuple[list[int], int]:
    return [num_samples] * exchange._group.size, 0


def _blank(world: World, task: Task, notices: list[str]) -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        return task.model(), None


@contextmanager
def stepped(flags: Mapping[str, Any], size: Size, rank: int, num_ranks: int) -> Iterator[tuple[Strategy, Task]]:
    """A strategy after forward, backward and a step, with its gradients still there."""
    world = FakeWorld(rank, num_ranks)
    try:
        task = Words(size, _BATCH * num_ranks)
        given = {"device": "cpu", "num_gpus": PER_NODE, "num_nodes": num_ranks // PER_NODE, "batch_size": _BATCH}
        named = {"precision": "fp32", "optimizer": "adamw", "noise_scale": False}
        config = options.make_config({**given, **named, **flags}, None)
        plan = resolve(config, resolve_layout(config, ()), task.facts())
        kind, fake = strategy_class(plan.layout), FakeTensorMode(allow_non_fake_inputs=True)
        with (
            warnings.catch_warnings(),
            mock.patch.object(fsdp, "meta_model", _blank),
            mock.patch.object(fsdp, "DistributedDataParallel", _Copies),
            mock.patch.object(ddp, "DistributedDataParallel", _Copies),
            mock.patch.object(hybrid._Exchange, "_announce", _all_alike),
        ):
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # only compared
            warnings.filterwarnings("ignore", "Set timeout is now only supported")  # there are no peers
            world.arrange(plan.layout.mesh, plan.layout.spec.data_axes)
            strategy = _without_values(kind, fake, size)(world, plan, task, config)
            with fake:
                windows = torch.zeros((_BATCH, size.block + 1), dtype=torch.uint8)
                span = MicroBatch(0, _BATCH, 0, plan.global_batch_size, is_first=True, is_last=True)
                strategy.module.train()
                strategy.micro_step(Batch((windows,), span, is_padding=False))
                strategy._collect_gradients()
                strategy.optimizer.step()
                yield strategy, task
    finally:
        world.close()
