"""What speed is counted in: images, tokens, samples, and MFU where it is known, in every sink."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from stormo.commands import show
from stormo.telemetry.console import TerminalConsole, epoch_line
from stormo.telemetry.events import EventFile, speed_of
from stormo.telemetry.folder import RunFolder
from stormo.telemetry.record import EpochDone, RunEnded, RunStarted, StepDone
from stormo.telemetry.tensorboard import scalars_of


def _step(unit: str, mfu: float | None) -> StepDone:
    return StepDone(
        epoch=1,
        step=3,
        step_in_epoch=3,
        samples_seen=48,
        loss=2.5,
        learning_rate=0.1,
        samples_per_s=16.0,
        units_per_s=2048.0,
        input_wait_fraction=0.0,
        train_time_s=3.0,
        unit=unit,
        mfu=mfu,
    )


def _epoch(unit: str, mfu: float | None) -> EpochDone:
    return EpochDone(
        epoch=1,
        step=10,
        samples_seen=160,
        epoch_time_s=10.0,
        cumulative_time_s=10.0,
        validation_time_s=1.0,
        samples_per_s=16.0,
        units_per_s=2048.0,
        train_loss=2.5,
        learning_rate=0.1,
        input_wait_fraction=0.0,
        peak_memory_bytes=None,
        validation={"loss": 2.25},
        unit=unit,
        mfu=mfu,
    )


def _started() -> RunStarted:
    return RunStarted(
        run_name="tern",
        run_folder="/data/runs/tern",
        task="language-model",
        world_size=1,
        global_batch_size=16,
        epochs=2,
        steps_per_epoch=10,
    )


@pytest.mark.parametrize(
    ("unit", "mfu", "expected"),
    [
        ("images", None, "Images/sec = 2048.00, Validation"),
        ("images", 0.4, "Images/sec = 2048.00, Validation"),  # word for word what it always was
        ("tokens", 0.4567, "Tokens/sec = 2048.00, MFU = 45.7%, Validation"),
        ("tokens", None, "Tokens/sec = 2048.00, Validation"),
        ("samples", None, "Samples/sec = 2048.00, Validation"),
    ],
)
def test_the_plain_line_names_the_unit(unit: str, mfu: float | None, expected: str) -> None:
    assert f"Epoch Time = 10.000, {expected} Loss = 2.250" in epoch_line(_epoch(unit, mfu))


def test_tensorboard_has_a_tag_for_each_unit_and_mfu_where_it_is_known() -> None:
    assert scalars_of(_step("tokens", 0.5))["train/tokens_per_second"] == 2048.0
    assert scalars_of(_step("tokens", 0.5))["train/mfu"] == 0.5
    assert scalars_of(_epoch("tokens", 0.5))["epoch/tokens_per_second"] == 2048.0
    assert scalars_of(_epoch("tokens", 0.5))["epoch/mfu"] == 0.5
    plain = scalars_of(_step("samples", None)) | scalars_of(_epoch("samples", None))
    assert "train/samples_per_second" in plain
    assert not [tag for tag in plain if tag.endswith("mfu")]


def test_the_terminal_shows_tokens_and_mfu() -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Screen()
    now_s = iter(range(1000))
    console = TerminalConsole(stream, environ={"COLUMNS": "120", "NO_COLOR": "1"}, clock=lambda: float(next(now_s)))
    console.write(_started())
    console.write(_step("tokens", 0.4567))
    console.write(_epoch("tokens", 0.4567))
    console.write(RunEnded(summary={"unit": "tokens", "tokens_per_s": 2048.0, "mfu": 0.4567, "stopped_by": "epochs"}))
    console.close()
    text = stream.getvalue()
    assert "2,048 tok/s" in text
    assert "MFU 46 %" in text
    assert "ETA 0:07" in text  # seven steps of 16 samples at 16 a second
    assert "tokens/s     MFU" in text
    assert "45.7 %" in text


def test_what_an_event_says_of_its_speed_is_read_whatever_its_age() -> None:
    assert speed_of({"images_per_s": 5.0}) == ("images", 5.0)
    assert speed_of({"unit": "tokens", "units_per_s": 7.0, "samples_per_s": 1.0}) == ("tokens", 7.0)
    assert speed_of({"unit": "tokens", "tokens_per_s": 7.0}) == ("tokens", 7.0)
    assert speed_of({}) == ("images", None)


def test_show_takes_the_unit_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sink = EventFile(RunFolder(tmp_path / "tern"))
    summary = {"stopped_by": "epochs", "unit": "tokens", "samples_per_s": 16.0, "tokens_per_s": 2048.0, "mfu": 0.4567}
    for record in (_started(), _epoch("tokens", 0.4567), _epoch("tokens", 0.4567), RunEnded(summary=summary)):
        sink.write(record)
    sink.close()
    assert show.main(["tern", "--runs-folder", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "epoch  train loss  val loss  tokens/s     MFU    time" in text
    assert "2,048  45.7 %  10.0 s" in text
    assert "  tokens/s             2,048\n  MFU                  45.7 %\n" in text
    assert "2,048 to 2,048" in text


def test_show_reads_the_events_of_a_run_from_before_there_were_units(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    epoch = {"event": "epoch_done", "time_unix_s": 1.0, "epoch": 1, "step": 3, "images_per_s": 321.0}
    started = {"event": "run_started", "time_unix_s": 0.0, "task": "fashion-mnist"}
    (folder / "events.jsonl").write_text(f"{json.dumps(started)}\n{json.dumps(epoch)}\n", encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps({"images_per_s": 300.0, "stopped_by": "epochs"}), encoding="utf-8")
    assert show.main(["old", "--runs-folder", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "  images/s             300\n" in text
    assert "epoch  train loss  images/s  time" in text
    assert " 321 " in text
