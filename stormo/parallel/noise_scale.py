"""Measures the gradient noise scale beside training, without a word or a backward more in a step.

Workers compare the gradient of their own share with that of the whole batch; one worker that accumulates compares its
first pass. Norms stay on the device; once in a block of steps three numbers are summed over the workers in the
background, and only who reads the result waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from stormo.data.order import Pass, part
from stormo.distributed.world import World
from stormo.optim.noise_scale import NUM_MOMENTS, NoiseScale, estimate, fold, solve

_BLOCK_STEPS = 8
_DENSE_STEPS = 128  # at the start of a run, every one of which is measured; then one in
_SPARSE = 8


class NoiseScaleMeter:
    """The running estimate; the same on all workers, except for the block under way."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._moments = torch.zeros(NUM_MOMENTS, dtype=torch.float64, device=world.device)
        self._span: Pass | None = None  # the first pass of the step under way
        self._sigma = 0.0
        self._looks = False
        self._norms: list[Tensor] = []  # of its part of the gradient, in pieces
        self._block: list[tuple[Tensor, Tensor, list[float]]] = []  # norm of the part, of the whole, and what they make
        self._sent: tuple[Tensor, dist.Work | None] | None = None  # the block before, while it is summed

    def begin(self, span: Pass, sigma: float, step: int) -> None:
        """This step begins with this pass, under factors of this spread; what was seen before does not count."""
        self._span, self._sigma, self._norms = span, sigma, []
        self._looks = step < _DENSE_STEPS or step % _SPARSE == 0  # by the run's step, so that a resume changes nothing

    def forget(self) -> None:
        """No step comes of what was seen, nor of what is seen until the next one begins."""
        self._norms, self._looks = [], False

    def see(self, gradient: Tensor) -> None:
        """A piece of this worker's own gradient, before it is exchanged."""
        if self._looks:
            self._norms.append(torch.linalg.vector_norm(gradient, dtype=_wide(gradient.dtype)))

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's own mean of a bucket over the workers, the same arithmetic to the last bit, with a look before it."""
        buffer = bucket.buffer()
        if buffer.layout is torch.strided:
            self.see(buffer.mul_(1.0 / self._world.size))
        else:
            buffer.div_(self._world.size)  # a sparse gradient has a bucket of its own, and is never looked at
        return begin_sum(buffer)

    def see_pass(self, span: Pass, parameters: Iterable[Tensor]) -> None:
        """A pass is done: with one worker alone, the gradients after the first one are its part of the batch's."""
        if self._looks and self._world.size == 1 and span.is_first and not span.is_last and span.num_samples:
            self._norms.append(total_norm([p.grad for p in parameters if p.grad is not None]))

    @property
    def is_due(self) -> bool:
        """Whether the step under way was seen, so that `end` wants to know its whole gradient."""
        return bool(self._norms)

    def end(self, norm: Tensor, scale: Tensor | None) -> None:
        """The step's whole gradient has this norm; what was seen of it was multiplied with the loss scale."""
        assert self._span is not None
        own = torch.linalg.vector_norm(torch.stack(self._norms))
        self._norms = []
        rows = self._rows(self._span)
        if rows is None:
            return
        self._block.append((own if scale is None else own / scale, norm, rows))
        if len(self._block) == _BLOCK_STEPS:
            self._receive()
            self._send()

    def _rows(self, span: Pass) -> list[float] | None:
        """This worker's share of both estimates, as factors of both squared norms; None if the parts are the whole."""
        total, size = span.step_samples, self._world.size
        if size == 1:
            small, weight = float(span.num_samples), (total / span.num_samples) ** 2
        else:
            # The mean of a worker's n samples went into the whole with the weight n / total, and its squared norm is
            # averaged with the same: the mean of 1/n is then the number of workers that have samples, over the total.
            start, stop = part(span.step_start, span.step_stop, self._world.rank, size)
            small, weight = total / min(total, size), total / (stop - start) if stop > start else 0.0
        if small >= total:
            return None
        trace, square = solve(small, total, self._sigma)
        return [trace[0] * weight, trace[1] / size, square[0] * weight, square[1] / size]

    def _send(self) -> None:
        """Add up the block and let it travel."""
        if not self._block:
            return
        own, whole, rows = zip(*self._block, strict=True)
        self._block = []
        norms = torch.stack([torch.stack(own), torch.stack(whole)], dim=1).double()  # [steps, 2]
        is_finite = torch.isfinite(norms[:, 1])  # where the loss scale was too large, on all workers alike
        # Pinned, as the host would wait for the device otherwise.
        factors = torch.tensor(rows, dtype=torch.float64, pin_memory=norms.is_cuda)
        factors = factors.to(norms.device, non_blocking=True).view(-1, 2, 2)
        estimates = (factors * norms.square()[:, None, :]).sum(dim=2)  # [steps, (trace, square)]
        sums = torch.where(is_finite[:, None], estimates, 0.0).sum(dim=0)
        block = torch.cat([sums, is_finite.sum()[None] / self._world.size])
        work = dist.all_reduce(block, async_op=True) if self._world.size > 1 else None
        self._sent = block, work

    def _receive(self) -> None:
        """Take in the block before, which has long arrived."""
        if self._sent is None:
            return
        block, work = self._sent
        if work is not None:
            work.wait()
        self._moments = fold(self._moments, block)
        self._sent = None

    def read(self) -> NoiseScale:
        """The estimate as far as blocks have been taken in; waits for the device, and speaks to no other worker."""
        return estimate(self._moments.tolist())

    def state(self) -> list[float]:
        """What a checkpoint keeps. It ends the block under way, so every worker must call it."""
        self._receive()
        self._send()
        self._receive()
        return [float(value) for value in self._moments.tolist()]

    def take(self, state: Sequence[float]) -> None:
        """Go on from what `state` gave, with any number of workers."""
        self._norms, self._block, self._sent = [], [], None
        self._moments = torch.tensor(state, dtype=torch.float64, device=self._world.device)


def begin_sum(buffer: Tensor) -> torch.futures.Future[Tensor]:
    """Begin to sum a bucket of DDP's over the workers, in place."""
    future: torch.futures.Future[list[Tensor]] = dist.all_reduce(buffer, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The norm of all together."""
    alike: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        alike.setdefault(gradient.dtype, []).append(gradient)
    norms: list[Tensor] = [
        norm for dtype, group in alike.items() for norm in torch._foreach_norm(group, 2.0, _wide(dtype))
    ]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def _wide(dtype: torch.dtype) -> torch.dtype:
    """At least 32 bits: the estimates are differences of squares that are nearly equal."""
    return torch.promote_types(dtype, torch.float32)
