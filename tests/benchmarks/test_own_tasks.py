"""Tasks as users write them, compared with one process: a few of the cases."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.own_tasks import __main__, scripts, tasks
from benchmarks.own_tasks.tasks import Case, Outcome

TWO = ((2, ""),)


def test_a_token_mean_is_refused_and_with_its_count_it_is_equal(tmp_path: Path) -> None:
    refused, equal = tasks.run(tmp_path, [Case("TokenMean", TWO, refusal=("(loss, count)",)), Case("TokenCount", TWO)])
    assert (refused.verdict, equal.verdict) == ("refused", "equal")
    assert "return (loss, count)" in refused.detail


def test_what_differs_without_a_word_is_silent(tmp_path: Path) -> None:
    """A batch norm that is not synchronised trains otherwise on two workers; here nobody is told to expect it."""
    (found,) = tasks.run(tmp_path, [Case("BatchNorm", TWO)])
    assert found.verdict == "silent"


def test_the_command_fails_with_what_is_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = [Outcome("first", "equal", "0"), Outcome("second", "silent", "differs by 0.1")]
    monkeypatch.setattr(tasks, "run", lambda folder: outcomes)
    monkeypatch.setattr(scripts, "run", lambda folder: [Outcome("third", "refused", "a sentence")])
    assert __main__.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "RESULT tasks=3 equal=1 refused_rightly=1 silent=1"
    outcomes.pop()
    assert __main__.main([]) == 0
