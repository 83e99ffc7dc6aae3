"""The gradient noise scale (McCandlish et al., arXiv 1812.06162, appendix A): estimates, their range, and advice.

The squared norm of a gradient over n samples is on average |G|² + tr(Sigma)/n. From two sizes, the shares of the
workers and the whole batch, follow both; batches beyond their ratio tr(Sigma)/|G|² bring little.
Both are averaged before they are divided, as the mean of ratios would be biased.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_HORIZON = 512  # steps of the moving averages
_MIN_BLOCKS = 8.0
_MAX_RANGE = 10.0  # largest useful ratio of the upper to the lower bound
NUM_MOMENTS = 7
TOO_FEW_STEPS = "too few steps were measured"


def solve(small: float, large: int, sigma: float) -> tuple[tuple[float, float], tuple[float, float]]:
    """The rows that make tr(Sigma) and |G|² of the squared norms (over `small` samples, over the whole batch).

    Args:
        small: samples of a part, the harmonic mean where several are averaged.
        large: samples of the whole batch.
        sigma: standard deviation of the noise factors of the samples' gradients, whose effect is removed.
    """
    trace = 1 / (1 / small - 1 / large)
    square = 1 / (large - small)
    # Factors of variance v make tr(Sigma) + v (tr(Sigma) + |G|²) of tr(Sigma), and leave |G|² as it is.
    v = sigma**2
    return (
        ((trace + v * small * square) / (1 + v), (-trace - v * large * square) / (1 + v)),
        (-small * square, large * square),
    )


def fold(moments: Tensor, block: Tensor) -> Tensor:
    """Add the mean of a block of steps to the moments; an empty block, or one with an overflow, changes nothing.

    Args:
        moments: [weight, weight², then weighted: trace, square, trace², trace × square, square²].
        block: [sum of trace, sum of square, number of steps].
    """
    count = block[2]
    trace, square = block[0] / count, block[1] / count
    one = torch.ones_like(count)
    new = torch.stack([one, count, trace, square, trace * trace, trace * square, square * square]) * count
    kept = torch.exp(count * math.log1p(-1 / _HORIZON))
    decayed = moments * torch.stack([kept, kept * kept, *[kept] * (NUM_MOMENTS - 2)])
    return torch.where(torch.isfinite(new).all(), decayed + new, moments)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseScale:
    """An estimate in samples with its 95 % range, None where it is unknown."""

    value: float | None
    low: float | None = None
    high: float | None = None
    reason: str = ""  # why there is no range

    def advice(self, global_batch_size: int) -> str:
        """What it means for the batch of the run."""
        if self.value is None or self.low is None or self.high is None:
            return f"Gradient noise scale: nothing can be said of the useful batch, because {self.reason}."
        useful = max(1, round(self.value))
        found = (
            f"Gradient noise scale: larger batches bring little beyond about {_rounded(useful)} samples "
            f"({_rounded(self.low)} to {_rounded(self.high)} with 95 %)"
        )
        ratio = self.value / global_batch_size
        found += f"; you train at {global_batch_size:,}"
        if ratio >= 1.5:
            return f"{found}, so more workers pay: up to about {ratio:.2g} times as many, each with the same batch."
        if ratio >= 1 / 1.5:
            return f"{found}, which is about there: more workers pay little."
        return f"{found}, which is {'' if ratio >= 0.1 else 'far '}beyond it: more workers do not pay."


def estimate(moments: Sequence[float]) -> NoiseScale:
    """The noise scale and its range, from the spread of the blocks' means."""
    weight, weight_2, *sums = moments
    if not weight:
        return NoiseScale(value=None, reason=TOO_FEW_STEPS)
    trace, square, trace_2, cross, square_2 = (value / weight for value in sums)
    if trace <= 0 or square <= 0:
        return NoiseScale(value=None, reason="its estimate is smaller than its own spread")
    value, num_blocks = trace / square, weight**2 / weight_2
    if num_blocks < _MIN_BLOCKS:
        return NoiseScale(value=value, reason=TOO_FEW_STEPS)
    # Fieller's range of a ratio of means: it knows that a denominator near zero leaves the ratio open.
    t = 1.96 + 3.0 / (num_blocks - 1)  # close to Student's from 4 blocks on
    spread = t**2 / (num_blocks - 1)
    a = square**2 - spread * (square_2 - square**2)
    b = trace * square - spread * (cross - trace * square)
    c = trace**2 - spread * (trace_2 - trace**2)
    root = b**2 - a * c
    if a <= 0 or root < 0:
        return NoiseScale(value=value, reason=f"its estimate of {_rounded(value)} samples has no upper bound")
    low, high = max(0.0, (b - math.sqrt(root)) / a), (b + math.sqrt(root)) / a
    if high > _MAX_RANGE * low:
        reason = f"its estimate is as wide as {_rounded(low)} to {_rounded(high)} samples"
        return NoiseScale(value=value, reason=reason)
    return NoiseScale(value=value, low=low, high=high)


def _rounded(number: float) -> str:
    """Two significant digits."""
    if number < 10:
        return f"{number:.2g}"
    unit = 10 ** (math.floor(math.log10(number)) - 1)
    return f"{round(number / unit) * unit:,.0f}"
