"""Gradient noise: factors for the samples of a large batch, and a Gaussian term that decays.

The factors (Hoffer et al., arXiv 1705.08741) are drawn from N(1, sigma²): they keep the mean of a batch's gradient and,
with 1 + sigma² = large batch / small batch, give it the covariance that the small batch has. The term (Neelakantan et
al., arXiv 1511.06807) is drawn from N(0, eta / (1 + step)^gamma). Seeds come from outside; there is no state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from stormo.data.order import derive_seed


def factor_sigma(num_samples: int, small_batch: int) -> float:
    """The standard deviation of factors that give a batch the noise of a small one; 0 if it is no larger."""
    return math.sqrt(max(0.0, num_samples / small_batch - 1.0))


def sample_factors(num_samples: int, small_batch: int, seed: int) -> Tensor:
    """One factor per sample of a global batch, float64 on the CPU; a pure function of the arguments."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(num_samples, generator=generator, dtype=torch.float64)
    return drawn.mul_(factor_sigma(num_samples, small_batch)).add_(1.0)


class ScaleRows(torch.autograd.Function):
    """The identity; backward multiplies the gradient of each row (first dimension) by its factor."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, factors: Tensor) -> Tensor:
        """Return a view, so that torch refuses a loss that changes it in place."""
        ctx.factors = factors
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Multiply in the wider of both dtypes, then round to the gradient's."""
        factors = ctx.factors.view(-1, *[1] * (gradient.ndim - 1))
        return (gradient * factors).to(gradient.dtype), None


def annealed_sigma(eta: float, gamma: float, step: int) -> float:
    """The standard deviation of the term added in a step, counted from 0."""
    return math.sqrt(eta / (1.0 + step) ** gamma)


# The gradient of a shard, the index of its parameter in the model, the shape of the whole parameter, and the offset
# of the shard in each dimension.
Chunk = tuple[Tensor, int, tuple[int, ...], tuple[int, ...]]


@torch.no_grad()
def add_noise(chunks: Iterable[Chunk], sigma: float, seed: int) -> None:
    """Add N(0, sigma²) to every element, in place; the numbers depend on seed and device type only.

    Args:
        chunks: in any order; a shard gets the noise of its place in the whole parameter.
        sigma: the standard deviation.
        seed: of the step; each parameter derives its own from it.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for gradient, number, whole_shape, offset in chunks:
        device = gradient.device
        if not gradient.numel():
            continue
        if device not in generators:
            generators[device] = torch.Generator(device)
        generator = generators[device].manual_seed(derive_seed(seed, number))
        # Independent of strides, which may differ between workers.
        drawn = torch.randn(whole_shape, generator=generator, dtype=gradient.dtype, device=device)
        for dim, (start, size) in enumerate(zip(offset, gradient.shape, strict=True)):
            drawn = drawn.narrow(dim, start, size)
        gradient.add_(drawn, alpha=sigma)
