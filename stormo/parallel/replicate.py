"""Data parallelism: a replica on every worker, gradients averaged during backward (Li et al., arXiv 2006.15704)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stormo.data.loaders import Batch, Loader
from stormo.errors import SettingError
from stormo.optim.table import spare_compiler
from stormo.parallel.compression import Compression
from stormo.parallel.halves import HALVES, Halves
from stormo.parallel.low_rank import LowRank
from stormo.parallel.strategy import Strategy
from stormo.tasks.returned import unused_parameters, without_gradient
from stormo.tasks.task import Task

# Buffers start as rank 0's and are averaged before validation, not overwritten in every forward. Before torch 2.13 one
# switch stands for both, so there it is turned off once the replica is made.
_KEEP_BUFFERS: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else {}
)

_LATER = "in a later batch, and with several workers all must have one"


def replica(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """torch's own; it would load the compiler, which takes seconds, to ask whether that was set to another exchange."""
    if "torch._dynamo" not in sys.modules:
        spare_compiler(DistributedDataParallel)
        # What nobody has loaded, nobody has set.
        stand_in = SimpleNamespace(utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"))
        vars(torch)["_dynamo"] = stand_in
        try:
            return _replica(model, **options)
        except AttributeError as error:
            if error.obj is not stand_in and error.obj is not stand_in.utils:
                raise
            # A release that asks for something else, before it has done anything.
        finally:
            if vars(torch).get("_dynamo") is stand_in:
                del vars(torch)["_dynamo"]
    return _replica(model, **options)


def _replica(model: nn.Module, **options: Any) -> DistributedDataParallel:
    made = DistributedDataParallel(model, **options, **_KEEP_BUFFERS)
    if not _KEEP_BUFFERS:
        made.broadcast_buffers = False
    return made


def check_reached(task: Task, model: nn.Module, trained: Iterable[nn.Parameter]) -> None:
    """Before a step: refuse gradients that torch has not averaged, as a pass has not reached all that it waits for."""
    if not task.find_unused and any(parameter.grad is None and parameter.requires_grad for parameter in trained):
        raise unused_parameters(task, without_gradient(model), _LATER)


@contextmanager
def in_own_words(task: Task, model: nn.Module) -> Iterator[None]:
    """Say what torch says of such a pass when the next one begins: of several passes the last has to reach all."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "Expected to have finished reduction in the prior iteration" not in text:
            raise
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        numbers = text.partition("did not receive grad for rank")[2].partition(":")[2].split("\n")[0].split()
        names = [trained[int(number)] for number in numbers if number.isdecimal() and int(number) < len(trained)]
        raise unused_parameters(task, names or trained, _LATER) from error


def _arithmetic(device: torch.device) -> dict[str, Any]:
    """On what the last bits depend of what every worker computes by itself from the matrices that all have alike."""
    if device.type == "cuda":
        return {"GPU of --compress powersgd": torch.cuda.get_device_name(device)}
    return {
        "number of threads of --compress powersgd": torch.get_num_threads(),
        "instruction set of --compress powersgd": torch.backends.cpu.get_cpu_capability(),
    }


class Replicate(Strategy):
    """torch's DistributedDataParallel."""

    name = "ddp"
    _is_exchanging = False  # whether the pass under way is the last of its step
    _compression: Compression | None = None

    def _wrap(self, model: nn.Module) -> nn.Module:
        if self.world.size == 1:
            return model
        self._replica = replica(
            model,
            device_ids=[self.world.device] if self.world.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=self.task.find_unused,
        )
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # No method itself: torch reads annotations, and does not know them as text.
        if self._settings.workers.compress != "none":
            self._compression = Compression(self.world, self._method(model), self.noise_scale)
            self._replica.register_comm_hook(self._compression, lambda exchange, bucket: exchange.average(bucket))
        elif self.noise_scale is not None:
            self._replica.register_comm_hook(self.noise_scale, lambda meter, bucket: meter.average(bucket))
        return self._replica

    def _method(self, model: nn.Module) -> Halves | LowRank:
        """How gradients are sent in fewer bytes."""
        name = self._settings.workers.compress
        if name != "powersgd":
            return Halves(HALVES[name])
        self.world.require_same(_arithmetic(self.world.device))
        rank = self._settings.workers.compress_rank
        self.low_rank = LowRank(model, rank, self._settings.run.seed)
        if not self.low_rank.errors:
            raise SettingError(
                f"--compress powersgd was set with --compress-rank {rank}",
                "of no weight of this model would two matrices of that rank be half as large or less",
                "set --compress bf16" + ", or a smaller --compress-rank" * (rank > 1),
            )
        self.saves_apart = True
        return self.low_rank

    def warm_up(
        self, loader: Loader, batches: Iterable[Batch] | None = None, look: Callable[[Tensor], None] | None = None
    ) -> None:
        """Run first passes; nothing of their gradients is kept back for the first step."""
        if self.low_rank is not None:
            self.low_rank.is_rehearsal = True
        try:
            super().warm_up(loader, batches, look)
        finally:
            if self.low_rank is not None:
                self.low_rank.is_rehearsal = False

    def forward_backward(self, batch: Batch) -> Tensor:
        """As on one device; a parameter that the last pass has not reached ends it."""
        with in_own_words(self.task, self.module):
            return super().forward_backward(batch)

    def _collect_gradients(self) -> None:
        if self.world.size > 1:
            check_reached(self.task, self.module, self._trained)

    def _gradient_sync(self, is_last: bool) -> AbstractContextManager[Any]:
        if self.world.size == 1:
            return nullcontext()
        return self._exchange() if is_last else self._replica.no_sync()

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        self._is_exchanging = True
        try:
            yield
        finally:
            self._is_exchanging = False

    def _backward(self, loss: Tensor) -> None:
        if self._is_exchanging and loss.requires_grad:
            self._exposed.watch(loss)
        try:
            super()._backward(loss)
        except RuntimeError as error:
            if self._compression is not None and self._compression.failure is not None:
                raise self._compression.failure from error
            raise

    def _alone(self) -> nn.Module:
        return self.module  # DDP's hooks act only after a pass through its own forward
