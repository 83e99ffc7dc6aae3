"""The model finds the truth that the measurements were made from, and says what they cannot tell."""

from __future__ import annotations

import numpy as np
import pytest

from stormo.study.curve import Estimate
from stormo.study.fit import Fit, _non_negative, fit_model
from tests.study.made_up import measurement, step_s, truth


def fitted(*arguments: object, **options: object) -> Fit:
    found = fit_model(truth(*arguments, **options), str(arguments[0]))  # type: ignore[arg-type]
    assert isinstance(found, Fit)
    return found


def holds(one: Estimate | None, value: float) -> bool:
    assert one is not None
    assert one.low is not None
    assert one.high is not None
    return one.low <= value <= one.high


@pytest.mark.parametrize(("mode", "is_exposed"), [("strong", True), ("weak", False), ("weak", True)])
def test_serial_share_and_communication_are_recovered(mode: str, is_exposed: bool) -> None:
    found = fitted(mode, [1, 2, 4, 8], serial=0.05, communication_s=0.02, is_exposed=is_exposed)
    assert found.serial_share.value == pytest.approx(0.05)
    assert found.communication_s is not None
    assert found.communication_s.value == pytest.approx(0.02)
    assert found.one_worker_s.value == pytest.approx(0.2)
    assert found.misfit == pytest.approx(0, abs=1e-9)
    assert found.note == ""


def test_strong_times_alone_cannot_tell_communication_from_serial_work() -> None:
    found = fitted("strong", [1, 2, 4, 8], serial=0.05, communication_s=0.02)
    assert found.communication_s is None
    assert found.serial_share.value == pytest.approx(0.05 + 0.02 / 0.2)  # both together
    assert "counted together" in found.note
    for workers in (2, 32):  # and the curve is the truth all the same
        ideal = step_s("strong", 1, 0.2, 0.05, 0.02) / workers
        assert found.efficiency(workers, 1).value == pytest.approx(ideal / step_s("strong", workers, 0.2, 0.05, 0.02))


def test_weak_with_two_numbers_of_workers_takes_the_simpler_model_and_says_so() -> None:
    found = fitted("weak", [1, 4], serial=0.02, communication_s=0.0)
    assert found.communication_s is None
    assert "two numbers" in found.note
    assert (found.degrees, found.draws) == (0, None)
    assert found.serial_share == Estimate(pytest.approx(0.02))


def test_one_number_of_workers_gives_no_model() -> None:
    assert isinstance(fit_model(truth("strong", [2, 2]), "strong"), str)


@pytest.mark.parametrize(("mode", "is_exposed"), [("strong", True), ("weak", False)])
def test_intervals_cover_the_truth(mode: str, is_exposed: bool) -> None:
    options = {"serial": 0.1, "communication_s": 0.05, "noise": 0.01, "repeats": 3, "is_exposed": is_exposed}
    found = [fitted(mode, [1, 2, 4, 8], seed=seed, **options) for seed in range(150)]
    for covered in (
        sum(holds(one.serial_share, 0.1) for one in found),
        sum(holds(one.communication_s, 0.05) for one in found),
        sum(holds(one.one_worker_s, 0.2) for one in found),
    ):
        assert 0.88 < covered / 150 <= 1.0


def test_where_efficiency_falls_under_one_half_is_found_with_its_interval() -> None:
    # Efficiency is 1 / (1 + k (N - 1)): with k = 0.15 it is one half at N = 1 + 1 / 0.15 = 7.7.
    found = fitted("strong", [1, 2, 4], serial=0.15, communication_s=0.0, noise=0.01, repeats=4)
    half = found.first_below(0.5, 1, 16)
    assert half is not None
    assert half.value in (7, 8, 9)
    assert holds(half, 8)
    assert found.first_below(0.5, 1, 5) is None


def test_times_that_grow_leave_every_parameter_at_its_bound_and_the_misfit_shows() -> None:
    found = fit_model([measurement(1, 100.0), measurement(2, 60.0), measurement(4, 30.0)], "strong")
    assert isinstance(found, Fit)
    assert found.serial_share.value == 1.0
    assert found.misfit > 0.3


def test_non_negative_least_squares_against_a_fine_grid() -> None:
    generator = np.random.default_rng(2)
    for _ in range(5):
        design, target = generator.normal(size=(6, 2)), generator.normal(size=6)
        found = _non_negative(design, target)
        grid = np.stack(np.meshgrid(*[np.linspace(0, 3, 301)] * 2), axis=-1).reshape(-1, 2)
        best = np.min(np.sum((grid @ design.T - target) ** 2, axis=1))
        assert (found >= 0).all()
        assert np.sum((design @ found - target) ** 2) <= best + 1e-12


def test_numbers_of_workers_that_are_nearly_alike_in_the_model_are_fitted() -> None:
    found = fitted("weak", [1024, 2048, 4096], serial=0.0, communication_s=0.1, noise=0.01, repeats=3)
    assert found.draws is not None
    assert np.isfinite(found.draws).all()
    assert found.first_below(0.5, 1024, 4096) is None


def test_times_of_communication_alone_give_no_model() -> None:
    reason = fit_model(truth("weak", [2, 4, 8], one_worker_s=0.0, communication_s=0.1), "weak")
    assert isinstance(reason, str)
