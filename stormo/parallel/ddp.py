"""Data parallelism: a replica on every worker, gradients averaged during backward (Li et al., arXiv 2006.15704)."""

from __future__ import annotations

import inspect
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stormo.data.loaders import Batch, Loader
from stormo.errors import SettingError
from stormo.launch.torch_errors import unreduced_parameters
from stormo.optim.table import skip_compiler_import
from stormo.parallel.base import Strategy
from stormo.parallel.compression import HALF_DTYPES, Compression, HalfPrecision, PowerSgd
from stormo.profiling.ranges import range_of
from stormo.tasks.returned import unused_parameters, without_gradient
from stormo.tasks.task import Task

# Buffers start as rank 0's and are averaged before validation, not overwritten in every forward. Before torch 2.13 one
# switch does both, so it is turned off after the replica is built.
_KEEP_BUFFERS: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else {}
)

_LATER = "in a later batch, and with several workers all must have one"


def replica(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """torch's DDP without its import of the compiler, which takes seconds and only tells whether that is configured."""
    if "torch._dynamo" not in sys.modules:
        skip_compiler_import(DistributedDataParallel)
        # The compiler is not loaded, so nobody has configured it.
        stand_in = SimpleNamespace(utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"))
        vars(torch)["_dynamo"] = stand_in
        try:
            return _replica(model, **options)
        except AttributeError as error:
            if error.obj is not stand_in and error.obj is not stand_in.utils:
                raise
            # Another release of torch asks for something else, before it has done anything.
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
    """Before a step: refuse gradients that DDP has not averaged because some parameters had none."""
    if not task.find_unused and any(parameter.grad is None and parameter.requires_grad for parameter in trained):
        raise unused_parameters(task, without_gradient(model), _LATER)


@contextmanager
def name_unused_parameters(task: Task, model: nn.Module) -> Iterator[None]:
    """Name the parameters without a gradient, for which DDP raises an error in the next forward."""
    try:
        yield
    except RuntimeError as error:
        numbers = unreduced_parameters(error)
        if numbers is None:
            raise
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        names = [trained[number] for number in numbers if number < len(trained)]
        raise unused_parameters(task, names or trained, _LATER) from error


def _arithmetic(device: torch.device) -> dict[str, Any]:
    """What must be equal on all workers, so that they compute the same bits from the same matrices."""
    if device.type == "cuda":
        return {"GPU of --compress powersgd": torch.cuda.get_device_name(device)}
    return {
        "number of threads of --compress powersgd": torch.get_num_threads(),
        "instruction set of --compress powersgd": torch.backends.cpu.get_cpu_capability(),
    }


class Ddp(Strategy):
    """torch's DistributedDataParallel."""

    _is_exchanging = False  # whether this micro-batch is the last of its step
    _compression: Compression | None = None

    def _wrap(self, model: nn.Module) -> nn.Module:
        self._exposed = ExposedWait(self.world.device)
        if self.world.size == 1:
            return model
        self._replica = replica(
            model,
            device_ids=[self.world.device] if self.world.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=self.task.find_unused,
            bucket_cap_mb=None if self.world.link is None else self.world.link.bucket_mb,
        )
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # A lambda, because torch evaluates the annotations of a hook, which are strings here.
        if self._settings.workers.compress != "none":
            self._compression = Compression(self.world, self._method(model), self.noise_scale)
            self._replica.register_comm_hook(self._compression, lambda exchange, bucket: exchange.average(bucket))
        elif self.noise_scale is not None:
            self._replica.register_comm_hook(self.noise_scale, lambda meter, bucket: meter.average(bucket))
        return self._replica

    def _method(self, model: nn.Module) -> HalfPrecision | PowerSgd:
        """The compression method."""
        name = self._settings.workers.compress
        if name != "powersgd":
            return HalfPrecision(HALF_DTYPES[name])
        self.world.require_same(_arithmetic(self.world.device))
        rank = self._settings.workers.compress_rank
        self.powersgd = PowerSgd(model, rank, self._settings.run.seed)
        if not self.powersgd.errors:
            raise SettingError(
                f"--compress powersgd was set with --compress-rank {rank}",
                "for no weight of this model are two matrices of that rank at most half as large",
                "set --compress bf16" + ", or a smaller --compress-rank" * (rank > 1),
            )
        self.sharded_checkpoint = True
        return self.powersgd

    def warm_up(
        self, loader: Loader, batches: Iterable[Batch] | None = None, on_loss: Callable[[Tensor], None] | None = None
    ) -> None:
        """As on one device; error feedback and waiting times are not kept."""
        if self.powersgd is not None:
            self.powersgd.is_rehearsal = True
        try:
            super().warm_up(loader, batches, on_loss)
        finally:
            if self.powersgd is not None:
                self.powersgd.is_rehearsal = False
        self._exposed.reset()

    @property
    def exposed_s(self) -> float | None:
        """Seconds from this worker's last gradient to the last sum; on a GPU of the finished steps."""
        return self._exposed.total_s

    def micro_step(self, batch: Batch) -> Tensor:
        """As on one device; an error of DDP names unused parameters."""
        with name_unused_parameters(self.task, self.module):
            return super().micro_step(batch)

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

    def _local_model(self) -> nn.Module:
        return self.module  # DDP's hooks act only after its own forward


class DataParallel(Strategy):
    """torch's DataParallel: one process, a thread for each GPU; kept for comparison, DDP is faster."""

    measures_exposed_wait = False  # it copies between its GPUs throughout every micro-batch

    def _wrap(self, model: nn.Module) -> nn.Module:
        return nn.DataParallel(model, device_ids=list(range(self._plan.layout.devices_per_worker)))


_Pair = tuple[torch.cuda.Event, torch.cuda.Event]


class ExposedWait:
    """How long a worker waits for others' gradients: from its own last gradient to the last sum.

    Measured by the host's clock, or on a GPU by events on the compute stream, in callbacks of autograd before and after
    DDP's own. The exchange keeps its bits, and a step costs three calls.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._total_s = 0.0
        self._began_s = 0.0
        self._range: AbstractContextManager[Any] | None = None
        self._pair: _Pair | None = None  # of this step
        self._pending: deque[_Pair] = deque()  # of steps that the device has not finished
        self._free: list[_Pair] = []

    @property
    def total_s(self) -> float:
        """Seconds so far; on a GPU of the finished steps."""
        self._collect()
        return self._total_s

    def reset(self) -> None:
        """Start again at zero."""
        self._pending.clear()
        self._total_s = 0.0

    def watch(self, loss: Tensor) -> None:
        """The next backward is of this loss and exchanges gradients."""
        loss.register_hook(self._begin)

    def _begin(self, gradient: Tensor) -> None:
        # Callbacks run in order after all gradients are computed; DDP adds its own later, with its last bucket.
        _queue_callback(self._gradients_computed)

    def _gradients_computed(self) -> None:
        _queue_callback(self._gradients_received)  # after DDP's
        self._range = range_of("exchange")
        self._range.__enter__()
        if self._device.type == "cuda":
            self._collect()
            self._pair = self._free.pop() if self._free else (_event(), _event())
            self._pair[0].record(torch.cuda.current_stream(self._device))
        else:
            self._began_s = time.perf_counter()

    def _gradients_received(self) -> None:
        if self._pair is not None:
            # The stream already waits for the sums; the host may be far ahead of it.
            self._pair[1].record(torch.cuda.current_stream(self._device))
            self._pending.append(self._pair)
            self._pair = None
        else:
            self._total_s += time.perf_counter() - self._began_s
        assert self._range is not None
        self._range.__exit__(None, None, None)

    def _collect(self) -> None:
        while self._pending and self._pending[0][1].query():
            first, last = self._pending.popleft()
            self._total_s += first.elapsed_time(last) / 1e3  # of milliseconds
            self._free.append((first, last))


def _queue_callback(function: Callable[[], None]) -> None:
    """Call a function at the end of this backward. torch has no public call for it."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
