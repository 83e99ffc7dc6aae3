"""Noise put on gradients, and the gradient noise scale measured beside training.

The noise is the same for every sample and step, however many workers and micro-batches there are. A task's loss is one
mean, so a sample's factor is put on the gradient of its row of the model's output. That is the gradient of the weighted
losses exactly, as long as the loss of a sample depends on its own output alone.

The noise scale costs no collective and no backward in a step. Workers compare the gradient of their own share with that
of the whole batch; one worker that accumulates compares its first micro-batch. Norms stay on the device; once in a
block of steps three numbers are summed over the workers in the background.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from stormo.config.schema import TrainConfig
from stormo.data.loaders import Batch, with_ghost
from stormo.data.order import Pass, derive_seed, part
from stormo.distributed.world import World
from stormo.errors import SettingError, counted
from stormo.optim.noise import (
    Box,
    ScaleRows,
    add_noise,
    add_noise_to_boxes,
    annealed_sigma,
    factor_sigma,
    sample_factors,
)
from stormo.optim.noise_scale import NUM_MOMENTS, NoiseScale, estimate, fold, solve


class GradientNoise:
    """What the settings ask for; where they ask for none, every call returns at once."""

    def __init__(self, settings: TrainConfig, device: torch.device) -> None:
        self._seed = settings.run.seed
        self._settings = settings.optimizer
        self._is_pinned = device.type == "cuda"
        self._drawn: tuple[tuple[int, int], Tensor] | None = None  # seed and samples of a step, and its factors

    def sigma(self, num_samples: int) -> float:
        """The spread of the samples' factors in a global batch of this size; 0 without them."""
        small = self._settings.gradient_noise_batch
        return 0.0 if small is None else factor_sigma(num_samples, small)

    @contextmanager
    def on_samples(self, model: nn.Module, batch: Batch, epoch: int) -> Iterator[None]:
        """While it holds, what the model returns carries the factors of the pass's samples into backward."""
        small, span = self._settings.gradient_noise_batch, batch.span
        if small is None or not self.sigma(span.step_samples):
            yield
            return
        start, stop = (position - span.step_start for position in with_ghost(span))
        seed = derive_seed(self._seed, "gradient noise", epoch, span.step_start)
        outputs = _Outputs(self._factors(span.step_samples, small, seed)[start:stop])
        # On the outermost object, so that nothing of it is compiled or captured.
        hook = model.register_forward_hook(outputs)
        try:
            yield
        finally:
            hook.remove()
        if not outputs.num_calls:
            raise SettingError(
                f"--gradient-noise-batch {small} was set",
                "loss() did not call the model that it was given, whose output the noise is put on",
                "call model(...) itself in loss(), not a part or a method of it",
            )

    def _factors(self, num_samples: int, small: int, seed: int) -> Tensor:
        """Those of the whole step, of which every pass takes its part."""
        if self._drawn is None or self._drawn[0] != (seed, num_samples):
            factors = sample_factors(num_samples, small, seed).to(torch.get_default_dtype())
            # Pinned, as the host would wait for the device when it sends them otherwise.
            self._drawn = (seed, num_samples), factors.pin_memory() if self._is_pinned else factors
        return self._drawn[1]

    def add(self, gradients: Iterable[Tensor | None], step: int) -> None:
        """Add the term of this step to the gradient of the whole batch, one a parameter, alike on all workers."""
        if self._settings.gradient_noise is not None:
            add_noise(gradients, *self._term(self._settings.gradient_noise, step))

    def add_to_boxes(self, boxes: Iterable[Box], step: int) -> None:
        """The same where a worker holds boxes of the gradients."""
        if self._settings.gradient_noise is not None:
            add_noise_to_boxes(boxes, *self._term(self._settings.gradient_noise, step))

    def _term(self, eta: float, step: int) -> tuple[float, int]:
        """Its spread and its seed."""
        sigma = annealed_sigma(eta, self._settings.gradient_noise_decay, step)
        return sigma, derive_seed(self._seed, "added noise", step)


class _Outputs:
    """A forward hook that passes every output through `ScaleRows`; of several calls each has the same factors."""

    def __init__(self, factors: Tensor) -> None:
        self._factors = factors
        self.num_calls = 0

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        self.num_calls += 1
        if not torch.is_grad_enabled():
            return output
        leaves, structure = tree_flatten_with_path(output)
        if not any(_is_trained(leaf) for _, leaf in leaves):
            raise _refusal(f"a {type(output).__name__} in which there is no tensor that has a gradient", self._factors)
        # One tensor returned twice remains one: the gradients of both places are summed before they meet the model.
        return tree_unflatten([self._scaled(keystr(path), leaf) for path, leaf in leaves], structure)

    def _scaled(self, place: str, leaf: Any) -> Any:
        if not _is_trained(leaf):
            return leaf
        if not leaf.ndim or len(leaf) != len(self._factors):
            shape = "x".join(map(str, leaf.shape)) or "a single number"
            raise _refusal(f"a tensor of {shape}{f' in {place}' if place else ''}", self._factors)
        self._factors = self._factors.to(leaf.device, non_blocking=True)
        return ScaleRows.apply(leaf, self._factors)  # type: ignore[no-untyped-call]


def _is_trained(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _refusal(returned: str, factors: Tensor) -> SettingError:
    return SettingError(
        "--gradient-noise-batch was set",
        f"the model returned {returned} for {counted(len(factors), 'sample')}, and every sample's row gets its factor",
        "let the model return tensors whose first dimension is the samples, or leave the noise out",
    )


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
