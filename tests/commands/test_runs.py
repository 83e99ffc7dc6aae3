from __future__ import annotations

import io
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stormo.commands import runs
from stormo.errors import SettingError
from stormo.telemetry.events import EventFile
from stormo.telemetry.folder import RunFolder, write_json
from stormo.telemetry.record import EpochDone, Record, RunEnded, RunStarted, StepDone
from stormo.telemetry.runs_folder import note_failure, run_started_at
from stormo.training.run_folder import lock_folder

NOW_UNIX_S = 1_700_000_000.0


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def started(resumed_at_step: int | None = None) -> RunStarted:
    return RunStarted(
        run_name="x",
        run_folder="runs/x",
        task="fashion-mnist",
        world_size=4,
        global_batch_size=2048,
        epochs=40,
        steps_per_epoch=30,
        resumed_at_step=resumed_at_step,
    )


def step_done(step: int) -> StepDone:
    return StepDone(
        epoch=1 + step // 30,
        step=step,
        step_in_epoch=step % 30,
        samples_seen=2048 * step,
        loss=1.0,
        learning_rate=0.04,
        samples_per_s=1000.0 + step,
        units_per_s=1000.0 + step,
        unit="images",
        input_wait_fraction=0.0,
        train_time_s=float(step),
    )


def epoch_done(epoch: int) -> EpochDone:
    return EpochDone(
        epoch=epoch,
        step=30 * epoch,
        samples_seen=61440 * epoch,
        epoch_time_s=25.0,
        cumulative_time_s=25.0 * epoch,
        validation_time_s=1.0,
        samples_per_s=2500.0,
        units_per_s=2500.0,
        unit="images",
        train_loss=1.0,
        learning_rate=0.04,
        input_wait_fraction=0.0,
        peak_memory_bytes=None,
        validation={"loss": 1.0, "accuracy": 0.1 * epoch},
    )


def summary(stopped_by: str) -> dict[str, Any]:
    return {
        "run_name": "x",
        "task": "fashion-mnist",
        "world_size": 4,
        "epochs_run": 7,
        "images_per_s": 2423.38,
        "train_time_s": 171.5,
        "validation_accuracy": 0.8615,
        "stopped_by": stopped_by,
    }


def make_run(folder: Path, *records: Record, at_unix_s: float = NOW_UNIX_S) -> RunFolder:
    run = RunFolder(folder)
    sink = EventFile(run, clock=lambda: at_unix_s)
    for record in records:
        sink.write(record)
    sink.close()
    return run


def listed(capsys: pytest.CaptureFixture[str], folder: Path) -> list[dict[str, Any]]:
    assert runs.main(["--runs-folder", str(folder), "--json"]) == 0
    content: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return content


def _environment(run: RunFolder, started_unix_s: float) -> None:
    write_json(run.environment, {"host": socket.gethostname(), "started_unix_s": started_unix_s})


def test_an_agent_finds_the_run_of_its_workers_and_writes_why_they_failed(tmp_path: Path) -> None:
    mine, other = (make_run(tmp_path / name, started(), step_done(3)) for name in ("mine", "other"))
    _environment(mine, 5.5)
    _environment(other, 7.25)
    text = "rank 1 on host node7 failed: ValueError: boom"
    assert run_started_at(tmp_path, 6.0) is None
    assert run_started_at(tmp_path, 5.5) == mine
    assert note_failure(mine, text) is None, "it has no checkpoint"
    one = runs.overview(mine, now_unix_s=NOW_UNIX_S)
    assert (one.state, one.note) == ("failed", text)
    assert runs.overview(other, now_unix_s=NOW_UNIX_S).state != "failed"
    make_run(mine.path, started(resumed_at_step=0))
    assert runs.overview(mine, now_unix_s=NOW_UNIX_S).state != "failed", "it was resumed"


@pytest.mark.parametrize(("stopped_by", "note"), [("error", "rank 0 failed"), ("signal", None)])
def test_the_cause_stands_below_the_end_that_rank_0_wrote_itself(
    tmp_path: Path, stopped_by: str, note: str | None
) -> None:
    run = make_run(tmp_path / "heron", started(), RunEnded(summary=summary(stopped_by)))
    before = run.events.read_bytes()
    note_failure(run, "rank 0 failed")
    assert (run.events.read_bytes() == before) == (note is None)
    assert runs.overview(run, now_unix_s=NOW_UNIX_S).note == note
    run.events.write_bytes(b"\0" * 100 + b"\n")
    damaged = runs.overview(run, now_unix_s=NOW_UNIX_S)
    assert (damaged.state, damaged.note) == ("failed" if note else "stopped", None)


@pytest.mark.parametrize(
    ("stopped_by", "state"), [("target", "done"), ("epochs", "done"), ("signal", "stopped"), ("error", "failed")]
)
def test_the_state_of_an_ended_run_comes_from_its_summary(tmp_path: Path, stopped_by: str, state: str) -> None:
    run = make_run(tmp_path / "heron", started(), RunEnded(summary=summary(stopped_by)))
    one = runs.overview(run, now_unix_s=NOW_UNIX_S)
    assert (one.state, one.note, one.epochs_run, one.validation_accuracy) == (state, None, 7, 0.8615)


@pytest.mark.parametrize(
    ("silent_s", "state", "age"),
    [
        (10.0, "running", "10 s"),
        (299.0, "running", "4 min"),
        (301.0, "interrupted", "5 min"),
        (3e5, "interrupted", "3 d"),
    ],
)
def test_a_run_without_summary_is_judged_by_the_age_of_its_last_event(
    tmp_path: Path, silent_s: float, state: str, age: str
) -> None:
    run = make_run(tmp_path / "heron", started(), epoch_done(1))
    one = runs.overview(run, now_unix_s=NOW_UNIX_S + silent_s)
    assert one.state == state
    assert one.note == f"no summary: killed or still running (last event {age} ago)"


def test_a_run_of_this_host_is_running_as_long_as_a_process_holds_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "heron", started(), epoch_done(1))
    write_json(run.environment, {"host": socket.gethostname()})
    held = lock_folder(run)
    assert held is not None
    one = runs.overview(run, now_unix_s=NOW_UNIX_S + 3e5)
    assert (one.state, one.note) == ("running", "no summary: still running (last event 3 d ago)")
    held.close()
    one = runs.overview(run, now_unix_s=NOW_UNIX_S + 10)
    assert (one.state, one.note) == ("interrupted", "no summary: it was killed (last event 10 s ago)")
    write_json(run.environment, {"host": "another"})
    assert runs.overview(run, now_unix_s=NOW_UNIX_S + 10).state == "running"


def test_a_run_under_way_shows_its_last_epoch_and_its_newest_figures(tmp_path: Path) -> None:
    run = make_run(tmp_path / "heron", started(), epoch_done(1), epoch_done(2), step_done(65))
    one = runs.overview(run, now_unix_s=NOW_UNIX_S)
    assert (one.epochs_run, one.epochs, one.validation_accuracy) == (2, 40, 0.2)
    assert (one.unit, one.units_per_s, one.train_time_s, one.world_size) == ("images", 1065.0, 65.0, 4)


def test_epochs_that_a_resume_made_obsolete_do_not_count(tmp_path: Path) -> None:
    run = make_run(tmp_path / "heron", started(), epoch_done(1), epoch_done(2), started(resumed_at_step=30))
    assert runs.overview(run, now_unix_s=NOW_UNIX_S).epochs_run == 1


def test_a_run_that_only_has_its_configuration_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "heron").mkdir()
    (tmp_path / "heron" / "config.toml").touch()
    (one,) = listed(capsys, tmp_path)
    assert one["state"] == "running"
    assert "no event yet" in one["note"]
    assert one["epochs_run"] is None


def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "good", started(), RunEnded(summary=summary("epochs")))
    bad = make_run(tmp_path / "bad", started())
    bad.events.write_text("garbage\n", encoding="utf-8")
    by_name = {one["name"]: one for one in listed(capsys, tmp_path)}
    assert by_name["good"]["state"] == "done"
    assert by_name["bad"]["state"] == "unreadable"
    assert "line 1 is not a JSON object" in by_name["bad"]["note"]


def test_piped_output_is_aligned_text_newest_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "old-heron", started(), RunEnded(summary=summary("target")), at_unix_s=NOW_UNIX_S)
    now_unix_s = time.time()
    make_run(tmp_path / "tern", started(), epoch_done(1), at_unix_s=now_unix_s)
    assert runs.main(["--runs-folder", str(tmp_path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[:3] == [
        "name       task           state    epochs  accuracy    loss           speed    time  workers",
        "tern       fashion-mnist  running    1/40    0.1000  1.0000  2,500 images/s  25.0 s        4",
        "old-heron  fashion-mnist  done          7    0.8615     n/a  2,423 images/s    2:52        4",
    ]
    assert out[3].startswith("tern: no summary: killed or still running (last event ")
    assert len(out) == 4


@pytest.mark.parametrize("columns", [70, 100, 140])
def test_the_table_on_a_terminal_fits_and_keeps_name_state_and_accuracy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    stream = FakeTerminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("COLUMNS", str(columns))
    make_run(tmp_path / "a-name-that-is-longer-than-most-of-them", started(), RunEnded(summary=summary("epochs")))
    make_run(tmp_path / "heron", started(), epoch_done(1))
    runs.main(["--runs-folder", str(tmp_path)])
    table = stream.getvalue().splitlines()[:3]
    assert max(len(line) for line in table) <= columns
    for expected in ("a-name-that", "heron", "done", "interrupted", "0.8615"):
        assert expected in "".join(table)
    assert ("workers" in table[0]) == (columns == 140)


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_a_folder_without_runs_gives_one_helpful_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "empty").mkdir()
    assert runs.main(["--runs-folder", str(tmp_path / name)]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert str(tmp_path / name) in out
    assert "stormo train" in out
    assert listed(capsys, tmp_path / name) == []
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match="file was set, but it is no folder; name the folder that holds your runs"):
        runs.main(["--runs-folder", str(tmp_path / "file")])


def test_json_output_is_strict_json_with_the_whole_overview(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "heron", started())
    write_json(run.summary, summary("target"))
    (one,) = listed(capsys, tmp_path)
    assert one == {
        "name": "heron",
        "folder": str(tmp_path / "heron"),
        "state": "done",
        "note": None,
        "task": "fashion-mnist",
        "world_size": 4,
        "epochs_run": 7,
        "epochs": None,
        "validation_accuracy": 0.8615,
        "validation_loss": None,
        "unit": "images",
        "units_per_s": 2423.38,
        "train_time_s": 171.5,
    }


def test_a_run_of_tokens_and_one_from_before_there_were_units_are_listed_each_in_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "old", started())
    event = {"event": "step_done", "time_unix_s": NOW_UNIX_S, "step": 9, "images_per_s": 77.0, "train_time_s": 1.0}
    with (tmp_path / "old" / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")
    of_tokens = {"unit": "tokens", "samples_per_s": 10.0, "tokens_per_s": 1280.0, "validation_loss": 2.25}
    make_run(tmp_path / "text", started(), RunEnded(summary=summary("epochs") | of_tokens))
    by_name = {one["name"]: one for one in listed(capsys, tmp_path)}
    assert (by_name["old"]["unit"], by_name["old"]["units_per_s"]) == ("images", 77.0)
    assert (by_name["text"]["unit"], by_name["text"]["units_per_s"]) == ("tokens", 1280.0)
    assert runs.main(["--runs-folder", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "2.2500  1,280 tokens/s" in out
    assert "77.0 images/s" in out


def test_neither_the_verbs_nor_the_sinks_import_torch_or_rich() -> None:
    telemetry = ", ".join(f"stormo.telemetry.{name}" for name in ("console", "folder", "tensorboard"))
    modules = f"stormo.commands.runs, stormo.commands.show, {telemetry}"
    code = f"import sys, {modules}; print(sorted({{'torch', 'rich', 'numpy'}} & set(sys.modules)))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout == "[]\n"
