"""Saves the checkpoints of a run, one at a time: while training waits, or in a thread while it continues.

Ranks communicate only in `begin` and `wait`, which all of them call; a thread only reads the other ranks' files. If a
save fails, the next `wait` raises the error on all ranks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from stormo.checkpoint.format import Saved, Snapshot
from stormo.checkpoint.ranks import raise_on_all_ranks, require_seen
from stormo.checkpoint.retention import RetentionPolicy, remove
from stormo.checkpoint.tensors import require_plain
from stormo.checkpoint.writer import Publisher, Shard, ShardWriter, SnapshotWriter, TempDir, make_temp_dir
from stormo.distributed.world import World

_SEEN_WITHIN_S = 5.0  # other nodes may see a new folder a moment later
_GRACE_S = 5.0  # for a save that is nearly done when the run fails

Abandoned = threading.Event


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedSave:
    """A checkpoint that is published, and how long that took."""

    saved: Saved
    write_time_s: float


class _Job:
    """One save on one rank: `write` its own part, then `publish` on rank 0."""

    def __init__(
        self,
        write: Callable[[Abandoned], None] | None,
        publish: Callable[[Abandoned], Saved] | None,
        temporary: Path | None = None,
    ) -> None:
        self.abandoned = threading.Event()
        self.failure: Exception | None = None
        self.done: FinishedSave | None = None
        self.temporary = temporary  # on rank 0, which removes it
        self.thread: threading.Thread | None = None
        self._write, self._publish = write, publish
        self.is_written = threading.Event()  # this rank's own part
        self._began_s = time.perf_counter()

    def start(self) -> None:
        """Do both in a thread, which does not keep the process from ending."""
        self.thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.write()
        if self.failure is None:
            self.publish()

    def write(self) -> None:
        """Write this rank's own part."""
        try:
            if self._write is not None:
                self._write(self.abandoned)
        except Exception as error:
            self.failure = error
        finally:
            self.is_written.set()

    def publish(self) -> None:
        """Publish the checkpoint, on rank 0."""
        try:
            if self._publish is not None:
                saved = self._publish(self.abandoned)
                self.done = FinishedSave(saved=saved, write_time_s=time.perf_counter() - self._began_s)
        except Exception as error:
            self.failure = error

    def wait(self) -> None:
        """Wait for the thread, or publish here if there is none."""
        if self.thread is None:
            self.publish()
        else:
            self.thread.join()

    def abandon(self, grace_s: float) -> None:
        """Abandon it unless it ends within this time."""
        if self.thread is not None:
            self.thread.join(grace_s)
            self.abandoned.set()
            self.thread.join(_GRACE_S)  # it checks the event between two pieces of a file
        if self.temporary is not None and self.done is None:
            _remove(self.temporary)


class Saver:
    """Saves the checkpoints of one run, on one rank."""

    def __init__(self, world: World, *, in_background: bool) -> None:
        self._world = world
        self._in_background = in_background
        self._copies: dict[str, Tensor] = {}  # in host memory; the next save in the background fills them again
        self._job: _Job | None = None
        self._done: FinishedSave | None = None

    def begin(self, content: Snapshot | Shard | None, folder: Path | None, policy: RetentionPolicy) -> None:
        """Save this rank's part of a checkpoint; all ranks call it, and then `wait`.

        Rank 0 gives the folder of the checkpoints. The content is a snapshot on rank 0 and None on the others, or the
        shard of every rank.
        """
        assert self._job is None, "wait for the one before first"
        failure, job = None, _Job(None, None)
        if isinstance(content, Shard):
            temporary = self._make_temp_dir(folder, policy)
            job.temporary = None if folder is None else temporary.path
        try:
            if isinstance(content, Shard):
                job = self._sharded(content, folder, policy, temporary)
            elif content is not None:
                assert folder is not None
                job = _Job(None, SnapshotWriter(folder, self._frozen(content), policy).write)
        except Exception as error:
            failure = error
        try:
            raise_on_all_ranks(self._world, failure)
        except Exception:
            job.abandon(0.0)
            raise
        self._job = job
        if self._in_background:
            job.start()
        else:
            job.write()

    def wait(self) -> None:
        """Wait for the save under way, and raise its error on all ranks; all ranks call it."""
        job, self._job = self._job, None
        if job is None:
            return
        try:
            job.is_written.wait()
            raise_on_all_ranks(self._world, job.failure)
            job.wait()
            raise_on_all_ranks(self._world, job.failure)
        except BaseException:
            job.abandon(0.0)
            raise
        self._done = job.done

    def finished(self) -> FinishedSave | None:
        """What was published since the last call, without waiting; None except on rank 0."""
        if self._job is not None and self._job.done is not None:
            self._done, self._job.done = self._job.done, None
        done, self._done = self._done, None
        return done

    def abandon(self) -> None:
        """Abandon the save under way, when other ranks may be gone; one that is nearly done may end."""
        job, self._job = self._job, None
        if job is not None:
            job.abandon(_GRACE_S)
            self._done = job.done or self._done

    def _make_temp_dir(self, folder: Path | None, policy: RetentionPolicy) -> TempDir:
        """The folder that all ranks write into, seen by all of them."""
        new, failure = None, None
        if folder is not None:
            try:
                new = make_temp_dir(folder, policy.step, 0)
            except Exception as error:
                failure = error
        raise_on_all_ranks(self._world, failure)
        shared = Path(self._world.broadcast_object(str(new.path.resolve()) if new is not None else None))
        deadline_s = time.monotonic() + _SEEN_WITHIN_S
        while not shared.is_dir() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        try:
            require_seen(self._world, shared)
        except Exception:
            if new is not None:
                _remove(new.path)
            raise
        return TempDir(shared, [] if new is None else new.notices)

    def _sharded(self, shard: Shard, folder: Path | None, policy: RetentionPolicy, temporary: TempDir) -> _Job:
        own = ShardWriter(self._world.rank, self._frozen_shard(shard))
        write = partial(own.write, temporary.path, policy.step)
        if folder is None:
            return _Job(write, None)
        publisher = Publisher(folder, shard, policy, self._world.size)
        return _Job(write, partial(publisher.publish, temporary.path, temporary.notices), temporary.path)

    def _frozen(self, snapshot: Snapshot) -> Snapshot:
        if not self._in_background:
            return snapshot
        sections = {"model": snapshot.model, "optimizer": snapshot.optimizer, "ranks": snapshot.ranks}
        copies = self._copied({f"{s}/{name}": t for s, each in sections.items() for name, t in each.items()})
        return replace(snapshot, **{s: {name: copies[f"{s}/{name}"] for name in each} for s, each in sections.items()})

    def _frozen_shard(self, shard: Shard) -> Shard:
        if not self._in_background:
            return shard
        copies = self._copied({str(number): chunk.tensor for number, chunk in enumerate(shard.chunks)})
        chunks = [replace(chunk, tensor=copies[str(number)]) for number, chunk in enumerate(shard.chunks)]
        return replace(shard, chunks=chunks)

    @torch.no_grad()
    def _copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of all values; they overwrite those of the last call."""
        for name, tensor in tensors.items():
            require_plain(name, tensor)
        # Tensors on the CPU too: the next step changes them.
        copies = {name: _like(tensor, self._copies.get(name)) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            copies[name].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        self._copies = copies
        return copies


def _like(tensor: Tensor, kept: Tensor | None) -> Tensor:
    """Host memory for a copy: that of an earlier one if it is alike."""
    if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
        return kept
    # From a GPU, pinned memory is filled several times faster.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _remove(folder: Path) -> None:
    """Remove a folder so that a thread that still writes into it cannot publish it."""
    with contextlib.suppress(OSError):
        remove(folder)
