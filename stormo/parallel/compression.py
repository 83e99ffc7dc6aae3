"""Gradient compression during backward.

Every worker exchanges its buckets in the same order, so all workers are at the same message. Backends that block run in
a thread beside backward, and others on a separate stream.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stormo.data.order import derive_seed
from stormo.distributed.parallel_dims import SubGroup
from stormo.distributed.world import World
from stormo.parallel.coalesced import copy, split_like
from stormo.parallel.gradient_noise import NoiseScaleMeter, begin_sum


@dataclass(frozen=True, kw_only=True, slots=True)
class GradBucket:
    """This worker's gradients of some parameters, as views of one flat tensor."""

    flat: Tensor
    gradients: Sequence[Tensor] = ()
    parameters: Sequence[Tensor] = ()
    counts: Tensor | None = None  # small numbers that are summed without compression


class Wire:
    """Collectives of bytes and sums among all workers; through the host if the backend cannot send from a GPU."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.size = group.size()
        self.blocks = f"{device.type}:nccl" not in dist.get_backend_config(group)
        self._group = group
        self._subgroup = SubGroup(range(self.size), group.rank(), group)
        self._through_host = self.blocks and device.type != "cpu"

    def all_to_all(self, rows: Tensor) -> Tensor:
        """Send one row of bytes to each worker; return one from each, in the order of ranks."""
        sent = rows.cpu() if self._through_host else rows
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return received.to(rows.device)

    def all_gather(self, row: Tensor) -> Tensor:
        """The bytes of every worker, one row each."""
        sent = row.cpu() if self._through_host else row
        received = sent.new_empty(self.size * sent.numel())
        self._subgroup.gather(received, sent)
        return received.view(self.size, -1).to(row.device)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all workers, in place."""
        return self._subgroup.sum(tensor)


class Compression:
    """The exchange of gradients by one method, bucket by bucket."""

    def __init__(self, world: World, method: HalfPrecision | PowerSgd, meter: NoiseScaleMeter | None = None) -> None:
        """Make a process group, so that buckets are not mixed up with other communication during backward.

        Args:
            world: of the workers.
            method: replaces gradients by their sum over all workers, with the same bits on all of them.
            meter: measures them before.
        """
        self._size = world.size
        self._method = method
        self._meter = meter
        self.failure: Exception | None = None  # of an exchange: DDP's own error says little
        self._device = world.device
        group = dist.new_group(timeout=world.timeout, group_desc="compressed gradients")
        self._wire = Wire(group, world.device)
        self._stream = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start to average a bucket of DDP over all workers, in place."""
        flat = bucket.buffer()
        if flat.layout is not torch.strided:  # refused after the first backward
            return begin_sum(flat)
        flat.mul_(1.0 / self._size)
        if self._meter is not None:
            self._meter.update(flat)
        parameters = bucket.parameters()
        gradients = [_by_strides(*pair) for pair in zip(bucket.gradients(), parameters, strict=True)]
        return self.begin(GradBucket(flat=flat, gradients=gradients, parameters=parameters))

    def begin(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start to sum a bucket over all workers, in place."""
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[self._device] if self._stream else None)
        ready = torch.cuda.current_stream(self._device).record_event() if self._stream else None
        if self._stream is not None:
            bucket.flat.record_stream(self._stream)  # this stream writes to it

        def exchange() -> None:
            try:
                with torch.no_grad(), torch.cuda.stream(self._stream) if self._stream else nullcontext():
                    if ready is not None:
                        assert self._stream is not None
                        self._stream.wait_event(ready)
                    self._method.exchange(bucket, self._wire)
                    if bucket.counts is not None:
                        self._wire.sum(bucket.counts)
                    future.set_result(bucket.flat)  # at this point of the stream
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
        del exchange  # it references the owner of this thread


def _by_strides(values: Tensor, parameter: Tensor) -> Tensor:
    """The values of a bucket in the memory order of the parameter."""
    is_dense = torch.ops.aten.is_non_overlapping_and_dense.default(parameter)
    return values.as_strided(parameter.shape, parameter.stride()) if is_dense else values


HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_HEAD_BYTES = 4  # of a row: the power of two its numbers were multiplied with
_LARGEST = 14  # exponent of the largest number of a row; fp16 can hold its double
_MOST = 100  # largest exponent of a scale


class HalfPrecision:
    """16-bit numbers that are summed in 32 bits: bf16, or fp16 with a power of two for each row.

    An all-reduce of 16-bit numbers rounds every partial sum, so its error grows with the number of workers. Here every
    worker receives one piece of the gradient from all others, sums it in 32 bits, and sends the sum, rounded once, to
    all: as many bytes, and two roundings for any number of workers.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def exchange(self, bucket: GradBucket, wire: Wire) -> None:
        """All-to-all, sum in 32 bits, all-gather."""
        flat = bucket.flat
        if not flat.numel():
            return
        if flat.is_complex():
            flat = torch.view_as_real(flat).flatten()
        wide = torch.promote_types(flat.dtype, torch.float32)
        length = -(-flat.numel() // wire.size)
        length += length % 2  # aligns the head of every row
        received = wire.all_to_all(self._packed(flat, wire.size, length))
        total = self._unpacked(received, wide).sum(dim=0)
        whole = wire.all_gather(self._packed(total, 1, length).flatten())
        flat.copy_(self._unpacked(whole, wide).flatten()[: flat.numel()])

    def _packed(self, values: Tensor, num_rows: int, length: int) -> Tensor:
        """The values in rows of bytes, padded with zeros."""
        rows = torch.zeros(num_rows, _HEAD_BYTES + 2 * length, dtype=torch.uint8, device=values.device)
        scale = _scale(values) if self._dtype is torch.float16 else torch.ones((), device=values.device)
        rows[:, :_HEAD_BYTES].view(torch.float32).copy_(scale)
        numbers = torch.zeros(num_rows * length, dtype=self._dtype, device=values.device)
        # In 32 bits: a GPU would round the scale to 16 bits, where it may overflow.
        wide = torch.promote_types(values.dtype, torch.float32)
        numbers[: values.numel()] = values if self._dtype is torch.bfloat16 else values.to(wide) * scale
        rows[:, _HEAD_BYTES:].view(self._dtype).copy_(numbers.view(num_rows, length))
        return rows

    def _unpacked(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        numbers = rows[:, _HEAD_BYTES:].view(self._dtype).to(dtype)
        return numbers if self._dtype is torch.bfloat16 else numbers.div_(rows[:, :_HEAD_BYTES].view(torch.float32))


def _scale(values: Tensor) -> Tensor:
    """A power of two that brings the largest value near the top of fp16's range; 1 if it is not finite."""
    largest = torch.linalg.vector_norm(values, torch.inf).float()
    power = torch.frexp(largest).exponent.clamp(_LARGEST - _MOST, _LARGEST + _MOST)
    scale = torch.ldexp(torch.ones_like(largest), _LARGEST - power)
    return torch.where(torch.isfinite(largest) & (largest > 0), scale, torch.ones_like(scale))


_LEAST_SAVING = 2  # a matrix is compressed only if that takes at least this many times fewer numbers


class PowerSgd:
    """Two thin matrices for each gradient (PowerSGD: Vogels et al., arXiv 1905.13727), with error feedback.

    A worker keeps the part of its gradient M beyond the rank, and adds it to its next gradient. One step of power
    iteration continues the last one: P = M Q, summed over the workers and made orthonormal; Q = Mᵀ P, summed; the mean
    gradient is P Qᵀ. Here the error of a worker is the part of its own M outside the span of P. Their sum is that of
    the paper, whose errors also contain the workers' differences from their mean, which grow without end.
    """

    def __init__(self, module: nn.Module, rank: int, seed: int) -> None:
        self.rank = rank
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._names = {id(parameter): name for name, parameter in trained.items()}
        # Both are written in place, because another stream may still have to read them.
        self.errors: dict[str, Tensor] = {}
        self.bases: dict[str, Tensor] = {}
        self._first: dict[str, Tensor] = {}  # start of the power iteration, the same on all workers
        for name, parameter in trained.items():
            if _is_compressed(parameter, rank):
                rows, columns = _matrix_of(parameter).shape
                wide = torch.promote_types(parameter.dtype, torch.float32)
                self.errors[name] = torch.zeros(rows, columns, dtype=wide, device=parameter.device)
                generator = torch.Generator().manual_seed(derive_seed(seed, "low rank", name))
                first = torch.randn(columns, rank, generator=generator, dtype=torch.float64)
                self._first[name] = first.to(self.errors[name])
                self.bases[name] = self._first[name].clone()
        self.is_warm_up = False  # whether the micro-batches belong to no step

    def exchange(self, bucket: GradBucket, wire: Wire) -> None:
        """Send two thin matrices for each large gradient, and small gradients without compression."""
        pairs = [(self._names[id(p)], g) for p, g in zip(bucket.parameters, bucket.gradients, strict=True)]
        cut = [(name, gradient) for name, gradient in pairs if name in self.errors]
        if not cut:  # also complex numbers, which have their own buckets
            wire.sum(bucket.flat)
            return
        plain = [gradient for name, gradient in pairs if name not in self.errors]
        matrices = [_matrix_of(gradient) + self.errors[name] for name, gradient in cut]
        # The first message has small gradients, P, and which gradients are not zero; the second has Q.
        lefts = [matrix @ self.bases[name] for matrix, (name, _) in zip(matrices, cut, strict=True)]
        used = torch.stack([gradient.any() for _, gradient in cut]).to(lefts[0].dtype)
        _sum_coalesced(wire, [*plain, *lefts, used])
        for index, left in enumerate(lefts):
            # DDP skips what no worker has used, so its error must not be sent.
            left.mul_(used[index] > 0)
            orthonormalise(left)
        owns = [matrix.t() @ left for matrix, left in zip(matrices, lefts, strict=True)]
        rights = [own.clone() for own in owns]
        _sum_coalesced(wire, rights)
        for index, (name, gradient) in enumerate(cut):
            left, right, basis = lefts[index], rights[index], self.bases[name]
            gradient.copy_((left @ right.t()).view(gradient.shape))
            if not self.is_warm_up:
                torch.addmm(matrices[index], left, owns[index].t(), alpha=-1, out=self.errors[name])
                # A direction without any gradient starts again.
                basis_now = torch.where(right.any(dim=0), right, self._first[name])
                basis.copy_(torch.where(used[index] > 0, basis_now, basis))

    def load_error_feedback(self, errors: Mapping[str, Tensor], bases: Mapping[str, Tensor]) -> None:
        """Resume from these; what is missing starts from zero."""
        for name, error in self.errors.items():
            error.copy_(errors[name]) if name in errors else error.zero_()
            basis, first = bases.get(name), self._first[name]
            self.bases[name].copy_(first if basis is None or basis.shape != first.shape else basis)


def _matrix_of(tensor: Tensor) -> Tensor:
    """A weight as a matrix: what belongs to one output is one row."""
    return tensor.reshape(tensor.shape[0], -1)


def _is_compressed(parameter: Tensor, rank: int) -> bool:
    """Whether two thin matrices are small enough."""
    if parameter.ndim < 2 or parameter.is_complex() or not parameter.numel():
        return False
    rows, columns = _matrix_of(parameter).shape
    return rows * columns >= _LEAST_SAVING * (rows + columns) * rank


def _sum_coalesced(wire: Wire, tensors: Sequence[Tensor]) -> None:
    """Sum each over the workers, in place, as one message for each dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for group in by_dtype.values():
        copy(group, split_like(wire.sum(torch.cat([tensor.reshape(-1) for tensor in group])), group))


def orthonormalise(matrix: Tensor) -> None:
    """Make the columns orthonormal, in place; one in the span of those before it becomes zero."""
    tiny = torch.finfo(matrix.dtype).tiny
    for index in range(matrix.shape[1]):
        column = matrix[:, index]
        length = torch.linalg.vector_norm(column)
        for _ in range(2):  # once would leave rounding errors
            if index:
                before = matrix[:, :index]
                column -= before @ (before.t() @ column)
        left_over = torch.linalg.vector_norm(column)
        # If only rounding errors remain, the direction is noise.
        is_new = left_over > length * (torch.finfo(matrix.dtype).eps * matrix.shape[0] ** 0.5)
        column *= torch.where(is_new, 1.0 / left_over.clamp_min(tiny), torch.zeros_like(left_over))
