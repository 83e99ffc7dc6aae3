"""A run that saves in the background leaves the checkpoints of one that waits, and records each when it is there."""

from __future__ import annotations

import errno
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stormo.checkpoint import find, newest_good, read_state, verify
from stormo.checkpoint.writer import write_file
from stormo.distributed.world import World
from stormo.errors import StormoError
from stormo.telemetry.events import read_events
from stormo.telemetry.folder import RunFolder, read_summary
from stormo.telemetry.record import Notice
from stormo.training.context import RunContext
from stormo.training.loop import train
from stormo.training.records import RunRecorder
from stormo.training.validation import Validation
from tests.tiny_run import Parts, assert_same_bits
from tests.tiny_task import Tiny
from tests.training.test_divergence import _lost, _rolled_back, assemble

Ranks = Callable[..., list[Any]]


def run_of(world: World, folder: str, **flags: Any) -> tuple[Parts, RunContext, RunRecorder, list[Any]]:
    parts, training, (recorder, _, records) = assemble(world, folder, Tiny, **flags)
    data, is_sharded = parts.task.validation_data(), parts.strategy.is_sharded
    training.validation = Validation(parts.task, data, 10, world, is_sharded=is_sharded)
    return parts, training, recorder, records


def _trains(world: World, folder: str, name: str, flags: dict[str, Any]) -> dict[str, Any]:
    parts, training, recorder, _ = run_of(world, folder, run_name=name, keep_checkpoints=9, **flags)
    outcome = train(training)
    recorder.end(outcome.stopped_by)
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint"]
    return {"step": parts.state.progress.step, "stopped_by": outcome.stopped_by}


def saved(run: Path) -> dict[int, str]:
    """The digest of every checkpoint in the records, each of them whole and there."""
    events = [event for event in read_events(run / "events.jsonl") if event["event"] == "checkpoint_saved"]
    for event in events:
        assert verify(run / event["path"]).weights_sha256 == event["weights_sha256"]
        assert event["save_time_s"] > 0
        assert event["write_time_s"] > 0
    steps = [event["step"] for event in events]
    assert steps == sorted(set(steps))
    summary = read_summary(RunFolder(run))
    assert summary is not None
    assert summary["weights_sha256"] == events[-1]["weights_sha256"]
    return {event["step"]: event["weights_sha256"] for event in events}


@pytest.mark.parametrize(("size", "strategy"), [(1, "single"), (2, "ddp"), (2, "local"), (2, "fsdp")])
def test_the_checkpoints_are_those_of_a_run_that_waits(
    run_ranks: Ranks, tmp_path: Path, size: int, strategy: str
) -> None:
    flags = {"strategy": strategy, "epochs": 2}
    for name, in_background in (("waits", False), ("background", True)):
        run_ranks(_trains, size, str(tmp_path), name, {**flags, "async_checkpoint": in_background})
    assert saved(tmp_path / "background") == saved(tmp_path / "waits")
    assert len(saved(tmp_path / "waits")) == 4  # steps 2 and 4, and the ends of two epochs of three
    # And it resumes from its last one.
    more = {**flags, "epochs": 3, "async_checkpoint": True, "resume": "background"}
    assert run_ranks(_trains, size, str(tmp_path), "background", more)[0]["step"] == 9


def _stopped(world: World, folder: str) -> tuple[bool, str]:
    """A signal comes, and its checkpoint takes its time."""
    release = threading.Event()

    def slow(file: Path, content: Any, *rest: Any) -> Any:
        release.wait(0.3)
        return write_file(file, content, *rest)

    flags = {"run_name": "stopped", "async_checkpoint": True, "checkpoint_every": "0"}
    parts, training, recorder, records = run_of(world, folder, **flags)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stormo.checkpoint.writer.write_file", slow)
        training.stop_flag.signal_number = 15
        outcome = train(training)
        step = parts.state.progress.step
        is_there = bool(find(Path(folder) / "stopped" / "checkpoints"))
        recorder.end(outcome.stopped_by)
    good, problems = newest_good(Path(folder) / "stopped" / "checkpoints")
    assert good is not None
    assert (good.step, problems) == (step, ())
    return is_there, " ".join(record.text for record in records if isinstance(record, Notice))


def test_the_checkpoint_of_a_signal_is_published_before_the_end(run_ranks: Ranks, tmp_path: Path) -> None:
    (was_there, notices), _ = run_ranks(_stopped, 2, str(tmp_path))
    assert not was_there  # it was under way
    assert "stopped at step 1, saved" in notices
    events = [event["event"] for event in read_events(tmp_path / "stopped" / "events.jsonl")]
    assert events.index("checkpoint_saved") < events.index("run_ended")


def _fails(world: World, folder: str, strategy: str, at_the_end: bool) -> tuple[str, int]:
    """The disk is full for the second checkpoint, or for the last one."""
    num_models = 0

    def full(file: Path, *rest: Any) -> Any:
        nonlocal num_models
        num_models += file.name in ("model.safetensors", "shard-00001.safetensors")
        if num_models == 2 and file.suffix == ".safetensors":
            raise OSError(errno.ENOSPC, "No space left on device", str(file))
        return write_file(file, *rest)

    flags = {"strategy": strategy, "async_checkpoint": True, "epochs": 1 if at_the_end else 3}
    parts, training, recorder, _ = run_of(world, folder, run_name="fails", checkpoint_every="2", **flags)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stormo.checkpoint.writer.write_file", full)
        try:
            outcome = train(training)
            recorder.end(outcome.stopped_by)
        except StormoError as error:
            errors = str(error)
            recorder.end("error")
    return errors, parts.state.progress.step


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_save_that_failed_in_the_background_ends_the_run_on_all_workers(
    run_ranks: Ranks, tmp_path: Path, strategy: str, at_the_end: bool
) -> None:
    errors = run_ranks(_fails, 2, str(tmp_path), strategy, at_the_end)
    assert errors[0] == errors[1]
    assert "could not be written" in errors[0][0]
    assert "No space left on device" in errors[0][0]
    summary = read_summary(RunFolder(tmp_path / "fails"))
    assert summary is not None
    assert summary["stopped_by"] == "error"
    good, problems = newest_good(tmp_path / "fails" / "checkpoints")
    assert good is not None
    assert not problems
    assert [path.name for path in (tmp_path / "fails" / "checkpoints").iterdir()] == [good.path.name]


def test_a_rollback_waits_for_the_checkpoint_under_way(run_ranks: Ranks, tmp_path: Path) -> None:
    for rolled, by_hand, *_ in run_ranks(_rolled_back, 2, str(tmp_path), {"async_checkpoint": True}):
        for name in ("num_rollbacks", "rate_factor"):
            assert rolled.pop(name) != by_hand.pop(name)
        assert_same_bits(rolled, by_hand)


def _sharded_rolls_back(world: World, folder: str) -> tuple[list[Any], ...]:
    """Parts that were lost come back, and what is known of the rollback stays with the checkpoint."""
    flags = {"strategy": "fsdp", "async_checkpoint": True, "on_divergence": "rollback", "max_rollbacks": 1}
    parts, _, (recorder, recovery, _) = assemble(world, folder, Tiny, run_name="lost", **flags)
    progress, own = parts.state.progress, [part.local for part in parts.strategy.shards()]
    progress.step = 10
    recorder.save(None)
    before = [local.detach().clone() for local in own]
    progress.step = 20
    with torch.no_grad():
        for local in own:
            local.fill_(math.nan)
    assert recovery.roll_back(_lost(step=20, onset_step=20))
    same = [torch.equal(local, value) for local, value in zip(own, before, strict=True)]
    counters = [progress.step, progress.num_rollbacks, progress.rate_factor]
    progress.num_rollbacks, progress.rate_factor = 2, 0.25
    assert not recovery.roll_back(_lost(step=21, onset_step=21))
    recovery.give_up(_lost(step=21, onset_step=21))
    recorder.end("divergence", diverged_at_step=21)
    return same, counters


def test_a_model_that_is_sharded_rolls_back_and_its_checkpoint_keeps_what_was_tried(
    run_ranks: Ranks, tmp_path: Path
) -> None:
    for same, counters in run_ranks(_sharded_rolls_back, 2, str(tmp_path)):
        assert same
        assert all(same)
        assert counters == [10, 1, 0.5]
    good, problems = newest_good(tmp_path / "lost" / "checkpoints")
    assert good is not None
    assert (good.step, problems) == (10, ())
    progress = read_state(good.path)["progress"]
    assert (progress["num_rollbacks"], progress["rate_factor"]) == (2, 0.25)
    assert sorted(path.name for path in good.path.iterdir()) == sorted([*verify(good.path).files, "manifest.json"])
