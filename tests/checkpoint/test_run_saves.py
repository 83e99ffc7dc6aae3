"""A run that saves in the background leaves the checkpoints of one that waits, and tells of each when it is there."""

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
from stormo.training.loop import Training, train
from stormo.training.records import RunRecorder
from stormo.training.validation import Validation
from tests.tiny_run import Parts, assert_same_bits
from tests.tiny_task import Tiny
from tests.training.test_divergence import _lost, _rolled_back, put_together

Ranks = Callable[..., list[Any]]


def run_of(world: World, folder: str, **flags: Any) -> tuple[Parts, Training, RunRecorder, list[Any]]:
    parts, training, (journal, _, records) = put_together(world, folder, Tiny, **flags)
    data, together = parts.task.validation_data(), parts.strategy.is_sharded
    training.validation = Validation(parts.task, data, 10, world, together=together)
    return parts, training, journal, records


def _trains(world: World, folder: str, name: str, flags: dict[str, Any]) -> dict[str, Any]:
    parts, training, journal, _ = run_of(world, folder, run_name=name, keep_checkpoints=9, **flags)
    outcome = train(training)
    journal.end(outcome.stopped_by)
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint"]
    return {"step": parts.state.progress.step, "stopped_by": outcome.stopped_by}


def saved(run: Path) -> dict[int, str]:
    """The digest of every checkpoint that was told of, each of them whole and there."""
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
    for name, in_background in (("waits", False), ("goes-on", True)):
        run_ranks(_trains, size, str(tmp_path), name, {**flags, "async_checkpoint": in_background})
    assert saved(tmp_path / "goes-on") == saved(tmp_path / "waits")
    assert len(saved(tmp_path / "waits")) == 4  # steps 2 and 4, and the ends of two epochs of three
    # And it goes on from its last one.
    more = {**flags, "epochs": 3, "async_checkpoint": True, "resume": "goes-on"}
    assert run_ranks(_trains, size, str(tmp_path), "goes-on", more)[0]["step"] == 9


def _stopped(world: World, folder: str) -> tuple[bool, str]:
    """A signal comes, and its checkpoint takes its time."""
    release = threading.Event()

    def slow(file: Path, content: Any, *rest: Any) -> Any:
        release.wait(0.3)
        return write_file(file, content, *rest)

    flags = {"run_name": "stopped", "async_checkpoint": True, "checkpoint_every": "0"}
    parts, training, journal, records = run_of(world, folder, **flags)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stormo.checkpoint.writer.write_file", slow)
        training.flag.signal_number = 15
        outcome = train(training)
        step = parts.state.progress.step
        is_there = bool(find(Path(folder) / "stopped" / "checkpoints"))
        journal.end(outcome.stopped_by)
    good, problems = newest_good(Path(folder) / "stopped" / "checkpoints")
    assert good is not None
    assert (good.step, problems) == (step, ())
    return is_there, " ".join(record.text for record in records if isinstance(record, Notice))


def test_the_checkpoint_of_a_signal_is_published_before_the_end(run_ranks: Ranks, tmp_path: Path) -> None:
    (was_there, told), _ = run_ranks(_stopped, 2, str(tmp_path))
    assert not was_there  # it was under way
    assert "stopped at step 1, saved" in told
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
    parts, training, journal, _ = run_of(world, folder, run_name="fails", checkpoint_every="2", **flags)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stormo.checkpoint.writer.write_file", full)
        try:
            outcome = train(training)
            journal.end(outcome.stopped_by)
        except StormoError as error:
            told = str(error)
            journal.end("error")
    return told, parts.state.progress.step


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_save_that_failed_in_the_background_ends_the_run_on_all_workers(
    run_ranks: Ranks, tmp_path: Path, strategy: str, at_the_end: bool
) -> None:
    told = run_ranks(_fails, 2, str(tmp_path), strategy, at_the_end)
    assert told[0] == told[1]
    assert "could not be written" in told[0][0]
    assert "No space left on device" in told[0][0]
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


def _spread_rolls_back(world: World, folder: str) -> tuple[list[Any], ...]:
    """Parts that were lost come back, and what is known of the rollback stays with the checkpoint."""
    flags = {"strategy": "fsdp", "async_checkpoint": True, "on_divergence": "rollback", "max_rollbacks": 1}
    parts, _, (journal, recovery, _) = put_together(world, folder, Tiny, run_name="lost", **flags)
    progress, own = parts.state.progress, [part.local for part in parts.strategy.parts()]
    progress.step = 10
    journal.save(None)
    before = [local.detach().clone() for local in own]
    progress.step = 20
    with torch.no_grad():
        for local in own:
            local.fill_(math.nan)
    assert recovery.roll_back(_lost(step=20, onset_step=20))
    same = [torch.equal(local, value) for local, value in zip(own, before, strict=True)]
    told = [progress.step, progress.num_rollbacks, progress.rate_factor]
    progress.num_rollbacks, progress.rate_factor = 2, 0.25
    assert not recovery.roll_back(_lost(step=21, onset_step=21))
    recovery.give_up(_lost(step=21, onset_step=21))
    journal.end("divergence", diverged_at_step=21)
    return same, told


def test_a_model_that_is_spread_rolls_back_and_its_checkpoint_keeps_what_was_tried(
    run_ranks: Ranks, tmp_path: Path
) -> None:
    for same, told in run_ranks(_spread_rolls_back, 2, str(tmp_path)):
        assert same
        assert all(same)
        assert told == [10, 1, 0.5]
    good, problems = newest_good(tmp_path / "lost" / "checkpoints")
    assert good is not None
    assert (good.step, problems) == (10, ())
    progress = read_state(good.path)["progress"]
    assert (progress["num_rollbacks"], progress["rate_factor"]) == (2, 0.25)
    assert sorted(path.name for path in good.path.iterdir()) == sorted([*verify(good.path).files, "manifest.json"])
