"""Data parallelism: a replica on every worker, gradients averaged during backward (Li et al., arXiv 2006.15704)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stormo.config import schema
from stormo.config.plan import Plan
from stormo.data.loaders import Batch
from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.launch.torch_errors import unreduced_parameters
from stormo.layers.sync_batch_norm import synchronised_norms
from stormo.optim.table import skip_compiler_import
from stormo.parallel.base import Strategy
from stormo.parallel.compression import HALF_DTYPES, Compression, HalfPrecision, PowerSgd
from stormo.parallel.cuda_graph import leave_default_stream
from stormo.parallel.exposed import queue_callback
from stormo.parallel.gradient_noise import NoiseScaleMeter, begin_sum
from stormo.tasks.returned import unused_parameters, without_gradient
from stormo.tasks.task import Task

Average = Callable[[dist.GradBucket], torch.futures.Future[Tensor]]

# Buffers start as rank 0's and are averaged before validation, not overwritten in every forward. Before torch 2.13 one
# switch does both, so it is turned off after the replica is built.
_KEEP_BUFFERS: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else {}
)

_LATER = "in a later batch, and with several workers all must have one"
_STEPS_BEFORE_CAPTURE = 12  # in its first ones DDP times itself, with events that a capture does not take
_NO_GRAPH_UNUSED = "the task has find_unused = True, and which parameters a batch leaves out is found by Python"


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


def _mean(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return begin_sum(bucket.buffer().div_(dist.get_world_size(group)), group=group)


def align_strides(model: nn.Module) -> None:
    """Let gradients have the strides of their parameters also along sides of length 1, where any stride is right.

    DDP compares strides literally: it would warn, and copy such a gradient in every step.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and 1 in parameter.shape:
            parameter.register_hook(partial(_with_strides, parameter.stride()))


def _with_strides(strides: tuple[int, ...], gradient: Tensor) -> Tensor:
    own = gradient.stride() if gradient.layout is torch.strided else strides
    if own == strides or any(a != b for a, b, size in zip(own, strides, gradient.shape, strict=True) if size > 1):
        return gradient
    return gradient.as_strided(gradient.shape, strides)


def _arithmetic(device: torch.device) -> dict[str, Any]:
    """What must be equal on all workers, so that they compute the same bits from the same matrices."""
    if device.type == "cuda":
        return {"GPU of --compress powersgd": torch.cuda.get_device_name(device)}
    return {
        "number of threads of --compress powersgd": torch.get_num_threads(),
        "instruction set of --compress powersgd": torch.backends.cpu.get_cpu_capability(),
    }


class AfterBackward:
    """Starts the exchange of all buckets once backward has computed the last gradient.

    DDP sends the bucket of unused parameters before the sums of batch norms in backward, and that of used ones after
    them. Where workers use different parameters, two communicators of NCCL would be used in different orders: each
    worker holds its GPU for a message that another one starts later, and none continues. A worker without a batch norm
    would wait for the gradients of another one that waits for its statistics: `check` comes first, and refuses that.
    """

    def __init__(self, average: Average, check: Callable[[], None], device: torch.device) -> None:
        self._average = average
        self._check = check
        self._devices: list[int | str | torch.device] | None = [device] if device.type == "cuda" else None
        self._held: list[tuple[dist.GradBucket, torch.futures.Future[Tensor]]] = []

    def __call__(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket later."""
        if bucket.index() == 0:
            self._held = []  # of a backward that failed
            queue_callback(self._start)
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=self._devices)
        self._held.append((bucket, future))
        return future

    def _start(self) -> None:
        self._check()
        started = [(future, self._average(bucket)) for bucket, future in self._held]
        self._held = []
        for future, average in started:
            future.set_result(average.wait())


class Replicated(Strategy):
    """What strategies share that may average gradients by torch's DistributedDataParallel."""

    _replica: DistributedDataParallel | None = None  # set by `_replicate`
    _is_exchanging = False  # whether this micro-batch is the last of its step

    def __init__(self, world: World, plan: Plan, task: Task, settings: schema.TrainConfig) -> None:
        if plan.graph and world.size > 1:
            leave_default_stream(world.device)
        super().__init__(world, plan, task, settings)

    def _replicate(
        self, model: nn.Module, average: Average | None = None, group: dist.ProcessGroup | None = None, **options: Any
    ) -> DistributedDataParallel:
        """Let DDP average the gradients of a model; `average`: of a bucket, by another way than DDP's own."""
        align_strides(model)
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._replica = replica(
            model,
            device_ids=[self.world.device] if self.world.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=self.task.find_unused,
            process_group=group,
            **options,
        )
        if self.task.find_unused and synchronised_norms(model):
            average = AfterBackward(average or partial(_mean, group), self._end_micro_batch, self.world.device)
        if average is not None:
            # A lambda, because torch evaluates the annotations of a hook, which are strings here.
            self._replica.register_comm_hook(average, lambda average, bucket: average(bucket))
        return self._replica

    def _gradient_sync(self, is_last: bool) -> AbstractContextManager[Any]:
        self._is_exchanging = is_last
        return nullcontext() if is_last or self._replica is None else self._replica.no_sync()

    def micro_step(self, batch: Batch) -> Tensor:
        """As on one device; names the parameters without a gradient, for which DDP raises an error a forward later."""
        try:
            return super().micro_step(batch)
        except RuntimeError as error:
            numbers = unreduced_parameters(error)
            if numbers is None:
                raise
            trained = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
            names = [trained[number] for number in numbers if number < len(trained)]
            raise unused_parameters(self.task, names or trained, _LATER) from error

    def _backward(self, loss: Tensor) -> None:
        is_exchanging = self._replica is not None and self._is_exchanging and not self._is_trying
        if is_exchanging and loss.requires_grad:
            self.exposed.watch_backward(loss)
        super()._backward(loss)

    def _collect_gradients(self) -> None:
        """Refuse gradients that DDP has not averaged because some parameters had none."""
        if self._replica is None or self.task.find_unused:
            return
        if any(parameter.grad is None and parameter.requires_grad for parameter in self._trained):
            raise unused_parameters(self.task, without_gradient(self.module), _LATER)

    def _capture(self, batch: Batch) -> str | None:
        """Capture a micro-batch with its exchange of gradients."""
        if self.world.size > 1 and self.task.find_unused:
            return _NO_GRAPH_UNUSED
        for _ in range(0 if self._replica is None else _STEPS_BEFORE_CAPTURE):
            with self._gradient_sync(True):
                self._forward_backward(self._eager, batch.data, batch.weight)
            self.clear_gradients()
        return super()._capture(batch)


class Ddp(Replicated):
    """torch's DistributedDataParallel."""

    _compression: Compression | None = None
    _hook_meter: NoiseScaleMeter | None = None  # sees every bucket

    def _wrap(self, model: nn.Module) -> nn.Module:
        if self.world.size == 1:
            return model
        average: Average | None = None
        if self._settings.workers.compress != "none":
            self._compression = Compression(self.world, self._method(model), self.noise_scale)
            average = self._compression.average
        elif self.noise_scale is not None:
            self._hook_meter = self.noise_scale
            average = self.noise_scale.average
        bucket_mb = None if self.world.link is None else self.world.link.bucket_mb
        return self._replicate(model, average, bucket_cap_mb=bucket_mb)

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

    def micro_step(self, batch: Batch) -> Tensor:
        """As on one device; error feedback is kept if the micro-batch belongs to a step."""
        if self.powersgd is not None:
            self.powersgd.is_warm_up = self._is_warming_up
        return super().micro_step(batch)

    def _backward(self, loss: Tensor) -> None:
        try:
            super()._backward(loss)
        except RuntimeError as error:
            if self._compression is not None and self._compression.failure is not None:
                raise self._compression.failure from error
            raise

    def _local_model(self) -> nn.Module:
        return self.module  # DDP's hooks act only after its own forward

    def _capture(self, batch: Batch) -> str | None:
        meter = self._hook_meter if self.loss_weights.is_plain else None
        with nullcontext() if meter is None else meter.capturing():
            return super()._capture(batch)


class DataParallel(Strategy):
    """torch's DataParallel: one process, a thread for each GPU; kept for comparison, DDP is faster."""

    measures_exposed_wait = False  # it copies between its GPUs throughout every micro-batch

    def _wrap(self, model: nn.Module) -> nn.Module:
        return nn.DataParallel(model, device_ids=list(range(self._plan.layout.devices_per_worker)))
