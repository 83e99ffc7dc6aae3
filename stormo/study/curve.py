"""Speed-up, efficiency, energy and losses at each number of workers, with 95 % intervals.

Runs of one repeat are compared with each other, so that whatever slows a whole repeat down cancels. Means are
geometric: on logarithms no interval reaches below 0, and the ratio of two means is the mean of the ratios.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stormo.study.measurement import Measurement

# Two-sided 95 % quantiles of Student's t for 1 to 9 degrees of freedom; beyond, the expansion below is exact enough.
_T95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
_Z95 = 1.959964
_WIDE = 100.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and, where it was measured more than once, its 95 % interval by Student's t."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def is_wide(self) -> bool:
        """True where the runs scatter so much that the interval says nothing."""
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
    """The geometric mean of repeated measurements, all above 0."""
    logs = [math.log(value) for value in values]
    mean = math.fsum(logs) / len(logs)
    if len(values) == 1:
        return Estimate(values[0])
    variance = math.fsum((log - mean) ** 2 for log in logs) / (len(logs) - 1)
    half = t95(len(logs) - 1) * math.sqrt(variance / len(logs))
    return Estimate(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The workers' time that ideal scaling would not have taken, as shares of all their time.

    The parts sum to the whole. One that was not measured is None and part of the rest. A negative part is a gain.
    """

    whole: float
    communication: float | None  # all workers waited for gradients
    input: float | None  # waited for data, more than the base did
    imbalance: float | None  # waited for slower workers
    rest: float  # smaller kernels, shared hardware, what was not measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One number of workers."""

    workers: int
    num_repeats: int
    units_per_s: Estimate
    speed_up: Estimate  # against the fewest workers
    efficiency: Estimate  # speed-up / (workers / fewest workers)
    j_per_sample: Estimate | None
    energy_ratio: Estimate | None  # J for a sample against the fewest workers
    time_to_target_s: Estimate | None  # of the runs that reached it
    energy_to_target_j: Estimate | None
    num_reached: int
    split: Split | None  # None for the fewest workers, the base
    note: str = ""  # how they were trained, where that differs from the others


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """All numbers of workers in one mode, fewest first."""

    mode: str
    unit: str
    energy_per: str  # the unit of energy: sample, image, ...
    points: tuple[Point, ...]
    energy_reason: str  # why energy was not measured, or ""
    measurements: tuple[Measurement, ...]

    @property
    def base(self) -> Point:
        """The fewest workers."""
        return self.points[0]


def make_curve(measurements: Sequence[Measurement], mode: str, energy_per: str = "sample") -> Curve | None:
    """The curve of one mode, or None where nothing was measured in it."""
    own = [one for one in measurements if one.mode in (mode, "both")]
    if not own:
        return None
    by_workers: dict[int, dict[int, Measurement]] = {}
    for one in sorted(own, key=lambda one: (one.workers, one.repeat)):
        by_workers.setdefault(one.workers, {})[one.repeat] = one
    base = by_workers[min(by_workers)]
    reasons = [one.energy_reason for one in own if one.j_per_sample is None]
    return Curve(
        mode=mode,
        unit=own[0].unit,
        energy_per=energy_per,
        points=tuple(_point(runs, base) for runs in by_workers.values()),
        # A run may have several, and its neighbour some of them.
        energy_reason="; ".join(dict.fromkeys(part for reason in reasons for part in reason.split("; ") if part))
        or "not recorded" * bool(reasons),
        measurements=tuple(own),
    )


def _point(runs: Mapping[int, Measurement], base: Mapping[int, Measurement]) -> Point:
    workers = next(iter(runs.values())).workers
    base_workers = next(iter(base.values())).workers
    ones = list(runs.values())
    speed_up = _against(runs, base, lambda one: one.samples_per_s)
    assert speed_up is not None
    return Point(
        workers=workers,
        num_repeats=len(ones),
        units_per_s=estimate([one.units_per_s for one in ones]),
        speed_up=speed_up,
        efficiency=speed_up.times(base_workers / workers),
        j_per_sample=_mean(ones, lambda one: one.j_per_sample, needs_all=True),
        energy_ratio=_against(runs, base, lambda one: one.j_per_sample),
        time_to_target_s=_mean(ones, lambda one: one.time_to_target_s),
        energy_to_target_j=_mean(ones, lambda one: one.energy_to_target_j),
        num_reached=sum(one.time_to_target_s is not None for one in ones),
        split=_split(runs, base, 1 - speed_up.value * base_workers / workers) if workers != base_workers else None,
        note=ones[0].note,
    )


def _mean(
    ones: Sequence[Measurement], of: Callable[[Measurement], float | None], *, needs_all: bool = False
) -> Estimate | None:
    known = [value for one in ones if (value := of(one)) is not None]
    return None if not known or (needs_all and len(known) < len(ones)) else estimate(known)


def _pairs(runs: Mapping[int, Measurement], base: Mapping[int, Measurement]) -> list[tuple[Measurement, Measurement]]:
    """Runs and the base's of the same repeat; without any, the first of each, which give no interval."""
    common = [repeat for repeat in runs if repeat in base]
    return [(runs[repeat], base[repeat]) for repeat in common] or [
        (next(iter(runs.values())), next(iter(base.values())))
    ]


def _against(
    runs: Mapping[int, Measurement], base: Mapping[int, Measurement], of: Callable[[Measurement], float | None]
) -> Estimate | None:
    """The ratio to the base, repeat by repeat."""
    ratios = []
    for one, other in _pairs(runs, base):
        above, below = of(one), of(other)
        if above is None or below is None or below == 0:
            return None
        ratios.append(above / below)
    return estimate(ratios)


def _split(runs: Mapping[int, Measurement], base: Mapping[int, Measurement], whole: float) -> Split:
    """The lost efficiency in parts: each is what a worker spent beyond its share of the base's."""
    pairs = _pairs(runs, base)

    def excess(of: Callable[[Measurement], float | None]) -> float | None:
        shares = []
        for one, other in pairs:
            spent, before = of(one), of(other)
            if spent is None or before is None:
                return None
            shares.append((spent - before * other.workers / one.workers) / one.sample_s)
        return math.fsum(shares) / len(shares)

    communication = excess(_communication_s)
    waited = excess(lambda one: one.input_s)
    imbalance = excess(_imbalance_s)
    parts = [part for part in (communication, waited, imbalance) if part is not None]
    return Split(
        whole=whole,
        communication=communication,
        input=waited,
        imbalance=imbalance,
        rest=whole - math.fsum(parts),
    )


def _communication_s(one: Measurement) -> float | None:
    # The worker that waits least for gradients waits for the exchange itself, not for a slower worker.
    return 0.0 if one.workers == 1 else one.exposed_min_s


def _imbalance_s(one: Measurement) -> float | None:
    if one.workers == 1:
        return 0.0
    if one.exposed_min_s is None or one.exposed_mean_s is None:
        return None
    return one.exposed_mean_s - one.exposed_min_s
