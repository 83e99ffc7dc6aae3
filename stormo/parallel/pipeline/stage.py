"""A stage as torch.distributed.pipelining runs it: the module between what arrives and what departs, watched.

torch's stage calls `forward_one_chunk`, `backward_one_chunk` and `backward_weight_one_chunk` for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from stormo.parallel.pipeline.halves import inputs_first, weights_later
from stormo.parallel.pipeline.handover import Slot, arrive, depart, filled, slots_of
from stormo.parallel.pipeline.orders import BACKWARD, FORWARD, INPUTS, WEIGHTS

# A context for a kind of action, a stage and a micro-batch.
Watcher = Callable[[str, int, int], AbstractContextManager[None]]


class Boundary(nn.Module):
    """The module of a stage with carriers as inputs and outputs; the last one keeps what the model gives."""

    def __init__(self, module: nn.Module, number: int, num_stages: int, described: Sequence[Any]) -> None:
        """`described` has the value behind every stage."""
        super().__init__()
        self.module = module
        self.number = number
        self.is_first, self.is_last = number == 0, number == num_stages - 1
        self._described = described
        self.call: Any = ((), {})  # of the first stage: the arguments of the model with slots for what is cut
        self.outputs: list[Any] = []  # of the last stage

    def input_metas(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Tensors like those that the stage takes; `tensors` are those of the model."""
        if self.is_first:
            return tuple(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors)
        return _carriers(self._described[self.number - 1])

    def output_metas(self) -> tuple[Tensor, ...]:
        """Tensors like those that the stage gives."""
        return (torch.zeros(1, device="meta"),) if self.is_last else _carriers(self._described[self.number])

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Carriers to carriers."""
        if self.is_first:
            tie = torch.zeros(0, device=tensors[0].device, requires_grad=True)
            args, kwargs = filled(self.call, tensors)
        else:
            tie, value = arrive(self._described[self.number - 1], tensors)
            args, kwargs = (value,), {}
        output = self.module(*args, **kwargs)
        if self.is_last:
            self.outputs.append(output)
            return (torch.zeros(1, device=tensors[0].device),)
        return depart(self._described[self.number], output, tie, f"what stage {self.number} hands to the next")


def _carriers(described: Any) -> tuple[Tensor, ...]:
    return tuple(_meta(slot) for slot in slots_of(described))


def _meta(slot: Slot) -> Tensor:
    shape, dtype = slot.carrier
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


class Stage(PipelineStage):
    """torch's stage, with our own halves of a backward pass, and without autocast in it."""

    def __init__(
        self,
        boundary: Boundary,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        *,
        tensors: Sequence[Tensor],
        watch: Watcher,
    ) -> None:
        super().__init__(
            boundary,
            boundary.number,
            num_stages,
            device,
            input_args=boundary.input_metas(tensors),
            output_args=boundary.output_metas(),
            group=group,
        )
        self._module = boundary.module
        self._watch = watch

    def _recv_meta(self, src_stage: int) -> Any:
        """torch would unpickle what another worker sends, if one of them asked for it; all shapes are known here."""
        raise AssertionError(f"stage {src_stage} wants to describe what it sends, which is known")

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """One micro-batch forward."""
        with self._watch(FORWARD, self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """One micro-batch backward, or the first half of it."""
        kind = BACKWARD if full_backward else INPUTS
        if isinstance(self._module, FSDPModule):  # gradients of the other micro-batches add up first
            self._module.set_requires_gradient_sync(last_backward)
            self._module.set_is_last_backward(last_backward)
        with self._watch(kind, self.stage_index, bwd_chunk_id), self._as_forward_was():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The second half."""
        with self._watch(WEIGHTS, self.stage_index, bwd_chunk_id), self._as_forward_was():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def _as_forward_was(self) -> AbstractContextManager[Any]:
        """A backward takes its number formats from the graph; autocast would change them once more."""
        return torch.autocast(self.device.type, enabled=False)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], Any]:
        """As torch's, but with our own halves: torch's go wrong where a weight is used twice in a stage."""
        if backward_type == "input":
            outputs, gradients = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"]
            return inputs_first(outputs, gradients, bwd_kwargs["input_values"], list(self._module.parameters()))
        if backward_type == "weight":
            weights_later(bwd_kwargs["param_groups"])
            return (), None
        found: tuple[tuple[Tensor | None, ...], Any] = super().backward_maybe_with_nosync(
            backward_type, bwd_kwargs, last_backward
        )
        return found
