"""The picture is drawn whatever was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from stormo.study.curve import make_curve
from stormo.study.fit import fit_model
from stormo.study.results import Result, draw
from tests.study.made_up import measurement, truth


def answer(measurements: list[object], mode: str) -> Result:
    curve = make_curve(measurements, mode)  # type: ignore[arg-type]
    assert curve is not None
    return curve, fit_model(curve.measurements, mode)


@pytest.mark.parametrize("is_rich", [True, False])
def test_picture(tmp_path: Path, is_rich: bool) -> None:
    answers = [answer([measurement(2, 10.0)], "strong")]
    if is_rich:
        strong = truth("strong", [1, 2, 4], repeats=3, noise=0.01, is_exposed=True)
        energetic = [
            measurement(workers, 100.0 * workers, mode="weak", j_per_sample=0.1, time_to_target_s=9.0)
            for workers in (1, 2)
        ]
        answers = [answer([*strong], "strong"), answer([*energetic], "weak")]
    draw(tmp_path / "scale.png", answers)
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")
