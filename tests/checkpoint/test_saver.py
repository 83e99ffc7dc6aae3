"""A save in the background: training continues, saved values do not change, a failure is raised on all ranks."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stormo.checkpoint import RetentionPolicy, Saver, Shard, Snapshot, find, load, saver, verify, whole_chunk
from stormo.checkpoint.writer import write_file
from stormo.distributed.world import World
from stormo.errors import StormoError
from tests.checkpoint.fake_sharded import FakeSharded, require_whole
from tests.checkpoint.test_ranks import listed, run_state

Ranks = Callable[..., list[Any]]
TENSORS = ("model", "optimizer", "ranks")


def policy(step: int) -> RetentionPolicy:
    return RetentionPolicy(step=step, identity="run", keep_last=2)


class Gate:
    """Holds back whoever writes until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.is_open, self.came = threading.Event(), threading.Event()
        patch.setattr("stormo.checkpoint.writer.write_file", self._write)

    def _write(self, file: Path, content: Any, abandoned: threading.Event | None = None) -> Any:
        self.came.set()
        self.is_open.wait(20)
        return write_file(file, content, abandoned)


def whole(value: int) -> Snapshot:
    tensors = {name: {"w": torch.full((4,), float(value + index))} for index, name in enumerate(TENSORS)}
    return Snapshot(**tensors, state={"step": value})


def _frozen_whole(world: World, folder: str) -> list[float]:
    """The tensors change while the thread has not yet read them."""
    with pytest.MonkeyPatch.context() as patch:
        gate, one = Gate(patch), Saver(world, in_background=True)
        for step in (1, 2):  # the second takes the memory of the first
            gate.is_open.clear()
            snapshot = whole(step) if world.is_main else None
            one.begin(snapshot, Path(folder) if world.is_main else None, policy(step))
            for name in TENSORS if snapshot is not None else ():
                getattr(snapshot, name)["w"].fill_(-1.0)
            assert one.finished() is None
            gate.is_open.set()
            one.wait()
            done = one.finished()
            assert (done is not None) is world.is_main
            assert one.finished() is None  # only once
            assert done is None or done.write_time_s > 0
    read = load(Path(folder) / "step-00000002") if world.is_main else whole(2)
    return [float(getattr(read, name)["w"].mean()) for name in TENSORS]


def test_values_are_those_of_the_moment_it_began(run_ranks: Ranks, tmp_path: Path) -> None:
    assert run_ranks(_frozen_whole, 2, str(tmp_path)) == [[2.0, 3.0, 4.0]] * 2
    assert listed(tmp_path) == ["step-00000001", "step-00000002"]


def _frozen_parts(world: World, folder: str) -> list[bool]:
    with pytest.MonkeyPatch.context() as patch:
        gate, one = Gate(patch), Saver(world, in_background=True)
        strategy = FakeSharded(world, "rows 2")
        strategy.fill(1)
        one.begin(run_state(strategy, 1).content(world, 0), Path(folder) if world.is_main else None, policy(1))
        gate.came.wait(20)
        strategy.fill(2)  # training continues
        seen = [bool(find(folder))]
        if world.rank == 1:
            time.sleep(0.1)  # rank 0 waits for this rank's rank manifest
        gate.is_open.set()
        one.wait()
    return [*seen, bool(find(folder))]


def test_parts_are_those_of_the_moment_it_began_and_are_published_when_all_are_there(
    run_ranks: Ranks, tmp_path: Path
) -> None:
    assert run_ranks(_frozen_parts, 2, str(tmp_path)) == [[False, True]] * 2
    require_whole(load(tmp_path / "step-00000001"), "adamw", 1)
    assert listed(tmp_path) == ["step-00000001"]


def _failing(world: World, folder: str, name: str) -> list[str]:
    """A thread that cannot write: the run continues, and the next `wait` raises on all ranks."""
    strategy, errors = FakeSharded(world, "rows 2"), list[str]()
    strategy.fill(1)

    def full(file: Path, *rest: Any) -> Any:
        if file.name == name:
            raise OSError(errno.EDQUOT, "Disk quota exceeded", str(file))
        return write_file(file, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stormo.checkpoint.writer.write_file", full)
        one = Saver(world, in_background=True)
        one.begin(run_state(strategy, 1).content(world, 0), Path(folder) if world.is_main else None, policy(1))
        try:
            one.wait()
        except StormoError as error:
            errors.append(str(error))
    one.wait()  # there is nothing left of it
    return errors


@pytest.mark.parametrize("name", ["shard-00001.safetensors", "index.json", "manifest.json"])
def test_what_fails_in_a_thread_is_raised_by_all_and_leaves_nothing(
    run_ranks: Ranks, tmp_path: Path, name: str
) -> None:
    errors = run_ranks(_failing, 2, str(tmp_path), name)
    assert errors[0] == errors[1]
    assert len(errors[0]) == 1
    assert "of step 1 could not be written to " in errors[0][0]
    assert f"(Disk quota exceeded at {tmp_path}" in errors[0][0]
    assert listed(tmp_path) == []


def _refused(world: World, folder: str, is_sharded: bool) -> str:
    """What no checkpoint can hold is refused before the thread starts, on all workers."""
    content: Any = None
    if world.is_main:
        content = Snapshot(model={"w": torch.zeros(2, dtype=torch.complex128)}, optimizer={}, ranks={}, state={})
    if is_sharded:
        content = Shard(chunks=[whole_chunk("model", "w", torch.zeros(2, dtype=torch.complex128))], state={})
    one = Saver(world, in_background=True)
    with pytest.raises(StormoError) as caught:
        one.begin(content, Path(folder) if world.is_main else None, policy(1))
    one.wait()
    return str(caught.value)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_what_cannot_be_stored_is_refused_at_once_by_all(run_ranks: Ranks, tmp_path: Path, is_sharded: bool) -> None:
    errors = run_ranks(_refused, 2, str(tmp_path), is_sharded)
    assert errors[0] == errors[1]
    assert "w has dtype torch.complex128" in errors[0]
    assert listed(tmp_path) == []


def _abandoned(world: World, folder: str, stuck: int | None) -> bool:
    """The run fails while a save is under way, and one worker is stuck in it for longer than anybody waits."""
    strategy = FakeSharded(world, "rows 2")
    strategy.fill(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "_GRACE_S", 10.0 if stuck is None else 0.05)
        gate, one = Gate(patch), Saver(world, in_background=True)
        if world.rank != stuck:
            gate.is_open.set()
        one.begin(run_state(strategy, 1).content(world, 0), Path(folder) if world.is_main else None, policy(1))
        one.abandon()
        world.barrier()
        gate.is_open.set()  # a thread that still writes continues, in a folder that is gone
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join()
    return one.finished() is not None


@pytest.mark.parametrize("stuck", [None, 0, 1])
def test_a_run_that_fails_publishes_what_is_all_but_done_and_gives_up_the_rest(
    run_ranks: Ranks, tmp_path: Path, stuck: int | None
) -> None:
    assert run_ranks(_abandoned, 2, str(tmp_path), stuck) == [stuck is None, False]
    assert listed(tmp_path) == (["step-00000001"] if stuck is None else [])
    for found in find(tmp_path):
        verify(found.path)
