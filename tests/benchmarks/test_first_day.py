"""The steps of a first day: what is tried, skipped and counted; the day itself is a benchmark."""

from __future__ import annotations

from pathlib import Path

from benchmarks.command import result_line
from benchmarks.first_day import Day, Step, StepError, figures, table, walk


def _fails() -> str:
    raise StepError("no such file")


def _clock() -> float:
    _clock.now += 1.0  # type: ignore[attr-defined]
    return float(_clock.now)  # type: ignore[attr-defined]


_clock.now = 0.0  # type: ignore[attr-defined]


def test_steps_are_taken_skipped_and_counted() -> None:
    steps = [
        Step("first", lambda: "2 files"),
        Step("second", _fails),
        Step("third", _fails, needs=("torch", "nothing_of_this_name")),
        Step("fourth", lambda: "still taken", is_vital=True),
    ]
    outcomes = walk(steps, lambda package: package == "torch", _clock)
    assert [one.state for one in outcomes] == ["ok", "failed", "skipped", "ok"]
    lines = table(outcomes)
    assert lines[1].split() == ["first", "ok", "1.0", "2", "files"]
    assert lines[3].endswith("not installed: nothing_of_this_name")
    assert lines[-1] == "\nsecond failed: no such file"
    assert result_line(figures(outcomes)) == "RESULT steps=4 failed=1 skipped=1 seconds=3"


def test_nothing_follows_a_vital_step_that_fails() -> None:
    outcomes = walk([Step("install", _fails, is_vital=True), Step("train", _fails)], bool)
    assert [(one.name, one.state) for one in outcomes] == [("install", "failed")]


def test_a_day_has_all_verbs_of_a_newcomer(tmp_path: Path) -> None:
    steps = Day(tmp_path / "day", is_fresh=False).steps()
    names = [step.name for step in steps]
    assert len(names) == len(set(names)) == 17
    assert [step.name for step in steps if step.is_vital] == names[:4]
