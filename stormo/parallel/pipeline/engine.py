"""Runs a batch through the stages of this worker, together with the other workers of its line.

torch.distributed.pipelining does the work; here a batch is cut, the shapes between stages are found, and the stages for
each shape are kept. Every worker of the line has the whole batch and makes the same calls.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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
)
from torch.utils._pytree import tree_leaves, tree_map_only

from stormo.distributed.parallel_dims import SubGroup
from stormo.errors import SettingError
from stormo.parallel.pipeline import orders
from stormo.parallel.pipeline.batch import Batch
from stormo.parallel.pipeline.handover import Slot, describe, filled, slots_of
from stormo.parallel.pipeline.stage import Boundary, Stage
from stormo.parallel.pipeline.trial import trial
from stormo.parallel.pipeline.watching import Watch
from stormo.parallel.pipeline.words import from_words, to_words

_MOST_KEPT = 8  # shapes; each keeps the memory that its activations are received in
_LOGGER = logging.getLogger("torch.distributed.pipelining.schedules")


@dataclass(slots=True)
class _Prepared:
    """The stages of this worker for one shape of batch."""

    boundaries: list[Boundary]
    schedule: Any
    output: Any  # what the model gives for one micro-batch, described


class Engine:
    """The stages of this worker, and passes through all stages."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        numbers: Sequence[int],
        *,
        num_stages: int,
        line: SubGroup,
        device: torch.device,
        schedule: str,
        num_micro_batches: int,
        in_step: SubGroup | None = None,
    ) -> None:
        """`in_step` has the workers with other samples whose stages speak with these in every forward, if they do."""
        assert line.size > 1, "a pipeline has at least two workers"
        orders.check(schedule, line.size, num_stages, num_micro_batches)
        assert list(numbers) == orders.stages_of(line.rank, line.size, num_stages), numbers
        self._modules = dict(zip(numbers, modules, strict=True))
        self._num_stages = num_stages
        self._line = line
        self._device = device
        self._schedule = schedule
        self._num_micro_batches = num_micro_batches
        self._in_step = in_step
        self._prepared: dict[Any, _Prepared] = {}
        self._loss_of: Callable[[Any, int], Tensor] | None = None
        self.watch: Watch | None = None  # sees the passes that are run while it is set

    @property
    def has_last(self) -> bool:
        """Whether this worker has the last stage, and with it the loss."""
        return self._num_stages - 1 in self._modules

    def num_micro_batches(self, batch_size: int) -> int:
        """Equal parts into which a batch is cut: as many as were set, or fewer where they would not be equal."""
        return orders.fitting(self._schedule, self._line.size, batch_size, self._num_micro_batches)

    def forward_backward(
        self,
        args: Sequence[Any],
        loss_of: Callable[[Any, int], Tensor],
        kwargs: Mapping[str, Any] | None = None,
        *,
        count: int | None = None,
    ) -> list[Tensor]:
        """Forward and backward of a batch: gradients are added to `.grad`, the losses returned by the last worker.

        Args:
            args: of the model. Tensors as long as the first one are cut along dimension 0; all else goes whole to
                every micro-batch.
            loss_of: from the output for a micro-batch and its number to the scalar to be differentiated, with its
                weight in it; called where the last stage is.
            kwargs: of the model.
            count: micro-batches, where they must be other than `num_micro_batches` of the batch.
        """
        batch = Batch(args, kwargs or {})
        count = count or self.num_micro_batches(batch.size)
        prepared = self._prepare(batch, count, has_backward=True)
        losses: list[Tensor] = []
        self._loss_of = loss_of
        if self.watch is not None:
            self.watch.begin()
        targets = torch.arange(count) if self.has_last else None
        self._step(prepared, batch, target=targets, losses=losses if self.has_last else None)
        self._loss_of = None
        return [loss.detach() for loss in losses]

    @torch.no_grad()
    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, count: int | None = None) -> Any:
        """The output of the model for a batch of any size, on all workers of the line; without gradients."""
        batch = Batch(args, kwargs or {})
        count = count or self.num_micro_batches(batch.size)
        prepared = self._prepare(batch, count, has_backward=False)
        self._step(prepared, batch)
        slots = slots_of(prepared.output)
        if any(not slot.shape for slot in slots):
            raise SettingError(
                "a batch was cut into micro-batches for a pipeline",
                "the model gives a single number for each, and it is not known how these make one",
                "let the model return one row for each sample",
            )
        outputs = prepared.boundaries[-1].outputs
        parts = [[leaf for leaf in tree_leaves(part) if isinstance(leaf, Tensor)] for part in outputs]
        outputs.clear()
        found = [self._shared(slot, count, [part[i] for part in parts]) for i, slot in enumerate(slots)]
        return filled(prepared.output, found)

    def _shared(self, slot: Slot, count: int, parts: Sequence[Tensor]) -> Tensor:
        """The rows of all micro-batches, from the worker with the last stage to all."""
        if self.has_last:
            whole = torch.cat(list(parts)).contiguous()
        else:
            whole = torch.empty((slot.shape[0] * count, *slot.shape[1:]), dtype=slot.dtype, device=self._device)
        if whole.numel():
            dist.broadcast(whole.view(-1).view(torch.uint8), self._owner(self._num_stages - 1), self._line.group)
        return whole

    def _step(self, prepared: _Prepared, batch: Batch, **options: Any) -> None:
        first = 0 in self._modules
        prepared.boundaries[0].call = batch.described
        try:
            with _quiet():
                prepared.schedule.step(*(batch.tensors if first else ()), return_outputs=False, **options)
        except RuntimeError as error:
            self._prepared.clear()  # what was under way cannot be taken up again
            raise error.__cause__ or error from None

    def _prepare(self, batch: Batch, count: int, *, has_backward: bool) -> _Prepared:
        kind = self._device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        key = (has_backward, count, cast, batch.key)
        prepared = self._prepared.pop(key, None)
        is_new = prepared is None
        if self._in_step is not None:
            # Shapes are learnt by a forward, in which those that speak with each other must all take part.
            is_new = bool(self._in_step.max(torch.tensor([is_new], dtype=torch.int64)))
        if is_new:
            # Anew on all of them: torch lets go of gathered weights when stages run for the first time.
            prepared = self._made(batch, count, has_backward=has_backward)
        assert prepared is not None
        self._prepared[key] = prepared
        if len(self._prepared) > _MOST_KEPT:
            del self._prepared[next(iter(self._prepared))]
        return prepared

    def _made(self, batch: Batch, count: int, *, has_backward: bool) -> _Prepared:
        tensors = [tensor[: len(tensor) // count] for tensor in batch.tensors]
        described = self._describe(batch, tensors)
        boundaries = [Boundary(self._modules[i], i, self._num_stages, described) for i in self._modules]
        stages = [
            Stage(boundary, self._num_stages, self._device, self._line.group, tensors=tensors, watch=self._watched)
            for boundary in boundaries
        ]
        make: Any
        if not has_backward:
            make = ScheduleLoopedBFS if len(stages) > 1 else ScheduleGPipe
        elif self._schedule == "1f1b":
            make = Schedule1F1B if count >= self._line.size else ScheduleGPipe  # the same where they are so few
        else:
            make = {
                "interleaved": ScheduleInterleaved1F1B,
                "zero-bubble": ScheduleInterleavedZeroBubble,
            }.get(self._schedule, ScheduleGPipe)
        takes_one = make in (ScheduleGPipe, Schedule1F1B)
        schedule = make(
            stages[0] if takes_one else stages,
            count,
            loss_fn=self._loss(boundaries[-1]) if has_backward else None,
            scale_grads=False,
        )
        return _Prepared(boundaries, schedule, described[-1])

    def _loss(self, last: Boundary) -> Callable[[Any, Tensor], Tensor]:
        def loss(_output: Any, number: Tensor) -> Tensor:
            assert self._loss_of is not None
            with self._watched(orders.FORWARD, last.number, int(number)):
                return self._loss_of(last.outputs.pop(), int(number))

        return loss

    def _watched(self, kind: str, stage: int, micro_batch: int) -> Any:
        is_seen = self.watch is not None and self._loss_of is not None
        return self.watch.action(kind, stage, micro_batch) if is_seen and self.watch else nullcontext()

    def _describe(self, batch: Batch, tensors: Sequence[Tensor]) -> list[Any]:
        """What every stage gives for one micro-batch: each is run once, on zeros but for the first, without a trace."""
        described: list[Any] = []
        for number in range(self._num_stages):
            own: Any = None
            if number in self._modules:
                module = self._modules[number]
                if number == 0:
                    args, kwargs = filled(batch.described, tensors)
                else:
                    args, kwargs = (tree_map_only(Slot, lambda slot: slot.zeros(self._device), described[-1]),), {}
                with trial([module], self._device), torch.no_grad():
                    own = describe(module(*args, **kwargs), f"what stage {number} hands to the next")
            described.append(self._told(number, own))
        return described

    def _told(self, number: int, own: Any) -> Any:
        """What the worker with this stage says of it, as JSON; torch would send objects, which can bring code along."""
        owner, group = self._owner(number), self._line.group
        text = json.dumps(to_words(own)).encode() if number in self._modules else b""
        length = torch.tensor([len(text)])
        dist.broadcast(length, owner, group)
        content = torch.empty(int(length), dtype=torch.uint8)
        if text:
            content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        dist.broadcast(content, owner, group)
        return from_words(json.loads(bytes(content.numpy())))

    def _owner(self, number: int) -> int:
        """The rank that has a stage."""
        return self._line.ranks[number % self._line.size]


@contextmanager
def _quiet() -> Iterator[None]:
    """torch prints the whole schedule where a stage fails; the error says enough."""
    before = _LOGGER.disabled
    _LOGGER.disabled = True
    try:
        yield
    finally:
        _LOGGER.disabled = before
