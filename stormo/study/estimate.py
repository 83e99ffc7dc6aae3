"""A geometric mean with its 95 % interval by Student's t; without repeats there is none, and nothing stands in for it.

Speeds, times, energies and their ratios are above 0 and scatter by factors: on their logarithms no interval reaches
below 0, and the ratio of two means is the mean of the ratios.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Two-sided 95 % quantiles of Student's t for 1 to 9 degrees of freedom; beyond, the expansion below is exact enough.
_T95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
_Z95 = 1.959964
_WIDE = 100.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and, where it was measured more than once, its 95 % interval."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def is_wide(self) -> bool:
        """Whether the runs scatter so much that their interval says nothing."""
        return self.low is not None and self.high is not None and self.high > _WIDE * self.low

    def times(self, factor: float) -> Estimate:
        """The same figure in another unit; the factor is above 0."""
        scaled = (None if end is None else end * factor for end in (self.low, self.high))
        return Estimate(self.value * factor, *scaled)


def t95(degrees: int) -> float:
    """The two-sided 95 % quantile of Student's t (Abramowitz and Stegun 26.7.5)."""
    if degrees <= len(_T95):
        return _T95[degrees - 1]
    z = _Z95
    first = (z**3 + z) / (4 * degrees)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    return z + first + second + third


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of repeated measurements, all above 0."""
    logs = [math.log(value) for value in values]
    mean = math.fsum(logs) / len(logs)
    if len(values) == 1:
        return Estimate(values[0])
    variance = math.fsum((log - mean) ** 2 for log in logs) / (len(logs) - 1)
    half = t95(len(logs) - 1) * math.sqrt(variance / len(logs))
    return Estimate(math.exp(mean), math.exp(mean - half), math.exp(mean + half))
