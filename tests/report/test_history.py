from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stormo.errors import StormoError
from stormo.report.history import files_version, make_clock, read_history
from stormo.report.overview import timeline
from stormo.telemetry.folder import RunFolder
from tests.report.made_run import BEGIN_UNIX_S, MadeRun, append


@pytest.mark.parametrize("damage", ["not json", "[]", '{"event": 3, "time_unix_s": 1}', '{"event": "x"}'])
def test_a_damaged_event_is_an_error(tmp_path: Path, damage: str) -> None:
    good = json.dumps({"event": "step_done", "time_unix_s": 0.5})
    (tmp_path / "events.jsonl").write_text(f"{good}\n{damage}\n{good}\n")
    with pytest.raises(StormoError, match=r"events\.jsonl: line 2 "):
        read_history(RunFolder(tmp_path))
    (tmp_path / "events.jsonl").write_text(f"{good}\n{good[:20]}")
    assert len(read_history(RunFolder(tmp_path)).events) == 1  # the last line is still being written


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = MadeRun(epochs=1).write(tmp_path)
    (folder / "nodes" / "1.jsonl").mkdir()
    with pytest.raises(StormoError, match=r"1\.jsonl: it cannot be read \(Is a directory\)"):
        read_history(RunFolder(folder))


def test_running_time_leaves_out_the_pause_between_attempts() -> None:
    events = [
        {"event": "run_started", "time_unix_s": 100.0},
        {"event": "step_done", "time_unix_s": 160.0},
        {"event": "run_started", "time_unix_s": 1000.0},
        {"event": "step_done", "time_unix_s": 1010.0},
    ]
    node = [{"kind": "start", "time_unix_s": 90.0}, {"kind": "energy", "time_unix_s": 165.0}]
    clock = make_clock(events, [node])
    assert clock.total_s == 75.0 + 10.0
    assert [clock.running_s(time) for time in (0.0, 100.0, 165.0, 500.0, 1000.0, 1010.0, 9e9)] == [
        *(0.0, 10.0, 75.0, 75.0, 75.0, 85.0, 85.0)
    ]


def test_a_history_holds_what_the_files_say(tmp_path: Path) -> None:
    made = MadeRun(epochs=4, resumed_after_epoch=2)
    history = read_history(RunFolder(made.write(tmp_path)))
    assert history.state == "done"
    assert history.config["optimizer.base_lr"] == "0.01"
    assert len(history.of("epoch_done")) == 4
    assert history.epoch_at(40) == 2.0
    assert history.epoch_at(50) == 2.5
    assert history.bill is not None
    # Two GPUs and a CPU: 680 W in training, 380 W else.
    seconds = [line["phase"] for line in made.node_lines(0) if line["kind"] == "energy"]
    num_training = seconds.count("training")
    assert num_training == 40
    assert history.bill.total_j == pytest.approx(680.0 * num_training + 380.0 * (len(seconds) - num_training))


def _step(step: int, epoch: int, step_in_epoch: int) -> dict[str, Any]:
    place = {"step": step, "epoch": epoch, "step_in_epoch": step_in_epoch, "steps_in_epoch": 20}
    return {"event": "step_done", "time_unix_s": 1.0, **place}


def test_what_happened_lies_at_the_step_that_the_run_had_reached(tmp_path: Path) -> None:
    started = {"event": "run_started", "time_unix_s": 1.0, "steps_per_epoch": 20, "resumed_at_step": None}
    notice = {"event": "notice", "time_unix_s": 1.0, "kind": "info"}
    rolled_back = {"event": "divergence_noticed", "time_unix_s": 1.0, "step": 40, "rolled_back_to_step": 20}
    append(
        tmp_path / "events.jsonl",
        [
            started,
            {**notice, "text": "before"},
            _step(30, 2, 10),
            {**notice, "text": "as an older version wrote it"},
            {**notice, "text": "profile", "after_step": 37},
            {**rolled_back, "text": "lost"},
            {**notice, "text": "goes on"},
            _step(25, 2, 5),
            {**started, "resumed_at_step": 22},
            {**notice, "text": "resumed", "after_step": None},
            _step(24, 2, 4),
            {**notice, "text": "profile again", "after_step": 25},
            _step(28, 2, 8),
            started,
            {**notice, "text": "anew"},
        ],
    )
    history = read_history(RunFolder(tmp_path))
    found = [(step, text) for step, event, _, text in timeline(history) if event["event"] != "run_started"]
    assert found == [
        *((0, "before"), (30, "as an older version wrote it"), (37, "profile"), (20, "lost"), (20, "goes on")),
        *((22, "resumed"), (25, "profile again"), (0, "anew")),
    ]
    assert [step for step, event, _, _ in timeline(history) if event["event"] == "run_started"] == [0, 22, 0]


def test_the_epoch_of_a_step_between_two_records_is_in_proportion(tmp_path: Path) -> None:
    done = {"event": "epoch_done", "time_unix_s": 1.0, "epoch": 1, "step": 20}
    append(tmp_path / "events.jsonl", [_step(10, 1, 10), done, _step(30, 2, 10)])
    history = read_history(RunFolder(tmp_path))
    epochs = [history.epoch_at(step) for step in (0, 5, 10, 13, 20, 26, 30, 99)]
    assert epochs == pytest.approx([0.0, 0.25, 0.5, 0.65, 1.0, 1.3, 1.5, 1.5])


@pytest.mark.parametrize("part", ["nothing", "config"])
def test_a_run_that_has_not_begun_is_waited_for(tmp_path: Path, part: str) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    if part == "config":
        (folder / "config.toml").write_text('task = "x"\n')
    history = read_history(RunFolder(folder))
    assert history.state == "waiting"
    assert history.bill is None


def test_a_run_without_a_summary_is_judged_by_its_last_line(tmp_path: Path) -> None:
    folder = MadeRun(has_ended=False).write(tmp_path)
    assert read_history(RunFolder(folder)).state == "interrupted"  # its last line is of the past
    append(folder / "nodes" / "0.jsonl", [{"kind": "sample", "time_unix_s": 9e9}])
    assert read_history(RunFolder(folder)).state == "running"


def test_the_version_changes_with_the_files(tmp_path: Path) -> None:
    folder = MadeRun(epochs=1).write(tmp_path)
    before = files_version(RunFolder(folder))
    assert files_version(RunFolder(folder)) == before
    append(folder / "nodes" / "0.jsonl", [{"kind": "end", "time_unix_s": BEGIN_UNIX_S}])
    assert files_version(RunFolder(folder)) != before


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = MadeRun(epochs=1).write(tmp_path)
    with (folder / "nodes" / "0.jsonl").open("ab") as file:
        file.write(b'{"kind": "ener\n')
    assert read_history(RunFolder(folder)).notes == ("nodes/0.jsonl: 1 line left out that cannot be read",)
    (folder / "config.toml").write_text("task = ")
    with pytest.raises(StormoError, match="not valid TOML"):
        read_history(RunFolder(folder))
    assert json.loads((folder / "summary.json").read_text())["stopped_by"] == "target"
