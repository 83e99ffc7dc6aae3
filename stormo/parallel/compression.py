"""Gradients that travel between workers in fewer bytes than they have, while backward still runs.

Every worker hands over its buckets of gradients in the same order, and in that order they are exchanged: whatever a
method sends, all workers are at the same message. Where sending makes a thread wait, it is a thread beside backward;
where the device does it, a stream of its own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stormo.distributed.parallel_dims import Line
from stormo.distributed.world import World
from stormo.parallel.noise_scale import NoiseScaleMeter, begin_sum


@dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """One bucket: this worker's part of the gradient of some parameters, as views of one flat tensor."""

    flat: Tensor
    gradients: Sequence[Tensor] = ()
    parameters: Sequence[Tensor] = ()
    counts: Tensor | None = None  # small numbers that are summed as they are


class Method(Protocol):
    """A way to exchange gradients."""

    def exchange(self, parcel: Parcel, wire: Wire) -> None:
        """Put the sum over all workers in the place of this worker's part, to the same bits on all of them."""


class Wire:
    """What can be sent: bytes, and sums, among all workers. Tensors of a GPU go through the host where they must."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.size = group.size()
        self.blocks = group._get_backend(device).name() != "nccl"
        self._group = group
        self._line = Line(range(self.size), group.rank(), group)
        self._through_host = self.blocks and device.type != "cpu"

    def swap(self, rows: Tensor) -> Tensor:
        """One row of bytes for each worker; what comes back is one from each, in their order."""
        sent = rows.cpu() if self._through_host else rows
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return received.to(rows.device)

    def gather(self, row: Tensor) -> Tensor:
        """The bytes of every worker, one below the other."""
        sent = row.cpu() if self._through_host else row
        received = sent.new_empty(self.size * sent.numel())
        self._line.gather(received, sent)
        return received.view(self.size, -1).to(row.device)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all workers, in place."""
        return self._line.sum(tensor)


class Compression:
    """The exchange of gradients by one method, bucket by bucket."""

    def __init__(self, world: World, method: Method, meter: NoiseScaleMeter | None = None) -> None:
        """Make a group of its own: nothing else that is sent during backward can be taken for a bucket.

        Args:
            world: of the workers.
            method: by which gradients are exchanged.
            meter: sees them before.
        """
        self._size = world.size
        self._method = method
        self._meter = meter
        self.failure: Exception | None = None  # of an exchange: DDP's own words for it say little
        self._device = world.device
        group = dist.new_group(timeout=world.timeout, group_desc="compressed gradients")
        self._wire = Wire(group, world.device)
        self._stream = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Begin with a bucket of DDP's; the mean over all workers comes to where it lies."""
        flat = bucket.buffer()
        if flat.layout is not torch.strided:  # seen, and refused, after the first pass
            return begin_sum(flat)
        flat.mul_(1.0 / self._size)
        if self._meter is not None:
            self._meter.see(flat)
        parameters = bucket.parameters()
        gradients = [_by_strides(*pair) for pair in zip(bucket.gradients(), parameters, strict=True)]
        return self.begin(Parcel(flat=flat, gradients=gradients, parameters=parameters))

    def begin(self, parcel: Parcel) -> torch.futures.Future[Tensor]:
        """Begin with a bucket; the sum over all workers comes to where it lies."""
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[self._device] if self._stream else None)
        ready = torch.cuda.current_stream(self._device).record_event() if self._stream else None
        if self._stream is not None:
            parcel.flat.record_stream(self._stream)  # whoever lets go of it, it is written there

        def exchange() -> None:
            try:
                with torch.no_grad(), torch.cuda.stream(self._stream) if self._stream else nullcontext():
                    if ready is not None:
                        assert self._stream is not None
                        self._stream.wait_event(ready)
                    self._method.exchange(parcel, self._wire)
                    if parcel.counts is not None:
                        self._wire.sum(parcel.counts)
                    future.set_result(parcel.flat)  # at this place of the stream
            except Exception as error:
                self.failure = error
                future.set_exception(error)  # type: ignore[arg-type]

        if self._wire.blocks:
            self._waiting.put(exchange)
            if self._thread is None:
                self._thread = threading.Thread(target=_serve, args=[self._waiting], name="gradients", daemon=True)
                self._thread.start()
                weakref.finalize(self, self._waiting.put, None)
        else:
            exchange()
        return future


def _serve(waiting: SimpleQueue[Callable[[], None] | None]) -> None:
    while (exchange := waiting.get()) is not None:
        exchange()
        del exchange  # it holds whoever has made this thread


def _by_strides(values: Tensor, parameter: Tensor) -> Tensor:
    """The values of a bucket, each where the parameter has it: they lie there in the order of its memory."""
    is_dense = torch.ops.aten.is_non_overlapping_and_dense.default(parameter)
    return values.as_strided(parameter.shape, parameter.stride()) if is_dense else values
