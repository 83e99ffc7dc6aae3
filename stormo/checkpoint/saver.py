"""Saves the checkpoints of a run, one at a time: while training waits, or in a thread while it goes on.

Workers exchange words only in `begin` and `settle`, which all of them call; a thread knows of the others by their files
alone. A save that failed is raised by all workers in the next `settle`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from stormo.checkpoint import leftovers
from stormo.checkpoint.agreement import raise_together, require_seen
from stormo.checkpoint.host_copies import HostCopies
from stormo.checkpoint.layout import Saved, Snapshot
from stormo.checkpoint.merging import Publisher
from stormo.checkpoint.publishing import Saving
from stormo.checkpoint.shard import Shard, ShardSave
from stormo.checkpoint.writing import NewFolder, WholeSave, make_new_folder
from stormo.distributed.world import World

_SEEN_WITHIN_S = 5.0  # a new folder may take a moment to be seen on other nodes
_GRACE_S = 5.0  # for a save that is nearly done when the run fails

Abandoned = threading.Event


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """A checkpoint that is published, and how long that took."""

    saved: Saved
    write_time_s: float


class _Job:
    """One save on one worker: what it writes itself, and what makes a checkpoint of all, where this one does that."""

    def __init__(
        self,
        write: Callable[[Abandoned], None] | None,
        finish: Callable[[Abandoned], Saved] | None,
        temporary: Path | None = None,
    ) -> None:
        self.abandoned = threading.Event()
        self.failure: Exception | None = None
        self.done: Done | None = None
        self.temporary = temporary  # where it is this worker that removes it
        self.thread: threading.Thread | None = None
        self._write, self._finish = write, finish
        self._is_written = threading.Event()
        self._began_s = time.perf_counter()

    def start(self) -> None:
        """Do both in a thread, which does not keep the process from ending."""
        self.thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.write()
        if self.failure is None:
            self.finish()

    def write(self) -> None:
        """This worker's own part."""
        try:
            if self._write is not None:
                self._write(self.abandoned)
        except Exception as error:
            self.failure = error
        finally:
            self._is_written.set()

    def finish(self) -> None:
        """The part of the one that publishes."""
        try:
            if self._finish is not None:
                saved = self._finish(self.abandoned)
                self.done = Done(saved=saved, write_time_s=time.perf_counter() - self._began_s)
        except Exception as error:
            self.failure = error

    def wait_written(self) -> None:
        """Until this worker's own part is done."""
        self._is_written.wait()

    def wait(self) -> None:
        """Until all of it is done: by the thread, or here."""
        if self.thread is None:
            self.finish()
        else:
            self.thread.join()

    def abandon(self, grace_s: float) -> None:
        """Give it up unless it comes to its end within this time."""
        if self.thread is not None:
            self.thread.join(grace_s)
            self.abandoned.set()
            self.thread.join(_GRACE_S)  # it looks up between two pieces of a file
        if self.temporary is not None and self.done is None:
            _remove(self.temporary)


class Saver:
    """Of one run, on one worker.

    Args:
        world: of the run.
        in_background: whether a thread writes.
    """

    def __init__(self, world: World, *, in_background: bool) -> None:
        self._world = world
        self._in_background = in_background
        self._copies = HostCopies()
        self._job: _Job | None = None
        self._told: Done | None = None

    def begin(self, content: Snapshot | Shard | None, folder: Path | None, saving: Saving) -> None:
        """Save what this worker has of a checkpoint; all workers call it, and then `settle`.

        Args:
            content: the whole on the main worker and None on the others, or everyone's shard.
            folder: of the checkpoints, on the main worker.
            saving: step, and what is kept.
        """
        assert self._job is None, "settle the one before first"
        failure, job = None, _Job(None, None)
        if isinstance(content, Shard):
            new = self._make_folder(folder, saving)
            job.temporary = None if folder is None else new.path
            try:
                job = self._sharded(content, folder, saving, new)
            except Exception as error:
                failure = error
        elif content is not None:
            assert folder is not None
            try:
                job = _Job(None, WholeSave(folder, self._frozen(content), saving).write)
            except Exception as error:
                failure = error
        try:
            raise_together(self._world, failure)
        except Exception:
            job.abandon(0.0)
            raise
        self._job = job
        if self._in_background:
            job.start()
        else:
            job.write()

    def settle(self) -> None:
        """Wait for the save under way, and raise on all workers what went wrong with it; all workers call it."""
        job, self._job = self._job, None
        if job is None:
            return
        try:
            job.wait_written()
            raise_together(self._world, job.failure)
            job.wait()
            raise_together(self._world, job.failure)
        except BaseException:
            job.abandon(0.0)
            raise
        self._told = job.done

    def finished(self) -> Done | None:
        """What has been published since the last call, without waiting; None on other workers than the main one."""
        if self._job is not None and self._job.done is not None:
            self._told, self._job.done = self._job.done, None
        told, self._told = self._told, None
        return told

    def abandon(self) -> None:
        """Give up what is under way, where other workers may be gone; what is all but done may come to its end."""
        job, self._job = self._job, None
        if job is not None:
            job.abandon(_GRACE_S)
            self._told = job.done or self._told

    def _make_folder(self, folder: Path | None, saving: Saving) -> NewFolder:
        """The folder that all workers write into, seen by all of them."""
        new, failure = None, None
        if folder is not None:
            try:
                new = make_new_folder(folder, saving.step, 0)
            except Exception as error:
                failure = error
        raise_together(self._world, failure)
        shared = Path(self._world.share_json(str(new.path.resolve()) if new is not None else None))
        _look_for(shared)
        try:
            require_seen(self._world, shared)
        except Exception:
            if new is not None:
                _remove(new.path)
            raise
        return NewFolder(shared, [] if new is None else new.notices)

    def _sharded(self, shard: Shard, folder: Path | None, saving: Saving, new: NewFolder) -> _Job:
        own = ShardSave(self._world.rank, self._frozen_shard(shard))
        finish: Callable[[Abandoned], Saved] | None = None
        if folder is not None:
            publisher = Publisher(folder, shard, saving, self._world.size)

            def finish(abandoned: Abandoned) -> Saved:
                return publisher.publish(new.path, new.notices, abandoned)

        def write(abandoned: Abandoned) -> None:
            own.write(new.path, saving.step, abandoned)

        return _Job(write, finish, None if folder is None else new.path)

    def _frozen(self, snapshot: Snapshot) -> Snapshot:
        if not self._in_background:
            return snapshot
        sections = {"model": snapshot.model, "optimizer": snapshot.optimizer, "ranks": snapshot.ranks}
        copies = self._copies.take({f"{s}/{name}": t for s, each in sections.items() for name, t in each.items()})
        return replace(snapshot, **{s: {name: copies[f"{s}/{name}"] for name in each} for s, each in sections.items()})

    def _frozen_shard(self, shard: Shard) -> Shard:
        if not self._in_background:
            return shard
        copies = self._copies.take({str(number): box.tensor for number, box in enumerate(shard.boxes)})
        boxes = [replace(box, tensor=copies[str(number)]) for number, box in enumerate(shard.boxes)]
        return replace(shard, boxes=boxes)


def _remove(folder: Path) -> None:
    """Remove a folder so that a thread that is still at it cannot publish what is left."""
    with contextlib.suppress(OSError):
        leftovers.remove(folder)


def _look_for(folder: Path) -> None:
    deadline_s = time.monotonic() + _SEEN_WITHIN_S
    while not folder.is_dir() and time.monotonic() < deadline_s:
        time.sleep(0.05)
