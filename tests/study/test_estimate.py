"""The interval of a mean holds the truth as often as it says."""

from __future__ import annotations

import numpy as np
import pytest

from stormo.study.estimate import Estimate, estimate, t95


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.706), (2, 4.303), (9, 2.262), (10, 2.228), (15, 2.131), (30, 2.042), (120, 1.980)],
)
def test_quantiles_are_those_of_printed_tables(degrees: int, quantile: float) -> None:
    assert t95(degrees) == pytest.approx(quantile, abs=6e-4)


def test_one_measurement_has_no_interval() -> None:
    assert estimate([3.0]) == Estimate(3.0, None, None)


def test_interval_by_hand() -> None:
    found = estimate([1.0, 2.0, 4.0])  # logarithms to base 2: 0, 1, 2, of standard deviation 1
    half = 4.3027 / 3**0.5
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2 ** (1 - half), 2 ** (1 + half)))


def test_interval_covers_the_truth_about_95_times_in_100() -> None:
    generator = np.random.default_rng(1)
    found = [estimate(list(7.0 * np.exp(generator.normal(0.0, 0.3, size=4)))) for _ in range(2000)]
    covered = sum(one.low <= 7.0 <= one.high for one in found if one.low is not None and one.high is not None)
    assert 0.93 < covered / 2000 < 0.97
