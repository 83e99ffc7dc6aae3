"""The comparison of the optimizers with their papers, in a few steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import optimizer_exactness
from benchmarks.optimizer_exactness import CASES, LIMIT, difference, lamb, lars, novograd


def test_every_optimizer_has_its_line_and_the_result_is_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert optimizer_exactness.main(["--steps", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition("  ")[0].strip() for line in lines[1:-1]] == [case.name for case in CASES]
    name, _, value = lines[-1].partition("=")
    assert name == "RESULT max_relative_difference"
    assert 0 <= float(value) <= LIMIT


@pytest.mark.parametrize(
    ("index", "wrong"),
    [
        (0, lars(decay=0.011)),
        (2, lars()),
        (4, lamb(bounds=(0.5, 2.0))),
        (6, novograd(averaging=True)),
    ],
)
def test_another_formula_is_told_apart(index: int, wrong: optimizer_exactness.Step) -> None:
    assert difference(replace(CASES[index], paper=wrong), 3) > 1e-6


def test_a_difference_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_exactness, "CASES", (replace(CASES[0], paper=lars(trust=0.2)),))
    assert optimizer_exactness.main(["--steps", "2"]) == 1
