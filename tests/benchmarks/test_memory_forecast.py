"""The forecast of memory against trainings: the comparison, with stand-ins for a GPU's trainings."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.memory_forecast import CELLS, Cell, compare, measure, predict, summarise
from stormo.system.hardware import KNOWN_GPUS
from stormo.training.settings import read_settings


def test_every_cell_is_a_training_that_stormo_knows() -> None:
    for flags in CELLS:
        read_settings(list(flags))


def test_a_cell_is_forecast_as_set_and_measured_by_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stormo.system.hardware.visible_gpus", lambda: [KNOWN_GPUS["h200"].described()])
    started: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        started.append(command)
        folder = tmp_path / command[command.index("--run-name") + 1]
        folder.mkdir()
        peaks = {"peak_memory_bytes": 2**30, "peak_reserved_memory_bytes": 2**31}
        (folder / "summary.json").write_text(json.dumps(peaks))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    small = ("language-model", "--task.block", "8", "--task.train-bytes", "512", "--task.validation-bytes", "256")
    assert measure(small, tmp_path, 0) == (2**30, 2**31)
    assert started[0][3:5] == ["train", "language-model"]
    (plain, *one), (captured, *two) = (predict([*small, "--num-gpus", "1", *f]) for f in (("--no-graph",), ()))
    assert [one, two] == [[False], [True]]
    # 16 bytes of each parameter and the workspace of 64 MiB.
    assert 16 * 1.0e6 + 2**26 < plain < 24 * 1.1e6 + 2**26
    assert captured > plain + 2**26  # a second workspace, and what runs beside the CUDA graph


def test_the_result_names_the_ratio_that_is_farthest_off() -> None:
    def measured(flags: Sequence[str], folder: Path, number: int) -> tuple[int, int]:
        return [(100, 190), (100, 190), (200, 300)][number]

    predicted = {"a": (104, False), "b": (80, False), "c": (220, True)}
    cells = compare([("a",), ("b",), ("c",)], 2, Path(), measured_by=measured, predicted_by=lambda f: predicted[f[0]])
    assert cells[1] == Cell(("b",), 80, False, 100, 190)
    *_, captured, result = summarise(cells)
    assert captured.split()[-2:] == ["yes", "1.100"]  # of what was held
    assert result == "RESULT median_ratio=1.04 worst_ratio=0.8 cells=3"
