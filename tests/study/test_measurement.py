"""Measurements from the files of a run, and from a CSV file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stormo.errors import SettingError, StormoError
from stormo.study.measurement import CsvTable, measure_run, measured_s, read_csv
from stormo.study.study import Run
from tests.study.made_up import write_run

RUN = Run(mode="strong", workers=2)


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
    found = measure_run(tmp_path / "run", RUN)
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
    absent, null = measure_run(tmp_path / "absent", RUN), measure_run(tmp_path / "null", RUN)
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
    assert measure_run(tmp_path / "run", RUN).j_per_sample == pytest.approx(900.0 / 3000)
    path.write_text("".join(f"{json.dumps(event)}\n" for event in [started, *epochs[:4]]))
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"energy_j": 6000.0, "energy_reasons": ["a note"]}))
    found = measure_run(tmp_path / "run", RUN)
    assert (found.j_per_sample, found.energy_reason) == (
        None,
        "the epochs are too short for the counters: set more --epochs",
    )


def test_a_run_that_was_ended_early_is_measured_by_its_steps(tmp_path: Path) -> None:
    folder = steps(
        tmp_path / "run",
        {"samples_seen": 10, "train_time_s": 4.0, "power_w": 1000.0},  # the warm-up
        {"samples_seen": 20, "train_time_s": 6.0, "power_w": 1000.0},
        {"samples_seen": 40, "train_time_s": 8.0, "power_w": 50.0},
        {"samples_seen": 60, "train_time_s": 10.0, "power_w": 70.0},
    )
    assert measured_s(folder) == pytest.approx(4.0)
    found = measure_run(folder, RUN)
    assert found.samples_per_s == pytest.approx(10.0)
    assert found.j_per_sample == pytest.approx(6.0)  # 60 W at 10 samples a second
    assert found.input_s == pytest.approx(0.1 / 10)
    assert (found.exposed_min_s, found.basis) == (None, "2 steps")
    on_two_nodes = measure_run(folder, Run(mode="strong", workers=2, num_nodes=2))
    assert on_two_nodes.j_per_sample is None  # the power of one node is not that of both
    assert "several nodes" in on_two_nodes.energy_reason


def test_steps_after_a_first_epoch_are_measured_from_its_end(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 100.0, num_epochs=1)  # 1000 samples in 50 s
    folder = steps(tmp_path / "run", {"step": 40, "samples_seen": 1300, "train_time_s": 53.0})
    assert measured_s(folder) == pytest.approx(3.0)
    assert measure_run(folder, RUN).samples_per_s == pytest.approx(100.0)


def test_nothing_beyond_the_warm_up_is_an_error(tmp_path: Path) -> None:
    folder = steps(tmp_path / "run", {"samples_seen": 10, "train_time_s": 1.0})
    assert measured_s(folder) == 0.0
    with pytest.raises(StormoError, match="before anything was measured"):
        measure_run(folder, RUN)
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
    assert measure_run(folder, RUN).samples_per_s == pytest.approx(20.0)


EXAMPLE = Path(__file__).parents[2] / "examples" / "t4_scaling.csv"


def read(folder: Path, text: str) -> CsvTable:
    path = folder / "table.csv"
    path.write_text(text, encoding="utf-8")
    return read_csv(path, "strong")


def test_energy_of_an_image_is_watts_by_images_per_second() -> None:
    table = read_csv(EXAMPLE, "weak")
    assert [(one.workers, one.units_per_s) for one in table.measurements] == [(1, 652.0), (4, 2500.0)]
    assert [one.j_per_sample for one in table.measurements] == pytest.approx([68 / 652, 280 / 2500])
    assert (table.energy_per, table.measurements[0].unit) == ("image", "images")


def test_times_and_energies_of_the_same_work(tmp_path: Path) -> None:
    table = read(tmp_path, "workers,time_s,energy_j\n1,100,5000\n2,60,5400\n")
    assert [one.samples_per_s for one in table.measurements] == pytest.approx([0.01, 1 / 60])
    assert [one.j_per_sample for one in table.measurements] == pytest.approx([5000, 5400])


def test_energy_beside_speed_and_time_is_that_of_one_unit(tmp_path: Path) -> None:
    table = read(tmp_path, "workers,tokens_per_s,time_s,energy_j\n1,50,10,1000\n")
    assert table.measurements[0].j_per_sample == pytest.approx(2.0)


def test_rows_without_a_repeat_are_counted_and_other_columns_are_named(tmp_path: Path) -> None:
    table = read(tmp_path, "# by hand\nworkers, units_per_s ,note\n1,10,a\n\n1,11,b\n2,20,c\n")
    assert [(one.workers, one.repeat) for one in table.measurements] == [(1, 1), (1, 2), (2, 1)]
    assert table.unused == ("note",)


def test_a_row_without_power_has_no_energy(tmp_path: Path) -> None:
    table = read(tmp_path, "workers,units_per_s,power_w\n1,10,50\n2,20,\n")
    assert [one.j_per_sample for one in table.measurements] == [5.0, None]
    assert "power_w" in table.measurements[1].energy_reason


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("workers,units_per_s\n1,10\ntwo,20\n", "line 3 has workers = 'two'"),
        ("workers,units_per_s\n0,10\n", "line 2 has workers = '0'"),
        ("workers,units_per_s\n1,-3\n", "line 2 has units_per_s = '-3'"),
        (
            "workers,units_per_s\n1,nan\n2,inf\n",
            "line 2 has units_per_s = 'nan', which is not a number above 0; line 3",
        ),
        ("workers,units_per_s\n1\n", "line 2 has 1 fields where the first line names 2"),
        ("workers,units_per_s\n\n1,10\n2,\n", "line 4 has no units_per_s"),
        ("workers,units_per_s,repeat\n1,10,1\n1,12,1\n", "line 3 repeats workers 1, repeat 1"),
        ("workers,units_per_s,power_w\n1,10,much\n", "line 2 has power_w = 'much'"),
        ("workers,units_per_s\n" + "x,1\n" * 7, "and 2 more"),
        ("workers,units_per_s\n", "no row of figures"),
        ("", "no row of figures"),
        ('"""Trains, and more.\n"""\nimport a\n', "its first line does not name columns"),
        ("workers;units_per_s\n1;10\n", "its first line does not name columns"),
        ("gpus,units_per_s\n1,10\n", "its columns are gpus, units_per_s"),
        ("workers,power_w\n1,10\n", "its columns are workers, power_w"),
        ("workers,workers,units_per_s\n1,1,10\n", "two columns workers"),
        ("workers,units_per_s,energy_j\n1,10,5\n", "energy_j without time_s"),
    ],
)
def test_malformed_tables_are_refused(tmp_path: Path, table: str, message: str) -> None:
    with pytest.raises(SettingError) as raised:
        read(tmp_path, table)
    assert message in str(raised.value)


def test_a_missing_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="cannot be read"):
        read_csv(tmp_path / "none.csv", "strong")
