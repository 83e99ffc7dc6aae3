"""Gradient noise, and the gradient noise scale measured during training.

The noise is the same for every sample and step, however many workers and micro-batches there are. A task's loss is one
mean, so a sample's factor is applied to the gradient of its row of the model's output. That is exactly the gradient of
weighted losses if the loss of a sample depends only on its own output.

The noise scale needs no collective and no backward in a step. Workers compare the gradient of their share with that of
the whole batch; a single worker compares its first micro-batch. Norms stay on the device, and once in a block of steps
three numbers are summed over the workers in the background.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stormo.config.schema import TrainConfig
from stormo.data.loaders import Batch
from stormo.data.order import MicroBatch, derive_seed, split_step
from stormo.distributed.world import World
from stormo.errors import SettingError, pluralize
from stormo.optim.noise import Chunk, ScaleRows, add_noise, annealed_sigma, factor_sigma, sample_factors
from stormo.optim.noise_scale import NUM_MOMENTS, NoiseScale, estimate, fold, solve
from stormo.parallel.exposed import HostCopy
from stormo.parallel.pytree import keystr, tree_flatten_with_path, tree_unflatten


class GradientNoise:
    """The noise of the settings; without any, every call returns at once."""

    def __init__(self, settings: TrainConfig, device: torch.device) -> None:
        self._seed = settings.run.seed
        self._settings = settings.optimizer
        self._is_pinned = device.type == "cuda"
        self._drawn: tuple[tuple[int, int], Tensor] | None = None  # seed and samples of a step, and its factors

    def sigma(self, num_samples: int) -> float:
        """The standard deviation of the samples' factors in a global batch of this size; 0 without them."""
        small = self._settings.gradient_noise_batch
        return 0.0 if small is None else factor_sigma(num_samples, small)

    @contextmanager
    def on_samples(self, model: nn.Module, batch: Batch, epoch: int) -> Iterator[None]:
        """Inside it, backward multiplies the gradients of the model's output by the factors of the samples."""
        small, span = self._settings.gradient_noise_batch, batch.span
        if small is None or not self.sigma(span.step_samples):
            yield
            return
        start, stop = (position - span.step_start for position in span.padded)
        seed = derive_seed(self._seed, "gradient noise", epoch, span.step_start)
        outputs = _Outputs(self._factors(span.step_samples, small, seed)[start:stop])
        # On the outermost module, so that the hook is neither compiled nor captured.
        hook = model.register_forward_hook(outputs)
        try:
            yield
        finally:
            hook.remove()
        if not outputs.num_calls:
            raise SettingError(
                f"--gradient-noise-batch {small} was set",
                "loss() did not call the model, whose output gets the noise",
                "call model(...) itself in loss(), not a part or a method of it",
            )

    def _factors(self, num_samples: int, small: int, seed: int) -> Tensor:
        """The factors of the whole step, of which every micro-batch takes its part."""
        if self._drawn is None or self._drawn[0] != (seed, num_samples):
            factors = sample_factors(num_samples, small, seed).to(torch.get_default_dtype())
            # Pinned, so that the host does not wait for the device.
            self._drawn = (seed, num_samples), factors.pin_memory() if self._is_pinned else factors
        return self._drawn[1]

    def add(self, chunks: Iterable[Chunk], step: int) -> None:
        """Add the noise of this step to the gradient of the whole batch, the same on all workers."""
        if self._settings.gradient_noise is not None:
            sigma = annealed_sigma(self._settings.gradient_noise, self._settings.gradient_noise_decay, step)
            add_noise(chunks, sigma, derive_seed(self._seed, "added noise", step))


class _Outputs:
    """A forward hook that applies `ScaleRows` to every output; each call has the same factors."""

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
        # A tensor that is returned twice stays one: autograd sums both gradients first.
        return tree_unflatten([self._scaled(keystr(path), leaf) for path, leaf in leaves], structure)

    def _scaled(self, path: str, leaf: Any) -> Any:
        if not _is_trained(leaf):
            return leaf
        if not leaf.ndim or len(leaf) != len(self._factors):
            shape = "x".join(map(str, leaf.shape)) or "a single number"
            raise _refusal(f"a tensor of {shape}{f' in {path}' if path else ''}", self._factors)
        self._factors = self._factors.to(leaf.device, non_blocking=True)
        return ScaleRows.apply(leaf, self._factors)  # type: ignore[no-untyped-call]


def _is_trained(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _refusal(returned: str, factors: Tensor) -> SettingError:
    return SettingError(
        "--gradient-noise-batch was set",
        f"the model returned {returned} for {pluralize(len(factors), 'sample')}, and each sample's row gets its factor",
        "let the model return tensors whose first dimension is the samples, or leave the noise out",
    )


_BLOCK_STEPS = 8
_DENSE_STEPS = 128  # at the start of a run, which are all measured; later one in
_SPARSE = 8


class NoiseScaleMeter:
    """The running estimate; the same on all workers, except for the current block."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._moments = torch.zeros(NUM_MOMENTS, dtype=torch.float64, device=world.device)
        self._on_host = HostCopy(self._moments, [0.0] * NUM_MOMENTS)
        self._span: MicroBatch | None = None  # the first micro-batch of the step
        self._accumulate, self._sigma = 1, 0.0
        self._is_measuring = False
        self._norms: list[Tensor] = []  # of this worker's own gradient, in pieces
        self._captured: list[Tensor] = []  # the same, as a CUDA graph writes them
        # NCCL divides while it sums, which saves a pass over the gradients.
        self._divides = world.size > 1 and world.device.type == "cuda" and dist.get_backend() != "gloo"
        self._block: list[tuple[Tensor, Tensor, list[float]]] = []  # norms, own and whole; factors
        self._sent: tuple[Tensor, dist.Work | None] | None = None  # the block before, while it is summed

    def begin(self, span: MicroBatch, accumulate: int, sigma: float, step: int) -> None:
        """Start a step of so many micro-batches with this one; factors have this standard deviation."""
        self._span, self._accumulate, self._sigma = span, accumulate, sigma
        self._norms = list(self._captured)  # which a replay writes; an exchange by Python begins anew
        self._is_measuring = step < _DENSE_STEPS or step % _SPARSE == 0  # by the step, so that a resume changes nothing

    def forget(self) -> None:
        """Ignore everything until the next step starts."""
        self._norms, self._is_measuring = [], False

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Inside it, a micro-batch is captured as a CUDA graph, whose replays write the norms of the last one."""
        self._is_measuring = True
        try:
            yield
        finally:
            self._captured = self._norms
            self.forget()

    def update(self, gradient: Tensor, factor: float = 1.0) -> None:
        """Take a piece of this worker's own gradient, times a factor, before it is exchanged."""
        if self._is_measuring:
            norm = torch.linalg.vector_norm(gradient, dtype=_wide(gradient.dtype))
            self._norms.append(norm if factor == 1.0 else norm * factor)

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's mean of a bucket over the workers, to the last bit, after `update`."""
        buffer = bucket.buffer()
        if bucket.index() == 0:
            self._norms = []  # of a replay, or of a pass that is captured later
        if buffer.layout is not torch.strided:
            return begin_sum(buffer.div_(self._world.size))  # a sparse gradient has its own bucket, and is not measured
        if self._divides:
            self.update(buffer, 1.0 / self._world.size)
            return begin_sum(buffer, dist.ReduceOp.AVG)
        self.update(buffer.mul_(1.0 / self._world.size))
        return begin_sum(buffer)

    def update_micro_batch(self, span: MicroBatch, parameters: Iterable[Tensor]) -> None:
        """After a micro-batch: a single worker takes the gradients after the first one."""
        if self._is_measuring and self._world.size == 1 and span.is_first and not span.is_last and span.num_samples:
            self._norms.append(total_norm([p.grad for p in parameters if p.grad is not None]))

    @property
    def is_due(self) -> bool:
        """Whether this step is measured, so that `end` needs the norm of its whole gradient."""
        return self._is_measuring and bool(self._norms)

    def end(self, norm: Tensor, scale: Tensor | None) -> None:
        """End a step whose whole gradient has this norm; the pieces were multiplied by the loss scale."""
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

    def _rows(self, span: MicroBatch) -> list[float] | None:
        """Factors of both squared norms in both estimates; None if the own gradient is the whole one."""
        total, size = span.step_samples, self._world.size
        if size == 1:
            small, weight = float(span.num_samples), (total / span.num_samples) ** 2
        else:
            # The mean of a worker's n samples has the weight n / total in the whole, and its squared norm is averaged
            # with the same weight: the mean of 1/n is then the number of workers with samples, over the total.
            shares = [self._share(span, rank) for rank in range(size if total < size * self._accumulate else 0)]
            own = self._share(span, self._world.rank)
            small, weight = total / (sum(map(bool, shares)) or size), total / own if own else 0.0
        if small >= total:
            return None
        trace, square = solve(small, total, self._sigma)
        return [trace[0] * weight, trace[1] / size, square[0] * weight, square[1] / size]

    def _share(self, span: MicroBatch, rank: int) -> int:
        """The samples of a worker in the step."""
        spans = split_step(span.step_start, span.step_stop, self._accumulate, rank, self._world.size)
        return sum(one.num_samples for one in spans)

    def _send(self) -> None:
        """Start to sum the block over the workers."""
        if not self._block:
            return
        own, whole, rows = zip(*self._block, strict=True)
        self._block = []
        norms = torch.stack([torch.stack(own), torch.stack(whole)], dim=1).double()  # [steps, 2]
        is_finite = torch.isfinite(norms[:, 1])  # not if the loss scale was too large, which all workers know
        # Pinned, so that the host does not wait for the device.
        factors = torch.tensor(rows, dtype=torch.float64, pin_memory=norms.is_cuda)
        factors = factors.to(norms.device, non_blocking=True).view(-1, 2, 2)
        estimates = (factors * norms.square()[:, None, :]).sum(dim=2)  # [steps, (trace, square)]
        sums = torch.where(is_finite[:, None], estimates, 0.0).sum(dim=0)
        block = torch.cat([sums, is_finite.sum()[None] / self._world.size])
        work = dist.all_reduce(block, async_op=True) if self._world.size > 1 else None
        self._sent = block, work

    def _receive(self) -> None:
        """Add the previous block, which has long arrived."""
        if self._sent is None:
            return
        block, work = self._sent
        if work is not None:
            work.wait()
        self._moments = fold(self._moments, block)
        self._on_host.begin(self._moments)
        self._sent = None

    def read(self) -> NoiseScale:
        """The estimate of the blocks received so far; on a GPU of those that have reached the host."""
        return estimate(self._on_host.read())

    def collect_moments(self) -> list[float]:
        """The weighted sums, for a checkpoint. It ends the current block, so all workers call it."""
        self._receive()
        self._send()
        self._receive()
        return [float(value) for value in self._moments.tolist()]

    def load_moments(self, moments: Sequence[float]) -> None:
        """Resume from what `collect_moments` gave, with any number of workers."""
        self._norms, self._block, self._sent = [], [], None
        self._moments = torch.tensor(moments, dtype=torch.float64, device=self._world.device)
        self._on_host = HostCopy(self._moments, list(moments))


def begin_sum(
    buffer: Tensor, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None
) -> torch.futures.Future[Tensor]:
    """Start to sum, or average, a bucket of DDP over the workers, in place."""
    future: torch.futures.Future[list[Tensor]] = dist.all_reduce(buffer, op, group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The norm of all gradients together."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    norms: list[Tensor] = [
        norm for dtype, group in by_dtype.items() for norm in torch._foreach_norm(group, 2.0, _wide(dtype))
    ]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def _wide(dtype: torch.dtype) -> torch.dtype:
    """At least 32 bits: the estimates are differences of squares that are nearly equal."""
    return torch.promote_types(dtype, torch.float32)
