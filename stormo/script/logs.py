"""`world.log`: what a user's own loop logs, in a run folder that TensorBoard and `stormo report` read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.script.joining import at_exit
from stormo.telemetry import trackers
from stormo.telemetry.environment import collect_environment
from stormo.telemetry.events import EventFile
from stormo.telemetry.folder import RunFolder, write_json
from stormo.telemetry.media import log_value
from stormo.telemetry.record import Record, RunEnded, RunStarted, Sink
from stormo.telemetry.tensorboard import TensorBoardFile

_LONGEST_START_S = 60.0  # of a tool: a script that ends meanwhile would lose it


class ScriptLog:
    """Opens the run folder when the first value is logged; rank 0 writes."""

    def __init__(self, folder: Path | None, sinks: Sequence[str], world: World) -> None:
        self._folder = None if folder is None else RunFolder(folder)
        self._names = tuple(sinks)
        self._world = world
        self._sinks: list[Sink] = []
        self._trackers: list[trackers.TrackerSink] = []
        self._lock: IO[bytes] | None = None
        self._num_steps = 0
        if self._names and folder is None:
            raise SettingError(
                f"World(sinks={self._names!r}) was called", "they belong to a run", 'set run_folder="runs/mine" too'
            )
        trackers.check(self._names)

    def write(self, name: str, value: Any, step: int) -> None:
        """Log a value at a step."""
        if self._folder is None:
            raise SettingError(
                f"world.log({name!r}) was called",
                "the world has no folder to write to",
                'set World(run_folder="runs/mine")',
            )
        if not self._world.is_main:
            return
        if not self._sinks:
            self._open(self._folder, step)
        self._num_steps = max(self._num_steps, step)
        self._record(log_value(self._folder, name, value, step))

    def close(self) -> None:
        """End the run, where one was begun."""
        if not self._sinks or self._folder is None:
            return
        ended = "script" if getattr(sys, "last_type", None) is None else "error"  # Python sets it where nobody catches
        summary = {"run_name": self._folder.name, "task": _script(), "world_size": self._world.size}
        self._record(RunEnded(summary={**summary, "steps": self._num_steps, "stopped_by": ended}))
        for sink in (*self._trackers, *self._sinks):
            sink.close()
        self._say()
        self._sinks, self._trackers = [], []
        if self._lock is not None:
            self._lock.close()

    def _open(self, folder: RunFolder, step: int) -> None:
        from stormo.training.run_folder import lock_folder, torch_environment

        made = trackers.make_trackers(self._names)
        is_resume = folder.events.exists()
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = lock_folder(folder)
        write_json(folder.environment, collect_environment(torch_environment(self._world)))
        self._sinks, self._trackers = [EventFile(folder), TensorBoardFile(folder.tensorboard)], made
        self._record(
            RunStarted(
                run_name=folder.name,
                run_folder=str(folder.path),
                task=_script(),
                world_size=self._world.size,
                resumed_at_step=step if is_resume else None,
            )
        )
        for tracker in made:
            tracker.started.wait(_LONGEST_START_S)
        at_exit(self.close)  # now, so that it comes before what the tools do at the end of the process

    def _record(self, record: Record) -> None:
        for sink in (*self._sinks, *self._trackers):
            sink.write(record)
        self._say()

    def _say(self) -> None:
        for tracker in self._trackers:
            for notice in tracker.take_notices():
                print(f"stormo: {notice.text}", file=sys.stderr, flush=True)  # noqa: T201


def _script() -> str:
    return Path(sys.argv[0]).name
