"""Runs a batch through the stages of this worker, together with the other workers of its pipeline.

torch.distributed.pipelining does the work. The engine cuts a batch, finds the shapes between stages, and caches the
stages for each shape. Every worker of the pipeline has the whole batch and makes the same calls.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    schedules,
)

from stormo.distributed.parallel_dims import SubGroup
from stormo.errors import SettingError
from stormo.parallel.meta_init import no_side_effects
from stormo.parallel.pipeline.activation_packing import (
    ModelCall,
    TensorSpec,
    fill,
    list_specs,
    specs_from_json,
    specs_of,
    specs_to_json,
)
from stormo.parallel.pipeline.schedules import FORWARD, most_micro_batches, worker_stages
from stormo.parallel.pipeline.stage import ScheduleTrace, Stage, WiredModule
from stormo.parallel.pytree import tree_map_only, tree_tensors

_CACHE_SIZE = 8  # shapes of training, and of validation; each keeps the memory in which its activations are received
_LOGGER = logging.getLogger("torch.distributed.pipelining.schedules")


@dataclass(slots=True)
class _Prepared:
    """The stages of this worker for one shape of batch."""

    modules: list[WiredModule]
    schedule: Any
    output: Any  # specs of the model's output for one micro-batch


class Engine:
    """The stages of this worker, and forward and backward through all stages."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        *,
        num_stages: int,
        group: SubGroup,
        device: torch.device,
        schedule: str,
        num_micro_batches: int,
        min_micro_batch_size: int = 1,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        synchronized: SubGroup | None = None,
        example: ModelCall | None = None,
    ) -> None:
        """`synchronized` are data-parallel workers, if their stages exchange tensors in every forward.

        `example` is a call with the samples of a micro-batch: it tells which tensors have a row for each sample.
        A short batch, too, is cut into micro-batches of at least `min_micro_batch_size` samples.
        `waiting` is entered while this worker waits for activations or gradients of another one.
        """
        assert group.size > 1, "a pipeline has at least two workers"
        self._modules = dict(zip(worker_stages(group.rank, group.size, num_stages), modules, strict=True))
        self._num_stages = num_stages
        self._group = group
        self._device = device
        self._schedule = schedule
        self._num_micro_batches = num_micro_batches
        self._min_micro_batch_size = min_micro_batch_size
        self._waiting = waiting
        self._synchronized = synchronized
        self._example = example
        self._prepared: dict[Any, _Prepared] = {}
        self._loss_of: Callable[[Any, int], Tensor] | None = None
        self.trace: ScheduleTrace | None = None  # records batches while it is set

    @property
    def has_last(self) -> bool:
        """Whether this worker has the last stage, and so the loss."""
        return self._num_stages - 1 in self._modules

    def num_micro_batches(self, num_samples: int) -> int:
        """Micro-batches of a batch: as many as were set, or fewer if those would not be equally large."""
        if self._example is not None and num_samples == self._example.num_samples:
            return 1  # two calls of one length do not tell a mask from samples
        limit = min(self._num_micro_batches, num_samples // self._min_micro_batch_size)
        return most_micro_batches(self._schedule, self._group.size, num_samples, limit)

    def forward_backward(
        self,
        args: Sequence[Any],
        loss_of: Callable[[Any, int], Tensor],
        kwargs: Mapping[str, Any] | None = None,
        *,
        count: int | None = None,
    ) -> list[Tensor]:
        """Forward and backward of a batch: adds to `.grad`, and returns the losses on the worker of the last stage.

        Args:
            args: of the model. Tensors as long as the first one, here and in the example, are cut along dimension 0;
                everything else goes whole to every micro-batch.
            loss_of: from the output of a micro-batch and its number to the weighted loss; called at the last stage.
            kwargs: of the model.
            count: micro-batches, if other than `num_micro_batches` of the batch.
        """
        call = ModelCall(args, kwargs or {}, self._example)
        count = count or self.num_micro_batches(call.num_samples)
        prepared = self._prepare(call, count, has_backward=True)
        losses: list[Tensor] = []
        self._loss_of = loss_of
        if self.trace is not None:
            self.trace.begin()
        targets = torch.arange(count) if self.has_last else None
        self._step(prepared, call, target=targets, losses=losses if self.has_last else None)
        self._loss_of = None
        return [loss.detach() for loss in losses]

    @torch.no_grad()
    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, count: int | None = None) -> Any:
        """The output of the model for a batch of any size, on all workers of the pipeline; without gradients."""
        call = ModelCall(args, kwargs or {}, self._example)
        count = count or self.num_micro_batches(call.num_samples)
        prepared = self._prepare(call, count, has_backward=False)
        self._step(prepared, call)
        specs = list_specs(prepared.output)
        if any(not spec.shape for spec in specs):
            raise SettingError(
                "a batch was cut into micro-batches for a pipeline",
                "the model gives a single number for each, and it is not known how these make one",
                "let the model return one row for each sample",
            )
        outputs = prepared.modules[-1].outputs
        parts = [tree_tensors(output) for output in outputs]
        outputs.clear()
        found = [self._broadcast(spec, count, [part[i] for part in parts]) for i, spec in enumerate(specs)]
        return fill(prepared.output, found)

    def _broadcast(self, spec: TensorSpec, count: int, parts: Sequence[Tensor]) -> Tensor:
        """Concatenate the micro-batches on the worker of the last stage, and send them to all."""
        if self.has_last:
            whole = torch.cat(list(parts)).contiguous()
        else:
            whole = torch.empty((spec.shape[0] * count, *spec.shape[1:]), dtype=spec.dtype, device=self._device)
        if whole.numel():
            dist.broadcast(whole.view(-1).view(torch.uint8), self._owner(self._num_stages - 1), self._group.group)
        return whole

    def _step(self, prepared: _Prepared, call: ModelCall, **options: Any) -> None:
        tensors = call.tensors if 0 in self._modules else ()
        prepared.modules[0].call = call.specs
        try:
            with _quiet(), _counted_waits(self._waiting):
                prepared.schedule.step(*tensors, return_outputs=False, **options)
        except RuntimeError as error:
            self._prepared.clear()  # its state cannot be used again
            raise error.__cause__ or error from None

    def _prepare(self, call: ModelCall, count: int, *, has_backward: bool) -> _Prepared:
        kind = self._device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        key = (has_backward, count, cast, call.key)
        prepared = self._prepared.pop(key, None)
        is_new = prepared is None
        if self._synchronized is not None:
            # A forward finds the shapes, and all workers that exchange tensors in it must take part.
            is_new = bool(self._synchronized.max(torch.tensor([is_new], dtype=torch.int64)))
        if is_new:
            prepared = self._make(call, count, has_backward=has_backward)
            alike = [one for one in self._prepared if one[0] == has_backward]  # validation replaces no training shapes
            if len(alike) == _CACHE_SIZE:
                del self._prepared[alike[0]]
        assert prepared is not None
        self._prepared[key] = prepared
        return prepared

    def _make(self, call: ModelCall, count: int, *, has_backward: bool) -> _Prepared:
        tensors = [tensor[: len(tensor) // count] for tensor in call.tensors]
        specs = self._find_specs(call, tensors)
        modules = [WiredModule(self._modules[i], i, self._num_stages, specs) for i in self._modules]
        stages = [
            Stage(module, self._num_stages, self._device, self._group.group, tensors=tensors, trace=self._traced)
            for module in modules
        ]
        make: Any
        if not has_backward:
            make = ScheduleLoopedBFS if len(stages) > 1 else ScheduleGPipe
        elif self._schedule == "1f1b":
            make = Schedule1F1B if count >= self._group.size else ScheduleGPipe  # the same order for so few
        else:
            make = {
                "interleaved": ScheduleInterleaved1F1B,
                "zero-bubble": ScheduleInterleavedZeroBubble,
            }.get(self._schedule, ScheduleGPipe)
        takes_one = make in (ScheduleGPipe, Schedule1F1B)
        schedule = make(
            stages[0] if takes_one else stages,
            count,
            loss_fn=self._loss(modules[-1]) if has_backward else None,
            scale_grads=False,
        )
        return _Prepared(modules, schedule, specs[-1])

    def _loss(self, last: WiredModule) -> Callable[[Any, Tensor], Tensor]:
        def loss(_output: Any, number: Tensor) -> Tensor:
            assert self._loss_of is not None
            with self._traced(FORWARD, last.number, int(number)):
                return self._loss_of(last.outputs.pop(), int(number))

        return loss

    def _traced(self, kind: str, stage: int, micro_batch: int) -> Any:
        is_training = self._loss_of is not None
        return self.trace.action(kind, stage, micro_batch) if is_training and self.trace else nullcontext()

    def _find_specs(self, call: ModelCall, tensors: Sequence[Tensor]) -> list[Any]:
        """The specs of every stage's output for one micro-batch: each stage runs once, on zeros after the first."""
        specs: list[Any] = []
        for number in range(self._num_stages):
            own: Any = None
            if number in self._modules:
                module = self._modules[number]
                if number == 0:
                    args, kwargs = fill(call.specs, tensors)
                else:
                    args, kwargs = (tree_map_only(TensorSpec, lambda spec: spec.zeros(self._device), specs[-1]),), {}
                with no_side_effects([module], self._device), torch.no_grad():
                    own = specs_of(module(*args, **kwargs), f"what stage {number} sends to the next")
            specs.append(self._share_specs(number, own))
        return specs

    def _share_specs(self, number: int, own: Any) -> Any:
        """The specs that the worker of a stage has found, as JSON: torch would unpickle objects, which can run code."""
        owner, group = self._owner(number), self._group.group
        text = json.dumps(specs_to_json(own)).encode() if number in self._modules else b""
        length = torch.tensor([len(text)])
        dist.broadcast(length, owner, group)
        content = torch.empty(int(length), dtype=torch.uint8)
        if text:
            content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        dist.broadcast(content, owner, group)
        return specs_from_json(json.loads(bytes(content.numpy())))

    def _owner(self, number: int) -> int:
        """The rank that has a stage."""
        return self._group.ranks[number % self._group.size]


@contextmanager
def _counted_waits(waiting: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Let torch's schedule enter a context for every wait; it has no hook for that."""
    plain = schedules._wait_batch_p2p

    def wait(work: list[dist.Work]) -> None:
        with waiting():
            plain(work)

    schedules._wait_batch_p2p = wait
    try:
        yield
    finally:
        schedules._wait_batch_p2p = plain


@contextmanager
def _quiet() -> Iterator[None]:
    """torch prints the whole schedule if a stage fails; the error says enough."""
    before = _LOGGER.disabled
    _LOGGER.disabled = True
    try:
        yield
    finally:
        _LOGGER.disabled = before
