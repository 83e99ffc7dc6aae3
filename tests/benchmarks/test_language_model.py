"""The benchmark of the language model, in the small form that a machine without a GPU runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks import language_model
from benchmarks.command import train_command
from stormo.system.hardware import visible_gpus
from tests import programs


def _run_to_end(command: list[str]) -> None:
    # The later of two equal options wins; all of the validation set would take most of the time.
    done = programs.run([*command[1:], "--task.validation-bytes", "1000"], Path.cwd())
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(bool(visible_gpus()), reason="the form without a GPU is looked at and there is one")
def test_it_prints_both_speeds_and_no_mfu_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_command("x")[1:] == ["-m", "stormo", "train", "x"]
    monkeypatch.setattr(language_model, "run_to_end", _run_to_end)
    monkeypatch.setattr(sys, "argv", ["language_model", "--batch-size", "1", "--steps", "30"])
    language_model.main()
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"RESULT tokens_per_s=\S+ plain_tokens_per_s=\S+ peak_memory_bytes=\d+ loss=\S+", last), last


def test_too_few_steps_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["language_model", "--steps", "5"])
    with pytest.raises(SystemExit) as ended:
        language_model.main()
    assert ended.value.code == 2
    assert "--steps 5 is too few for a median" in capsys.readouterr().err
