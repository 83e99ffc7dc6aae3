"""ZeRO (Rajbhandari et al., arXiv 1910.02054), stages 1 and 2: every worker steps some rows of every parameter.

The model itself stays whole on every worker. After a step the rows travel to all (`gather`); in stage 2 gradients are
summed where they are needed alone (`Reducer`), while backward goes on, and their whole tensors are freed at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stormo.distributed.grid import Line
from stormo.parallel.parameter_shards import chunk

BUCKET_BYTES = 25 * 2**20
_UNDER_WAY = 2  # buckets whose gradients travel at a time: each takes its own memory


class Bucket:
    """Parameters of one type and device whose rows travel together; a worker's rows lie side by side."""

    def __init__(self, parameters: Sequence[nn.Parameter], line: Line) -> None:
        self.parameters = list(parameters)
        self._line = line
        self._widths: list[int] = []  # values of a worker's rows of each, the longest share
        for parameter in parameters:
            num_rows, width = _rows(parameter)
            self._widths.append(-(-num_rows // line.size) * width)
        self._length = sum(self._widths)

    def pack(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """[workers, values]: the rows of each worker, zeros where there is nothing."""
        first = self.parameters[0]
        packed = first.new_zeros(self._line.size, self._length, requires_grad=False)
        at = 0
        for tensor, width in zip(tensors, self._widths, strict=True):
            if tensor is not None:
                for place, rows in _dealt(packed, at, width, tensor.detach().reshape(-1)):
                    place.copy_(rows)
            at += width
        return packed

    def own_rows(self, values: Tensor) -> list[Tensor]:
        """This worker's rows of each parameter in a row of `pack`, each in its shape."""
        found, at = [], 0
        for parameter, width in zip(self.parameters, self._widths, strict=True):
            shape = row_shape(parameter, self._line)
            found.append(values[at : at + shape.numel()].view(shape))
            at += width
        return found

    @torch.no_grad()
    def gather(self, own: Sequence[Tensor]) -> None:
        """Write every worker's rows into the parameters; `own` are this one's."""
        send = self.parameters[0].new_zeros(self._length, requires_grad=False)
        for rows, place in zip(own, self.own_rows(send), strict=True):
            place.copy_(rows)
        received = send.new_empty(self._line.size, self._length)
        self._line.gather(received, send)
        at = 0
        for parameter, width in zip(self.parameters, self._widths, strict=True):
            for place, rows in _dealt(received, at, width, parameter.detach().view(-1)):
                rows.copy_(place)
            at += width


def _dealt(table: Tensor, at: int, width: int, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Where a parameter lies in [workers, values], and there the same of its own values: as few copies as can be."""
    num_full, left = divmod(flat.numel(), max(width, 1))  # workers with the longest share, and what the next one has
    yield table[:num_full, at : at + width], flat[: num_full * width].view(num_full, width)
    if left:
        yield table[num_full, at : at + left], flat[num_full * width :]


def _rows(parameter: Tensor) -> tuple[int, int]:
    """Rows of a parameter and the values of one; a number alone is one row."""
    num_rows = parameter.shape[0] if parameter.ndim else 1
    return num_rows, parameter.numel() // max(num_rows, 1)


def own_span(parameter: Tensor, line: Line) -> tuple[int, int]:
    """First row of this worker and how many it has."""
    return chunk(_rows(parameter)[0], line.rank, line.size)


def row_shape(parameter: Tensor, line: Line) -> torch.Size:
    """The shape of this worker's rows."""
    _, length = own_span(parameter, line)
    if not parameter.ndim:
        return torch.Size(() if length else (0,))
    return torch.Size((length, *parameter.shape[1:]))


def own_rows(parameter: Tensor, line: Line) -> Tensor:
    """This worker's rows, in the memory of the parameter."""
    start, length = own_span(parameter, line)
    if not parameter.ndim:
        return parameter.detach() if length else parameter.detach().new_empty(0)
    return parameter.detach().narrow(0, start, length)


def make_buckets(parameters: Sequence[nn.Parameter], line: Line, bucket_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """All parameters in the order in which backward reaches them, those of one type and device together."""
    buckets: list[list[nn.Parameter]] = []
    for parameter in reversed(parameters):
        last = buckets[-1] if buckets else []
        alike = last and (last[0].dtype, last[0].device) == (parameter.dtype, parameter.device)
        if not alike or sum(p.nbytes for p in last) + parameter.nbytes > bucket_bytes:
            buckets.append([])
        buckets[-1].append(parameter)
    return [Bucket(bucket, line) for bucket in buckets]


@torch.no_grad()
def average(gradients: Sequence[Tensor], line: Line) -> None:
    """The mean of every gradient over the workers of a line, in place, some at a time."""
    if line.size == 1:
        return
    waiting = list(gradients)
    while waiting:
        first, some, num_bytes = waiting[0], list[Tensor](), 0
        while waiting and waiting[0].dtype == first.dtype and (not some or num_bytes < BUCKET_BYTES):
            some.append(waiting.pop(0))
            num_bytes += some[-1].nbytes
        flat = line.sum(torch.cat([gradient.reshape(-1) for gradient in some])).div_(line.size)
        for gradient, mean in zip(some, flat.split([g.numel() for g in some]), strict=True):
            gradient.copy_(mean.view_as(gradient))


class Reducer:
    """Stage 2: sums the gradients of every pass to the workers that step them, bucket by bucket, during backward."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        shard: Line,
        replicate: Line,
        *,
        during_backward: bool = True,
        may_be_unused: bool = False,
    ) -> None:
        self._shard = shard
        self._replicate = replicate
        self._may_be_unused = may_be_unused
        self._buckets = make_buckets(parameters, shard)
        self._place = {p: index for index, bucket in enumerate(self._buckets) for p in bucket.parameters}
        self._awaited = [len(bucket.parameters) for bucket in self._buckets]
        self._came: set[nn.Parameter] = set()
        self._next = 0  # bucket to leave: the same order on all workers
        self._sent: deque[tuple[Bucket, dist.Work | None, Tensor]] = deque()
        self.gradients: dict[nn.Parameter, Tensor] = {}  # this worker's rows, summed over passes
        self._ever_came: set[nn.Parameter] = set()
        for parameter in parameters if during_backward else ():
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def _arrived(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self._came.add(parameter)
        self._awaited[self._place[parameter]] -= 1
        while self._next < len(self._buckets) and not self._awaited[self._next]:
            self._send()

    def finish(self) -> None:
        """Backward is done: what has not left leaves now, with zeros for what was not reached."""
        while self._next < len(self._buckets):
            self._send()
        while self._sent:
            self._receive()
        self._ever_came |= self._came
        self._came, self._next = set(), 0
        self._awaited = [len(bucket.parameters) for bucket in self._buckets]

    def _send(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        self._came |= {parameter for parameter in bucket.parameters if parameter.grad is not None}
        packed = bucket.pack([parameter.grad for parameter in bucket.parameters])
        for parameter in bucket.parameters:
            parameter.grad = None
        if self._shard.size == 1:
            self._sent.append((bucket, None, packed[0]))
        else:
            own = packed.new_empty(packed.shape[1])
            self._sent.append((bucket, self._shard.scatter_sum(own, packed), own))
        while len(self._sent) > _UNDER_WAY:
            self._receive()

    def _receive(self) -> None:
        bucket, work, own = self._sent.popleft()
        if work is not None:
            work.wait()
        self._replicate.sum(own)
        own.div_(self._shard.size * self._replicate.size)
        for parameter, rows in zip(bucket.parameters, bucket.own_rows(own), strict=True):
            before = self.gradients.get(parameter)
            self.gradients[parameter] = rows if before is None else before.add_(rows)

    def collected(self) -> dict[nn.Parameter, Tensor]:
        """This worker's rows of the gradients of all passes; without those that no worker's pass has reached."""
        if self._may_be_unused:
            flags = torch.tensor([float(p in self._ever_came) for bucket in self._buckets for p in bucket.parameters])
            for line in (self._shard, self._replicate):
                line.max(flags)
            names = [parameter for bucket in self._buckets for parameter in bucket.parameters]
            for parameter, flag in zip(names, flags.tolist(), strict=True):
                if not flag:
                    self.gradients.pop(parameter, None)
        return self.gradients

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether a pass of this step has reached a parameter, on this worker."""
        return parameter in self._ever_came

    def clear(self) -> None:
        """Forget the gradients of this step."""
        self.gradients = {}
        self._ever_came = set()
