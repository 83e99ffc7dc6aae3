"""The whole text of a study, for each kind of answer: `golden/scale.txt` is what a reviewer reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stormo.study.curve import make_curve
from stormo.study.fit import fit_model
from stormo.study.measurement import Measurement
from stormo.study.report_text import figure, report_lines
from tests.golden import check_golden
from tests.study.made_up import measurement, truth


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


def once(*rates: float) -> dict[int, Sequence[float]]:
    return {2**power: (rate,) for power, rate in enumerate(rates)}


T4 = [
    measurement(1, 652.0, mode="weak", j_per_sample=68 / 652),
    measurement(4, 2500.0, mode="weak", j_per_sample=280 / 2500),
]
PARTS: dict[str, Any] = {"exposed_min_s": 0.0005, "exposed_mean_s": 0.0006, "input_s": 0.0}
# One of three repeats has no energy, and the fewest workers lack that repeat.
ENERGY_LOST = [
    *runs({1: (100.0, 101.0), 2: (190.0, 191.0)}, {1: (1.0, 1.0), 2: (0.8, 0.81)}),
    measurement(2, 192.0, repeat=3, energy_reason="its counter went away"),
]
TARGET = [
    measurement(1, 100.0, time_to_target_s=50.0, energy_to_target_j=900.0),
    measurement(2, 190.0, time_to_target_s=30.0, energy_to_target_j=1000.0),
    measurement(2, 190.0, repeat=2),
]
CASES: dict[str, Sequence[Measurement]] = {
    "saves time and no energy": runs(
        {1: (100.0, 102.0, 99.0), 2: (182.0, 186.0, 181.0), 4: (309.0, 314.0, 306.0)},
        {1: (0.50, 0.51, 0.50), 2: (0.55, 0.56, 0.55), 4: (0.66, 0.67, 0.65)},
    ),
    "saves no time": runs({1: (100.0, 102.0), 2: (71.0, 72.5), 4: (40.0, 41.0)}),
    "not certain": runs(
        {1: (100.0, 120.0, 90.0), 2: (104.0, 112.0, 99.0)}, {1: (0.5, 0.5, 0.5), 2: (0.48, 0.53, 0.49)}
    ),
    "two numbers, measured once": T4,
    "one number of workers": [measurement(2, 10.0)],
    "measured once, 4 % below": runs(once(100.0, 96.0), once(1.0, 1.02)),
    "measured once, 4 % above": runs(once(100.0, 104.0), once(1.0, 1.02)),
    "measured once, 6 % below": runs(once(100.0, 94.0), once(1.0, 1.02)),
    "more workers are slower again, energy falls": runs(
        {1: (100.0, 101.0), 2: (190.0, 191.0), 4: (150.0, 152.0)}, {1: (1.0, 1.0), 2: (0.8, 0.81), 4: (1.2, 1.21)}
    ),
    "efficiency around one half": runs({1: (100.0, 100.0, 100.0), 2: (85.0, 105.0, 98.0)}),
    "saves energy and no time": runs(once(100.0, 80.0, 70.0), once(1.0, 0.8, 0.9)),
    "energy of one run is missing": ENERGY_LOST,
    "no model": truth("weak", [2, 4, 8], one_worker_s=0.0, communication_s=0.1),
    "better than ideal": runs(once(100.0, 300.0, 500.0)),
    "scales far": truth("strong", (1, 2, 4, 8), serial=0.0, communication_s=0.0001, repeats=3, noise=0.001),
    "scales far from two workers": truth(
        "strong", (2, 4, 8), serial=0.0, communication_s=0.0001, repeats=3, noise=0.001
    ),
    "target": TARGET,
    "all parts of the loss": [measurement(1, 100.0, input_s=0.0), measurement(4, 250.0, **PARTS)],
    "some parts of the loss, one worker alone": [
        measurement(1, 100.0, input_s=0.0, is_of_steps=True, note="strategy single, as one worker cannot have tensor"),
        measurement(4, 250.0, input_s=0.0001, is_of_steps=True),
    ],
    "scatters": runs({1: (100.0, 300.0), 2: (150.0, 40.0)}, {1: (1.0, 3.0), 2: (4.0, 1.0)}),
}


def test_the_whole_text_for_each_kind_of_answer() -> None:
    shown: list[str] = []
    for name, measurements in CASES.items():
        mode, energy_per = measurements[0].mode, "image" if measurements is T4 else "sample"
        curve = make_curve(measurements, mode, energy_per)
        assert curve is not None
        shown += [f"==== {name} ====", *report_lines(curve, fit_model(curve.measurements, mode))]
    assert all(len(line) <= 100 for line in shown)
    check_golden(Path(__file__).parent / "golden" / "scale.txt", "\n".join(shown))


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (0.01234, "0.0123"), (1.0, "1.00"), (12.34, "12.3"), (99999.0, "99,999")]
)
def test_figures_have_three_digits(value: float, text: str) -> None:
    assert figure(value) == text
