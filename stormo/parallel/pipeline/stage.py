"""A stage as torch.distributed.pipelining runs it, and a trace of what every stage did when.

torch's stage calls `forward_one_chunk`, `backward_one_chunk` and `backward_weight_one_chunk` for each micro-batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from stormo.distributed.parallel_dims import SubGroup
from stormo.parallel.pipeline.activation_packing import fill, list_specs, pack, unpack
from stormo.parallel.pipeline.schedules import BACKWARD, FORWARD, INPUTS, WEIGHTS, Span
from stormo.parallel.pipeline.split_backward import backward_inputs, backward_weights

# A context for a kind of action, a stage and a micro-batch.
Tracer = Callable[[str, int, int], AbstractContextManager[None]]


class WiredModule(nn.Module):
    """The module of a stage with wire tensors as inputs and outputs; the last one keeps the output of the model."""

    def __init__(self, module: nn.Module, number: int, num_stages: int, specs: Sequence[Any]) -> None:
        """`specs` are those of the output of every stage."""
        super().__init__()
        self.module = module
        self.number = number
        self.is_first, self.is_last = number == 0, number == num_stages - 1
        self._specs = specs
        self.call: Any = ((), {})  # of the first stage: the specs of the model's arguments
        self.outputs: list[Any] = []  # of the last stage

    def input_metas(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The inputs of the stage on meta; `tensors` are the inputs of the model."""
        if self.is_first:
            return tuple(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors)
        return _wires(self._specs[self.number - 1])

    def output_metas(self) -> tuple[Tensor, ...]:
        """The outputs of the stage on meta."""
        return (torch.zeros(1, device="meta"),) if self.is_last else _wires(self._specs[self.number])

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Wire tensors to wire tensors."""
        if self.is_first:
            anchor = torch.zeros(0, device=tensors[0].device, requires_grad=True)
            args, kwargs = fill(self.call, tensors)
        else:
            anchor, value = unpack(self._specs[self.number - 1], tensors)
            args, kwargs = (value,), {}
        output = self.module(*args, **kwargs)
        if self.is_last:
            self.outputs.append(output)
            return (torch.zeros(1, device=tensors[0].device),)
        return pack(self._specs[self.number], output, anchor, f"what stage {self.number} sends to the next")


def _wires(specs: Any) -> tuple[Tensor, ...]:
    wires = (spec.wire for spec in list_specs(specs))
    return tuple(torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for shape, dtype in wires)


class Stage(PipelineStage):
    """torch's stage, with a split backward of our own, and without autocast in it."""

    def __init__(
        self,
        module: WiredModule,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        *,
        tensors: Sequence[Tensor],
        trace: Tracer,
    ) -> None:
        super().__init__(
            module,
            module.number,
            num_stages,
            device,
            input_args=module.input_metas(tensors),
            output_args=module.output_metas(),
            group=group,
        )
        self._module = module.module
        self._trace = trace

    def _recv_meta(self, src_stage: int) -> Any:
        """torch would unpickle what another worker sends. All shapes are known, so it never asks."""
        raise AssertionError(f"stage {src_stage} describes what it sends, which is known")

    def _post_metadata_inference_cleanup(self) -> None:
        """torch would clear the gradients of earlier micro-batches. All shapes are known, so nothing was inferred."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """One micro-batch forward."""
        with self._trace(FORWARD, self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """One micro-batch backward, or its gradients of inputs."""
        kind = BACKWARD if full_backward else INPUTS
        if isinstance(self._module, FSDPModule):  # gradients of all micro-batches are summed first
            self._module.set_requires_gradient_sync(last_backward)
            self._module.set_is_last_backward(last_backward)
        with self._trace(kind, self.stage_index, bwd_chunk_id), self._no_autocast():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The gradients of weights of one micro-batch."""
        with self._trace(WEIGHTS, self.stage_index, bwd_chunk_id), self._no_autocast():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def _no_autocast(self) -> AbstractContextManager[Any]:
        """A backward takes its dtypes from the graph; autocast would change them again."""
        return torch.autocast(self.device.type, enabled=False)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], Any]:
        """As torch's, but with our own split: torch's is wrong if a stage uses a weight twice."""
        if backward_type == "input":
            outputs, gradients = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"]
            return backward_inputs(outputs, gradients, bwd_kwargs["input_values"], list(self._module.parameters()))
        if backward_type == "weight":
            backward_weights(bwd_kwargs["param_groups"])
            return (), None
        found: tuple[tuple[Tensor | None, ...], Any] = super().backward_maybe_with_nosync(
            backward_type, bwd_kwargs, last_backward
        )
        return found


_KINDS = "FBIW"


class ScheduleTrace:
    """Start and stop of every action of this worker in the last batch, by the clock of the device."""

    def __init__(self, group: SubGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._zero: float | torch.cuda.Event = 0.0
        self._actions: list[tuple[str, int, int, float | torch.cuda.Event, float | torch.cuda.Event]] = []

    def begin(self) -> None:
        """Start a batch. All workers of the pipeline call it, and count from the moment at which all have."""
        self._actions.clear()
        self._group.sum(torch.zeros(1, device=self._device))
        self._zero = self._now()

    @contextmanager
    def action(self, kind: str, stage: int, micro_batch: int) -> Iterator[None]:
        """Record what is done inside."""
        start = self._now()
        yield
        self._actions.append((kind, stage, micro_batch, start, self._now()))

    def gather(self) -> list[Span]:
        """The actions of all workers by their start. All workers of the pipeline call it."""
        own: dict[tuple[str, int, int], tuple[float, float]] = {}
        for kind, stage, micro_batch, start, stop in self._actions:
            # The loss follows the forward of the last stage and is part of it.
            began, _ = own.get((kind, stage, micro_batch), (self._seconds(start), 0.0))
            own[kind, stage, micro_batch] = began, self._seconds(stop)
        count = int(self._group.max(torch.tensor([len(own)], device=self._device)))
        table = torch.zeros(self._group.size, count, 6, dtype=torch.float64)
        for row, ((kind, stage, micro_batch), (start, stop)) in enumerate(own.items()):
            numbers = [1.0, start, stop, _KINDS.index(kind), micro_batch, stage]
            table[self._group.rank, row] = torch.tensor(numbers, dtype=torch.float64)
        table = self._group.sum(table.to(self._device)).cpu()
        spans = [
            Span(worker, start, stop, _KINDS[int(kind)], int(micro_batch), int(stage))
            for worker, rows in enumerate(table.tolist())
            for is_there, start, stop, kind, micro_batch, stage in rows
            if is_there
        ]
        return sorted(spans, key=lambda span: (span.start, span.worker))

    def _now(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, moment: float | torch.cuda.Event) -> float:
        if isinstance(moment, float):
            assert isinstance(self._zero, float)
            return moment - self._zero
        moment.synchronize()
        assert not isinstance(self._zero, float)
        milliseconds: float = self._zero.elapsed_time(moment)
        return milliseconds / 1000
