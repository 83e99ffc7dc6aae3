"""What is taken from the files of a run: never its warm-up, never what was not recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stormo.errors import StormoError
from stormo.study.cells import Cell
from stormo.study.reading import measure_run, measured_s
from tests.study.made_up import write_run

CELL = Cell(mode="strong", workers=2)


def steps(folder: Path, *records: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "events.jsonl").open("a", encoding="utf-8") as file:
        for number, record in enumerate(records, start=1):
            step = {"event": "step_done", "step": number, "samples_per_s": 9.0, "units_per_s": 9.0, "unit": "images"}
            file.write(json.dumps({**step, "input_wait_fraction": 0.1, **record}) + "\n")
    return folder


def test_epochs_after_the_first_are_measured(tmp_path: Path) -> None:
    workers = [
        {"rank": 0, "input_wait_s": 0.5, "exposed_s": 0.25},
        {"rank": 1, "input_wait_s": 0.3, "exposed_s": 0.75},
    ]
    write_run(tmp_path / "run", 100.0, energy_j=500.0, workers=workers)
    found = measure_run(tmp_path / "run", CELL)
    assert (found.samples_per_s, found.units_per_s, found.unit) == pytest.approx((100.0, 200.0, "tokens"))
    assert found.j_per_sample == pytest.approx(0.5)
    assert found.input_s == pytest.approx(2 * 0.4 / 2000)
    assert found.exposed_min_s == pytest.approx(2 * 0.25 / 2000)
    assert found.exposed_mean_s == pytest.approx(2 * 0.5 / 2000)
    assert (found.batch, found.basis) == (32, "epochs 2 to 3")


def test_keys_that_are_absent_or_null_are_not_measured(tmp_path: Path) -> None:
    write_run(tmp_path / "absent", 100.0)
    write_run(tmp_path / "null", 100.0, energy_j=None, workers=[{"rank": 0, "input_wait_s": 0.1, "exposed_s": None}])
    summary = {"energy_reasons": ["RAPL: permission denied"], "time_to_target_s": 12.5, "energy_to_target_j": None}
    (tmp_path / "null" / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    absent, null = measure_run(tmp_path / "absent", CELL), measure_run(tmp_path / "null", CELL)
    assert (absent.j_per_sample, absent.energy_reason) == (None, "the runs recorded none")
    assert (absent.input_s, absent.exposed_min_s) == (None, None)
    assert (null.j_per_sample, null.energy_reason) == (None, "RAPL: permission denied")
    assert null.input_s is not None
    assert (null.exposed_min_s, null.exposed_mean_s) == (None, None)
    assert (null.time_to_target_s, null.energy_to_target_j) == (12.5, None)


def test_epochs_too_short_for_the_counters_are_taken_together(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 100.0, num_epochs=6)
    path = tmp_path / "run" / "events.jsonl"
    started, *epochs = [json.loads(line) for line in path.read_text().splitlines()]
    for epoch, energy_j in zip(epochs, [None, 5000.0, None, None, 900.0, None], strict=True):
        epoch["energy_j"] = energy_j
    path.write_text("".join(f"{json.dumps(event)}\n" for event in [started, *epochs]))
    assert measure_run(tmp_path / "run", CELL).j_per_sample == pytest.approx(900.0 / 3000)
    path.write_text("".join(f"{json.dumps(event)}\n" for event in [started, *epochs[:4]]))
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"energy_j": 6000.0, "energy_reasons": ["a note"]}))
    found = measure_run(tmp_path / "run", CELL)
    assert (found.j_per_sample, found.energy_reason) == (None, "they are too short for the counters: set more --epochs")


def test_a_run_that_was_ended_early_is_measured_by_its_steps(tmp_path: Path) -> None:
    folder = steps(
        tmp_path / "run",
        {"samples_seen": 10, "train_time_s": 4.0, "power_w": 1000.0},  # the warm-up
        {"samples_seen": 20, "train_time_s": 6.0, "power_w": 1000.0},
        {"samples_seen": 40, "train_time_s": 8.0, "power_w": 50.0},
        {"samples_seen": 60, "train_time_s": 10.0, "power_w": 70.0},
    )
    assert measured_s(folder) == pytest.approx(4.0)
    found = measure_run(folder, CELL)
    assert found.samples_per_s == pytest.approx(10.0)
    assert found.j_per_sample == pytest.approx(6.0)  # 60 W at 10 samples a second
    assert found.input_s == pytest.approx(0.1 / 10)
    assert (found.exposed_min_s, found.basis) == (None, "2 steps")
    on_two_nodes = measure_run(folder, Cell(mode="strong", workers=2, num_nodes=2))
    assert on_two_nodes.j_per_sample is None  # the power of one node is not that of both
    assert "several nodes" in on_two_nodes.energy_reason


def test_steps_after_a_first_epoch_are_measured_from_its_end(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 100.0, num_epochs=1)  # 1000 samples in 50 s
    folder = steps(tmp_path / "run", {"step": 40, "samples_seen": 1300, "train_time_s": 53.0})
    assert measured_s(folder) == pytest.approx(3.0)
    assert measure_run(folder, CELL).samples_per_s == pytest.approx(100.0)


def test_nothing_beyond_the_warm_up_is_an_error(tmp_path: Path) -> None:
    folder = steps(tmp_path / "run", {"samples_seen": 10, "train_time_s": 1.0})
    assert measured_s(folder) == 0.0
    with pytest.raises(StormoError, match="before anything was measured"):
        measure_run(folder, CELL)
    assert measured_s(tmp_path / "none yet") == 0.0


def test_a_first_epoch_that_ends_late_does_not_shorten_what_was_measured(tmp_path: Path) -> None:
    folder = steps(
        tmp_path / "run",
        {"samples_seen": 100, "train_time_s": 5.0},
        {"samples_seen": 400, "train_time_s": 20.0},
    )
    with (folder / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write(
            json.dumps({"event": "epoch_done", "step": 3, "samples_seen": 450, "cumulative_time_s": 22.5}) + "\n"
        )
    steps(folder, {"step": 4, "samples_seen": 460, "train_time_s": 23.0})
    assert measured_s(folder) == pytest.approx(18.0)
    assert measure_run(folder, CELL).samples_per_s == pytest.approx(20.0)
