"""One study that really trains: the tiny task on one worker and on two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stormo.study import main

TASK = str(Path(__file__).parents[1] / "tiny_task.py")


def test_two_numbers_of_workers_end_with_table_bars_and_paragraph(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "study"
    options = ["--workers", "1,2", "--device", "cpu", "--batch-size", "64", "--epochs", "2", "--task.num-train", "500"]
    code = main([TASK, *options, "--output", str(folder)])
    out = capsys.readouterr().out
    assert code == 0, out
    assert "speed-up against 1 worker" in out
    assert "Strong scaling: " in out
    (study,) = json.loads((folder / "scale.json").read_text(encoding="utf-8"))["studies"]
    assert [point["workers"] for point in study["points"]] == [1, 2]
    assert [one["batch"] for one in study["measurements"]] == [64, 64]  # strong: the same batch
    assert {one["basis"] for one in study["measurements"]} == {"epoch 2"}
    kept = (folder / "cells.jsonl").read_text(encoding="utf-8")
    assert main([TASK, *options, "--output", str(folder)]) == 0  # everything is done already
    assert (folder / "cells.jsonl").read_text(encoding="utf-8") == kept
