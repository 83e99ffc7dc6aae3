from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stormo.errors import StormoError
from stormo.telemetry.events import EventFile, current_events, read_events
from stormo.telemetry.folder import RunFolder, read_summary, to_json, write_json
from stormo.telemetry.record import (
    CheckpointSaved,
    EpochDone,
    Notice,
    Record,
    RunEnded,
    RunStarted,
    StepDone,
    ValidationProgress,
)


def started(resumed_at_step: int | None = None) -> RunStarted:
    return RunStarted(
        run_name="heron",
        run_folder="runs/heron",
        task="fashion-mnist",
        world_size=4,
        global_batch_size=2048,
        epochs=3,
        steps_per_epoch=10,
        resumed_at_step=resumed_at_step,
        explanation=("global batch 2048 = 512 per worker × 4 workers × 1 accumulation",),
    )


def step_done(step: int, loss: float = 1.5) -> StepDone:
    return StepDone(
        epoch=1,
        step=step,
        step_in_epoch=step,
        samples_seen=step * 2048,
        loss=loss,
        learning_rate=0.04,
        samples_per_s=2423.4,
        units_per_s=2423.4,
        unit="images",
        input_wait_fraction=0.01,
        train_time_s=float(step),
    )


def epoch_done(epoch: int) -> EpochDone:
    return EpochDone(
        epoch=epoch,
        step=10 * epoch,
        samples_seen=20480 * epoch,
        epoch_time_s=8.0,
        cumulative_time_s=8.0 * epoch,
        validation_time_s=1.0,
        samples_per_s=2560.0,
        units_per_s=2560.0,
        unit="images",
        train_loss=1.0,
        learning_rate=0.04,
        input_wait_fraction=0.02,
        peak_memory_bytes=None,
        validation={"loss": 0.9, "accuracy": 0.7},
    )


def write_all(folder: Path, *records: Record) -> RunFolder:
    run = RunFolder(folder)
    sink = EventFile(run, clock=lambda: 1000.0)
    for record in records:
        sink.write(record)
    sink.close()
    return run


def test_every_record_but_validation_progress_becomes_one_line_with_its_name_time_and_fields(tmp_path: Path) -> None:
    saved = CheckpointSaved(epoch=1, step=10, path="checkpoints/step-00000010", weights_sha256="ab", save_time_s=0.1)
    run = write_all(
        tmp_path / "heron",
        started(),
        step_done(1),
        ValidationProgress(epoch=1, done=5, total=10),
        epoch_done(1),
        saved,
        Notice(kind="info", text="hello"),
        RunEnded(summary={"stopped_by": "epochs"}),
    )
    lines = run.events.read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    assert [event["event"] for event in events] == [
        "run_started",
        "step_done",
        "epoch_done",
        "checkpoint_saved",
        "notice",
        "run_ended",
    ]
    assert {event["time_unix_s"] for event in events} == {1000.0}
    assert events[0]["explanation"] == ["global batch 2048 = 512 per worker × 4 workers × 1 accumulation"]
    assert events[2]["validation"] == {"loss": 0.9, "accuracy": 0.7}
    assert events[2]["peak_memory_bytes"] is None
    assert events[3]["weights_sha256"] == "ab"
    assert events[5]["summary"] == {"stopped_by": "epochs"}
    assert read_events(run.events) == events


def test_an_event_can_be_read_before_the_sink_is_closed(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "heron")
    sink = EventFile(run)
    sink.write(step_done(1))
    assert [event["step"] for event in read_events(run.events)] == [1]
    sink.close()


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_written_as_null(tmp_path: Path, loss: float) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    run = write_all(tmp_path / "heron", step_done(1, loss=loss), RunEnded(summary={"validation_loss": loss}))
    for text in [*run.events.read_text(encoding="utf-8").splitlines(), run.summary.read_text(encoding="utf-8")]:
        json.loads(text, parse_constant=refuse)
    assert read_events(run.events)[0]["loss"] is None
    assert read_summary(run) == {"validation_loss": None}


@settings(max_examples=30)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
def test_to_json_makes_strict_json_of_any_nested_value_and_keeps_finite_floats_exactly(value: object) -> None:
    plain = to_json(value)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    if isinstance(value, float) and math.isfinite(value):
        assert plain == value


def test_a_file_cut_at_any_byte_loses_only_the_cut_line_and_is_repaired_before_the_next_record(tmp_path: Path) -> None:
    run = write_all(tmp_path / "heron", step_done(1), step_done(2))
    whole = run.events.read_bytes()
    first_line_length = whole.index(b"\n") + 1
    near_ends = [end + offset for end in (first_line_length, len(whole)) for offset in (-2, -1, 0)]
    for length in sorted({*range(0, len(whole), 5), first_line_length + 1, *near_ends}):
        run.events.write_bytes(whole[:length])
        # A line that lacks only its line end is read, but goes when the next one is written.
        num_complete = (length >= first_line_length - 1) + (length >= len(whole) - 1)
        assert [event["step"] for event in read_events(run.events)] == list(range(1, num_complete + 1))
        write_all(run.path, step_done(99))
        num_whole = (length >= first_line_length) + (length >= len(whole))
        steps = list(range(1, num_whole + 1))
        assert [event["step"] for event in read_events(run.events)] == [*steps, 99]


def test_a_torn_line_longer_than_one_block_is_removed_whole(tmp_path: Path) -> None:
    run = write_all(tmp_path / "heron", step_done(1))
    with run.events.open("ab") as file:
        file.write(b'{"event": "notice", "text": "' + b"x" * 200_000)
    write_all(run.path, step_done(2))
    assert [event["step"] for event in read_events(run.events)] == [1, 2]


def test_zero_bytes_at_the_end_left_by_a_power_cut_are_removed(tmp_path: Path) -> None:
    run = write_all(tmp_path / "heron", step_done(1))
    with run.events.open("ab") as file:
        file.write(b"\0" * 5000)
    assert len(read_events(run.events)) == 1
    write_all(run.path, step_done(2))
    assert [event["step"] for event in read_events(run.events)] == [1, 2]


def test_a_damaged_line_in_the_middle_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    run = write_all(tmp_path / "heron", step_done(1), step_done(2), step_done(3))
    lines = run.events.read_bytes().splitlines(keepends=True)
    run.events.write_bytes(lines[0] + b"\xff" + lines[1] + lines[2])
    with pytest.raises(StormoError, match="line 2 is not a JSON object"):
        read_events(run.events)


def test_a_missing_events_file_reads_as_no_events(tmp_path: Path) -> None:
    assert read_events(tmp_path / "events.jsonl") == []


def test_a_resume_makes_later_records_of_the_attempt_before_obsolete_but_keeps_its_notices(tmp_path: Path) -> None:
    write_all(tmp_path / "heron", started(), epoch_done(1), Notice(kind="info", text="kept"), epoch_done(2))
    run = write_all(tmp_path / "heron", started(resumed_at_step=10), epoch_done(2), epoch_done(3))
    kept = current_events(read_events(run.events))
    assert [event["epoch"] for event in kept if event["event"] == "epoch_done"] == [1, 2, 3]
    assert [event["text"] for event in kept if event["event"] == "notice"] == ["kept"]


def test_a_run_started_anew_in_the_same_folder_makes_everything_before_obsolete(tmp_path: Path) -> None:
    write_all(tmp_path / "heron", started(), epoch_done(1), Notice(kind="info", text="gone"))
    run = write_all(tmp_path / "heron", started(), epoch_done(1))
    assert [event["event"] for event in current_events(read_events(run.events))] == ["run_started", "epoch_done"]


def test_the_summary_appears_at_the_end_and_goes_away_when_the_run_goes_on(tmp_path: Path) -> None:
    run = write_all(tmp_path / "heron", started(), RunEnded(summary={"stopped_by": "signal"}))
    assert read_summary(run) == {"stopped_by": "signal"}
    run = write_all(tmp_path / "heron", started(resumed_at_step=10))
    assert read_summary(run) is None


def test_what_the_system_refuses_names_the_file(tmp_path: Path) -> None:
    sink = EventFile(RunFolder(tmp_path))
    with Path("/dev/full").open("wb", buffering=0) as full:
        os.dup2(full.fileno(), sink._file._file.fileno())  # type: ignore[union-attr]
    with pytest.raises(OSError, match=r"No space left on device: '.*/events\.jsonl'"):
        sink.write(Notice(kind="info", text="a"))
    sink.close()
    with pytest.raises(OSError, match=r": '.*/absent/summary\.json'"):
        write_json(tmp_path / "absent" / "summary.json", {})
