"""The comparison of several workers with one, in a tiny setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import exactness
from benchmarks.exactness import LIMIT, Case, Compared, cases
from tests import programs

GROUP = cases([2])[0].group


def compared(difference: float, *, validation_equal: bool = True, is_control: bool = False) -> Compared:
    case = Case(group=GROUP, num_workers=2, is_control=is_control)
    return Compared(
        case=case, difference=difference, losses=(2.0,), accuracies=(0.5,), validation_equal=validation_equal
    )


def test_difference_above_the_limit_or_another_validation_fails() -> None:
    assert compared(LIMIT).is_good
    assert not compared(2 * LIMIT).is_good
    assert not compared(float("nan")).is_good
    assert not compared(0.0, validation_equal=False).is_good


def test_control_must_differ() -> None:
    assert compared(0.1, is_control=True).is_good
    assert not compared(1e-12, is_control=True).is_good


def test_every_group_has_one_reference_which_comes_first() -> None:
    every = cases([2, 3])
    for group in {case.group for case in every}:
        assert [case.is_reference for case in every if case.group == group].index(True) == 0
        assert sum(case.is_reference for case in every if case.group == group) == 1


def run_to_end(command: list[str]) -> None:
    done = programs.run(command[1:], Path.cwd(), int(command[command.index("--num-gpus") + 1]))
    assert done.returncode == 0, done.stderr


def test_two_workers_equal_one_and_unsynchronised_ones_do_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exactness, "run_to_end", run_to_end)
    synchronised = [case for case in cases([2]) if case.group == GROUP]
    monkeypatch.setattr(exactness, "cases", lambda world_sizes: synchronised)
    # Two steps an epoch; the last one has a single sample, which leaves one of two workers without any.
    sizes = ["--train-samples", "6", "--global-batch-size", "5", "--validation-samples", "7", "--epochs", "2"]
    assert exactness.main([*sizes, "--world-sizes", "2"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    figures = dict(word.split("=") for word in last.removeprefix("RESULT ").split())
    assert float(figures["max_relative_difference"]) <= LIMIT
    assert (figures["validation_equal"], figures["configurations"]) == ("1", "1")
    assert float(figures["control_difference"]) > exactness.CONTROL_LIMIT
