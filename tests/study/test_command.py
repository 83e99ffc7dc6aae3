"""A study that starts real runs: the tiny task on one worker; two workers are made up."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from stormo.study import main, runner
from tests.study.made_up import write_run

TASK = str(Path(__file__).parents[1] / "tiny_task.py")


def train(arguments: Sequence[str], log: Path, is_measured: Callable[[], bool]) -> int:
    flags = dict(pairwise(arguments))
    if flags["--num-gpus"] == "1":
        return runner.run_child(arguments, log, is_measured)
    write_run(Path(flags["--runs-folder"]) / flags["--run-name"], 100.0, batch=64, num_epochs=2)
    return 0


@pytest.mark.usefixtures("forked_programs")
def test_a_study_of_two_numbers_of_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "study"
    options = ["--workers", "1,2", "--device", "cpu", "--batch-size", "64", "--epochs", "2", "--task.num-train", "500"]
    code = main([TASK, *options, "--output", str(folder)], train)
    out = capsys.readouterr().out
    assert code == 0, out
    assert "speed-up against 1 worker" in out
    assert "Strong scaling: " in out
    (study,) = json.loads((folder / "scale.json").read_text(encoding="utf-8"))["studies"]
    assert [point["workers"] for point in study["points"]] == [1, 2]
    assert [one["batch"] for one in study["measurements"]] == [64, 64]  # strong: the same batch
    assert {one["basis"] for one in study["measurements"]} == {"epoch 2"}
    kept = (folder / "runs.jsonl").read_text(encoding="utf-8")
    assert main([TASK, *options, "--output", str(folder)], train) == 0  # everything is done already
    assert (folder / "runs.jsonl").read_text(encoding="utf-8") == kept
