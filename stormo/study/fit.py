"""A model of the time of a step by the number of workers: Amdahl's serial share and the communication of a ring.

A step of one worker takes T1, of which the share s is serial; a ring of N workers takes c (N - 1) / N for gradients.
Strong: T(N) = T1 (s + (1 - s) / N) + c (N - 1) / N. Weak, where a step grows with the workers:
T(N) = T1 (s N + 1 - s) + c (N - 1) / N. In strong scaling s and c have the same effect on time, so they can be
separated only where communication itself was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from stormo.study.curve import Estimate
from stormo.study.measurement import Measurement

_NUM_DRAWS = 4000
_ROUNDING = 1e-9  # a smaller share of the time counts as none
_Array = Any  # a numpy array

# Factors of (T1 s, T1 (1 - s), c) in the time of a step.
TERMS: dict[str, Callable[[Any], tuple[Any, Any, Any]]] = {
    "strong": lambda workers: (1.0, 1.0 / workers, (workers - 1) / workers),
    "weak": lambda workers: (workers, 1.0, (workers - 1) / workers),
}


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The fitted model; its times are those of a step or, where no batch is known, of one sample a worker."""

    mode: str
    misfit: float  # the largest deviation of a measured mean from the curve, as a share of it
    degrees: int  # measurements beyond the parameters; 0: it passes through every point and is not tested
    note: str  # what could not be separated, or ""
    coefficients: _Array
    draws: _Array | None  # other coefficients that fit as well, for the intervals

    @property
    def serial_share(self) -> Estimate:
        """The share of a step that more workers do not shorten."""
        return self.follow(lambda one: one[:, 0] / (one[:, 0] + one[:, 1]))

    @property
    def communication_s(self) -> Estimate | None:
        """The time for gradients; None where it cannot be separated from the serial share."""
        return None if self.note else self.follow(lambda one: one[:, 2])

    @property
    def one_worker_s(self) -> Estimate:
        """The time of a step of one worker."""
        return self.follow(lambda one: one[:, 0] + one[:, 1])

    def efficiency(self, workers: int, base_workers: int) -> Estimate:
        """Efficiency against the fewest workers that were measured."""
        return self.follow(lambda coefficients: self._efficiency(coefficients, workers, base_workers))

    def speed_up(self, workers: int, base_workers: int) -> Estimate:
        """Speed-up against the fewest workers that were measured."""
        return self.efficiency(workers, base_workers).times(workers / base_workers)

    def first_below(self, share: float, base_workers: int, most: int) -> Estimate | None:
        """The fewest workers, up to `most`, whose efficiency is below a share; None where it stays above.

        The upper end is infinite where some of the curves that fit as well stay above.
        """
        import numpy as np

        def first(coefficients: _Array) -> _Array:
            low = np.full(len(coefficients), base_workers)
            high = np.full(len(coefficients), most + 1)
            while (low < high).any():  # a binary search, as efficiency only falls
                middle = (low + high) // 2
                is_below = self._efficiency(coefficients, middle, base_workers) < share
                low, high = np.where(is_below, low, middle + 1), np.where(is_below, middle, high)
                low = np.minimum(low, high)
            return np.where(low > most, np.inf, low)

        found = self.follow(first)
        return None if math.isinf(found.value) else found

    def _efficiency(self, coefficients: _Array, workers: _Array | int, base_workers: int) -> _Array:
        time, base = (_step_s(self.mode, coefficients, count) for count in (workers, base_workers))
        growth = workers / base_workers if self.mode == "strong" else 1.0
        return base / (time * growth)

    def follow(self, of: Callable[[_Array], _Array]) -> Estimate:
        """A function of the coefficients, with its interval."""
        import numpy as np

        value = float(of(self.coefficients[None, :])[0])
        if self.draws is None:
            return Estimate(value)
        low, high = np.quantile(of(self.draws), (0.025, 0.975), method="inverted_cdf")
        return Estimate(value, float(min(low, value)), float(max(high, value)))


def fit_model(measurements: Sequence[Measurement], mode: str) -> Fit | str:
    """The model by least squares of relative times, or why there is none."""
    import numpy as np

    distinct = sorted({one.workers for one in measurements})
    if len(distinct) < 2:
        return "one number of workers says nothing about another"
    means_s = _mean_step_s(measurements, mode)
    rows, targets, weights = [], [], []
    for one in measurements:
        batch, terms = _batch(one, mode), TERMS[mode](one.workers)
        rows.append(terms)
        targets.append(batch * one.sample_s)
        weights.append(1.0 / means_s[one.workers])
        if one.workers > 1 and one.exposed_min_s is not None:  # communication itself was measured
            rows.append((0.0, 0.0, terms[2]))
            targets.append(batch * one.exposed_min_s)
            weights.append(1.0 / means_s[one.workers])
    design = np.array(rows) * np.array(weights)[:, None]
    target = np.array(targets) * np.array(weights)
    note, columns = "", [0, 1, 2]
    if np.linalg.matrix_rank(design) < 3:
        columns = [0, 1]
        note = (
            "serial work and communication have the same effect on these times and are counted together"
            if mode == "strong"
            else "two numbers of workers cannot separate communication from serial work: they are counted together"
        )
    coefficients = np.zeros(3)
    coefficients[columns] = _non_negative(design[:, columns], target)
    if coefficients[:2].sum() <= _ROUNDING * coefficients.sum():
        return "the times are those of communication alone, which leaves no work to share"
    degrees = len(target) - len(columns)
    return Fit(
        mode=mode,
        misfit=_misfit(mode, measurements, coefficients),
        degrees=degrees,
        note=note,
        coefficients=coefficients,
        draws=_draws(design, target, coefficients, columns, degrees) if degrees > 0 else None,
    )


def _batch(one: Measurement, mode: str) -> float:
    if one.batch is not None:
        return one.batch
    return one.workers if mode == "weak" else 1.0


def _non_negative(design: _Array, target: _Array) -> _Array:
    """Least squares without negative coefficients: the best of all subsets of the columns."""
    import numpy as np

    num = design.shape[1]
    best, best_error = np.zeros(num), float(target @ target)
    for size in range(1, num + 1):
        for chosen in combinations(range(num), size):
            found = np.linalg.lstsq(design[:, chosen], target, rcond=None)[0]
            error = float(np.sum((design[:, chosen] @ found - target) ** 2))
            if (found >= 0).all() and error < best_error:
                best, best_error = np.zeros(num), error
                best[list(chosen)] = found
    return best


def _draws(design: _Array, target: _Array, coefficients: _Array, columns: Sequence[int], degrees: int) -> _Array:
    """Coefficients drawn by the scatter of the measurements (Student's t), none negative."""
    import numpy as np

    used = design[:, columns]
    residual = used @ coefficients[columns] - target
    deviation = math.sqrt(float(residual @ residual) / degrees)
    generator = np.random.default_rng(0)  # the same answer for the same measurements
    # The Cholesky factor of the covariance is unique, so every machine draws the same. It is taken from the QR of the
    # reversed columns, as columns that are nearly alike make their product singular.
    triangle = np.linalg.qr(used[:, ::-1], mode="r")
    triangle *= np.sign(np.diag(triangle))[:, None]
    factor = np.linalg.inv(triangle)[::-1, ::-1] * deviation
    normal = generator.standard_normal((_NUM_DRAWS, len(columns))) @ factor.T
    scale = np.sqrt(degrees / generator.chisquare(degrees, size=(_NUM_DRAWS, 1)))
    drawn = np.zeros((_NUM_DRAWS, 3))
    drawn[:, columns] = np.maximum(coefficients[columns] + normal * scale, 0.0)
    return drawn[drawn[:, 0] + drawn[:, 1] > 0]


def _step_s(mode: str, coefficients: _Array, workers: _Array | int) -> _Array:
    """The time of a step by the model, for each row of coefficients."""
    return sum(column * term for column, term in zip(coefficients.T, TERMS[mode](workers), strict=True))


def _mean_step_s(measurements: Sequence[Measurement], mode: str) -> dict[int, float]:
    """The mean time of a step, by number of workers."""
    times: dict[int, list[float]] = {}
    for one in measurements:
        times.setdefault(one.workers, []).append(_batch(one, mode) * one.sample_s)
    return {workers: math.fsum(found) / len(found) for workers, found in times.items()}


def _misfit(mode: str, measurements: Sequence[Measurement], coefficients: _Array) -> float:
    means_s = _mean_step_s(measurements, mode).items()
    return max(abs(float(_step_s(mode, coefficients, workers)) / mean_s - 1.0) for workers, mean_s in means_s)
