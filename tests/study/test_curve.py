"""Means with their intervals, and the curve of one mode."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stormo.study.curve import Curve, Estimate, estimate, make_curve, t95
from tests.study.made_up import measurement


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


def curve(*measurements: object, mode: str = "strong") -> Curve:
    found = make_curve(measurements, mode)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_runs_of_one_repeat_are_compared_with_each_other() -> None:
    # The second repeat was twice as slow throughout: the speed-up is the same, and certain.
    found = curve(
        measurement(1, 100.0, repeat=1),
        measurement(2, 180.0, repeat=1),
        measurement(2, 90.0, repeat=2),
        measurement(1, 50.0, repeat=2),
    )
    two = found.points[1]
    assert (two.speed_up.value, two.speed_up.low, two.speed_up.high) == pytest.approx((1.8, 1.8, 1.8))
    assert two.efficiency.value == pytest.approx(0.9)
    assert two.units_per_s.high is not None
    assert two.units_per_s.high > 180


def test_fewest_workers_are_the_base_whatever_their_number() -> None:
    found = curve(measurement(8, 700.0), measurement(2, 200.0))
    assert [point.workers for point in found.points] == [2, 8]
    assert found.points[1].efficiency.value == pytest.approx(700 / 800)


def test_a_run_of_both_modes_is_the_base_of_each() -> None:
    one, strong, weak = (
        measurement(1, 100.0, mode="both"),
        measurement(2, 150.0, mode="strong"),
        measurement(2, 190.0, mode="weak"),
    )
    assert curve(one, strong, weak).points[1].speed_up.value == pytest.approx(1.5)
    assert curve(one, strong, weak, mode="weak").points[1].speed_up.value == pytest.approx(1.9)
    assert make_curve([strong], "weak") is None


def test_parts_of_the_loss_sum_to_the_whole() -> None:
    found = curve(
        measurement(1, 100.0, input_s=0.001),
        measurement(4, 250.0, input_s=0.00035, exposed_min_s=0.0006, exposed_mean_s=0.0008),
        measurement(1, 99.0, repeat=2, input_s=0.002),
        measurement(4, 255.0, repeat=2, input_s=0.00045, exposed_min_s=0.0005, exposed_mean_s=0.0009),
    )
    split = found.points[1].split
    assert split is not None
    parts = [split.communication, split.input, split.imbalance, split.rest]
    assert math.fsum(part for part in parts if part is not None) == pytest.approx(split.whole, abs=1e-15)
    assert split.whole == pytest.approx(1 - found.points[1].efficiency.value)
    # By hand: 0.0006 s and 0.0005 s of the 1/250 s and 1/255 s that a sample takes.
    assert split.communication == pytest.approx((0.0006 * 250 + 0.0005 * 255) / 2)
    assert split.imbalance == pytest.approx((0.0002 * 250 + 0.0004 * 255) / 2)
    assert split.input == pytest.approx(((0.00035 - 0.001 / 4) * 250 + (0.00045 - 0.002 / 4) * 255) / 2)


def test_what_was_not_measured_is_inside_the_rest() -> None:
    split = curve(measurement(1, 100.0), measurement(4, 300.0)).points[1].split
    assert split is not None
    assert (split.communication, split.input, split.imbalance) == (None, None, None)
    assert split.rest == split.whole == pytest.approx(0.25)


def test_energy_missing_in_one_run_is_no_energy_and_keeps_its_reason() -> None:
    found = curve(
        measurement(1, 100.0, j_per_sample=1.0),
        measurement(2, 190.0, j_per_sample=1.1),
        measurement(2, 190.0, repeat=2, energy_reason="no counter"),
        measurement(2, 190.0, repeat=3, energy_reason="no counter; waiting was not measured"),
    )
    assert found.points[0].j_per_sample is not None
    assert found.points[1].j_per_sample is None
    assert found.energy_reason == "no counter; waiting was not measured"  # each once
