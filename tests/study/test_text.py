"""The paragraph, word for word, for each kind of answer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stormo.study.curve import make_curve
from stormo.study.fit import fit_model
from stormo.study.measurement import Measurement
from stormo.study.text import figure, paragraph, report_lines
from tests.study.made_up import measurement, truth


def said(measurements: Sequence[Measurement], mode: str = "strong", energy_per: str = "sample") -> str:
    curve = make_curve(measurements, mode, energy_per)
    assert curve is not None
    return paragraph(curve, fit_model(curve.measurements, mode))


def runs(speeds: dict[int, Sequence[float]], energy: dict[int, Sequence[float]] | None = None) -> list[Measurement]:
    return [
        measurement(
            workers,
            rate,
            repeat=repeat,
            j_per_sample=energy[workers][repeat - 1] if energy else None,
            energy_reason="" if energy else "no counter",
        )
        for workers, rates in speeds.items()
        for repeat, rate in enumerate(rates, start=1)
    ]


def test_pays_for_time_and_not_for_energy() -> None:
    speeds = {1: (100.0, 102.0, 99.0), 2: (182.0, 186.0, 181.0), 4: (309.0, 314.0, 306.0)}
    energy = {1: (0.50, 0.51, 0.50), 2: (0.55, 0.56, 0.55), 4: (0.66, 0.67, 0.65)}
    assert said(runs(speeds, energy)) == (
        "In strong scaling more workers pay for time: 4 workers train 3.09 times as fast as 1 worker "
        "(95 % interval 3.07 to 3.10), each of them put to 77 % use. "
        "Extrapolated, not measured: efficiency falls under 50 % at 12 workers (95 % interval 11 to 13), and at 16 "
        "workers, 4 times the most that were measured, the speed-up would be 6.45 (95 % interval 6.03 to 6.90). "
        "For energy they do not pay: a sample takes 0.553 J with 2 workers and 0.503 J with 1, +9.9 % "
        "(95 % interval +9.7 to +10.2 %); it is least with 1 worker."
    )


def test_does_not_pay() -> None:
    speeds = {1: (100.0, 102.0), 2: (71.0, 72.5), 4: (40.0, 41.0)}
    assert said(runs(speeds)) == (
        "In strong scaling more workers do not pay for time: 2 workers train 0.710 times as fast as 1 worker "
        "(95 % interval 0.705 to 0.715) and every other number that was measured is slower still. "
        "Efficiency is under 50 % from 2 workers on (35.5 %, 95 % interval 35.3 to 35.8). "
        "The fitted model misses the measurements by up to 49 %, so nothing is extrapolated from it. "
        "Energy was not measured (no counter), so nothing is said of it."
    )


def test_cannot_be_told() -> None:
    speeds = {1: (100.0, 120.0, 90.0), 2: (104.0, 112.0, 99.0)}
    energy = {1: (0.5, 0.5, 0.5), 2: (0.48, 0.53, 0.49)}
    assert said(runs(speeds, energy)) == (
        "In strong scaling it cannot be told whether more workers pay for time: 2 workers train 1.02 times as fast as "
        "1 worker, and the 95 % interval 0.831 to 1.26 holds 1; more repeats would narrow it. "
        "Two numbers of workers cannot tell where efficiency falls under 50 % or how many more would pay: that takes a "
        "third, with which a model can be tested. "
        "Whether they pay for energy cannot be told: a sample takes 0.500 J with 2 workers and 0.500 J with 1, -0.1 % "
        "(95 % interval -12.3 to +13.8 %), and the interval holds 0."
    )


def test_two_points_measured_once_say_what_they_cannot_tell() -> None:
    table = [measurement(1, 652.0, mode="weak", j_per_sample=68 / 652)]
    table.append(measurement(4, 2500.0, mode="weak", j_per_sample=280 / 2500))
    assert said(table, "weak", "image") == (
        "In weak scaling more workers pay for time: 4 workers train 3.83 times as fast as 1 worker (measured once, so "
        "without an interval), each of them put to 96 % use. "
        "Two numbers of workers cannot tell where efficiency falls under 50 % or how many more would pay: that takes a "
        "third, with which a model can be tested. "
        "For energy they do not pay: an image takes 0.112 J with 4 workers and 0.104 J with 1, +7.4 % (measured once); "
        "it is least with 1 worker."
    )


@pytest.mark.parametrize(
    ("rate", "answer"), [(96.0, "it cannot be"), (104.0, "it cannot be"), (94.0, "more workers do")]
)
def test_a_single_measurement_close_to_one_tells_nothing(rate: float, answer: str) -> None:
    text = said(runs({1: (100.0,), 2: (rate,)}, {1: (1.0,), 2: (1.02,)}))
    assert text.startswith(f"In strong scaling {answer}")
    assert ("what is measured once may be 5 % off; more repeats (--repeats 3) would tell" in text) is (rate > 95)
    assert "Whether they pay for energy cannot be told: a sample takes 1.02 J with 2 workers" in text


def test_one_number_of_workers_says_nothing() -> None:
    assert said([measurement(2, 10.0)]) == (
        "It cannot be told whether more workers pay in strong scaling: 2 workers alone were measured, and at least two "
        "numbers of workers are needed."
    )


def test_time_that_stops_falling_and_energy_that_falls() -> None:
    text = said(
        runs(
            {1: (100.0, 101.0), 2: (190.0, 191.0), 4: (150.0, 152.0)},
            {1: (1.0, 1.0), 2: (0.8, 0.81), 4: (1.2, 1.21)},
        )
    )
    assert "Time stops falling there: with 4 workers it is 1.50 times (95 % interval" in text
    assert "They pay for energy too: a sample takes 0.805 J with 2 workers and 1.00 J with 1, -19.5 %" in text


def test_an_efficiency_whose_interval_holds_one_half_is_told_with_care() -> None:
    text = said(runs({1: (100.0, 100.0, 100.0), 2: (85.0, 105.0, 98.0)}))
    assert "Efficiency is probably under 50 % from 2 workers on (47.8 %, 95 % interval" in text


def test_energy_may_pay_where_time_does_not() -> None:
    text = said(runs({1: (100.0,), 2: (80.0,), 4: (70.0,)}, {1: (1.0,), 2: (0.8,), 4: (0.9,)}))
    assert "They pay for energy: a sample takes" in text


def test_a_run_without_energy_in_a_repeat_of_its_own_leaves_energy_untold() -> None:
    ones = runs({1: (100.0, 101.0), 2: (190.0, 191.0, 192.0)}, {1: (1.0, 1.0), 2: (0.8, 0.81, 0.8)})
    ones[-1] = measurement(2, 192.0, repeat=3, energy_reason="its counter went away")
    assert "Energy was not measured (its counter went away)" in said(ones)


def test_without_a_model_nothing_is_extrapolated() -> None:
    ones = truth("weak", [2, 4, 8], one_worker_s=0.0, communication_s=0.1)
    assert "There is no model to extrapolate from, as the times follow" in said(ones, "weak")


def test_more_than_ideal_is_doubted_and_not_extrapolated() -> None:
    text = said(runs({1: (100.0,), 2: (300.0,), 4: (500.0,)}))
    assert "That 2 workers do 150 % of the ideal says that something else held 1 worker back" in text
    assert "xtrapolated" not in text


@pytest.mark.parametrize("counts", [(1, 2, 4, 8), (2, 4, 8)])
def test_extrapolation_goes_no_further_than_four_times_the_most_measured(counts: tuple[int, ...]) -> None:
    text = said(truth("strong", counts, serial=0.0, communication_s=0.0001, repeats=3, noise=0.001))
    assert "efficiency stays above 50 % as far as 32 workers, and at 32 workers" in text


def test_target_is_told_where_it_was_reached() -> None:
    text = said(
        [
            measurement(1, 100.0, time_to_target_s=50.0, energy_to_target_j=900.0),
            measurement(2, 190.0, time_to_target_s=30.0, energy_to_target_j=1000.0),
            measurement(2, 190.0, repeat=2),
        ]
    )
    assert text.endswith(
        "The target was reached soonest with 2 workers, after 30.0 s of training. Not every run reached it: 1 of 2 "
        "with 2 workers. It took the least energy with 1 worker: 900 J."
    )


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (0.01234, "0.0123"), (1.0, "1.00"), (12.34, "12.3"), (99999.0, "99,999")]
)
def test_figures_have_three_digits(value: float, text: str) -> None:
    assert figure(value) == text


def test_lines_hold_the_table_the_bars_and_the_losses() -> None:
    exposed = {"exposed_min_s": 0.0005, "exposed_mean_s": 0.0006, "input_s": 0.0}
    curve = make_curve([measurement(1, 100.0, input_s=0.0), measurement(4, 250.0, **exposed)], "strong")
    assert curve is not None
    lines = report_lines(curve, fit_model(curve.measurements, "strong"), plain=True)
    assert lines[2:5] == [
        "workers  runs  images/s  speed-up  efficiency  J/sample",
        "      1     1       100      1.00     100.0 %       n/a",
        "      4     1       250      2.50      62.5 %       n/a",
    ]
    assert "4 ###############################                   | 2.50" in lines
    assert "      4  37.5 %         12.5 %       0.0 %      2.5 %    22.5 %" in lines
    assert all(len(line) <= 100 for line in lines)


def test_runs_that_scatter_too_widely_give_no_interval() -> None:
    speeds = {1: (100.0, 300.0), 2: (150.0, 40.0)}
    text = said(runs(speeds, {1: (1.0, 3.0), 2: (4.0, 1.0)}))
    assert "the runs scatter too widely to tell more" in text
    assert text.endswith(
        "2.00 J with 2 workers and 1.73 J with 1, +15.5 % (its runs scatter too widely for an interval)."
    )
    curve = make_curve(runs(speeds), "strong")
    assert curve is not None
    assert any(
        "(scatters)" in line for line in report_lines(curve, fit_model(curve.measurements, "strong"), plain=True)
    )
