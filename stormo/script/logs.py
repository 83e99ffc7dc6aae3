"""`world.log`: what a user's own loop logs, in a run folder that TensorBoard and `stormo report` read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.script.joining import at_exit
from stormo.telemetry.environment import collect_environment
from stormo.telemetry.events import EventFile
from stormo.telemetry.folder import RunFolder, write_json
from stormo.telemetry.media import log_value
from stormo.telemetry.record import RunEnded, RunStarted
from stormo.telemetry.tensorboard import TensorBoardFile
from stormo.telemetry.text import tell
from stormo.telemetry.trackers import RunSinks, check
from stormo.training.run_folder import lock_folder, torch_environment

_LONGEST_START_S = 60.0  # of a tool: a script that ends meanwhile would lose it


class ScriptLog:
    """Opens the run folder when the first value is logged; rank 0 writes."""

    def __init__(self, folder: Path | None, sinks: Sequence[str], world: World) -> None:
        self._folder = None if folder is None else RunFolder(folder)
        self._trackers = tuple(sinks)
        self._world = world
        self._sinks: RunSinks | None = None
        self._lock: IO[bytes] | None = None
        self._num_steps = 0
        if self._trackers and folder is None:
            raise SettingError(
                f"World(sinks={self._trackers!r}) was called", "they belong to a run", 'set run_folder="runs/mine" too'
            )
        check(self._trackers)

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
        sinks = self._sinks or self._open(self._folder, step)
        self._num_steps = max(self._num_steps, step)
        sinks.write(log_value(self._folder, name, value, step))

    def close(self) -> None:
        """End the run, where one was begun."""
        if self._sinks is None or self._folder is None:
            return
        ended = "script" if getattr(sys, "last_type", None) is None else "error"  # Python sets it where nobody catches
        summary = {"run_name": self._folder.name, "task": _script(), "world_size": self._world.size}
        self._sinks.write(RunEnded(summary={**summary, "steps": self._num_steps, "stopped_by": ended}))
        self._sinks.close()
        self._sinks = None
        if self._lock is not None:
            self._lock.close()

    def _open(self, folder: RunFolder, step: int) -> RunSinks:
        sinks = RunSinks(self._trackers, lambda notice: tell(notice.text))
        is_resume = folder.events.exists()
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = lock_folder(folder)
        write_json(folder.environment, collect_environment(torch_environment(self._world)))
        sinks.add(EventFile(folder), TensorBoardFile(folder.tensorboard))
        self._sinks = sinks
        sinks.write(
            RunStarted(
                run_name=folder.name,
                run_folder=str(folder.path),
                task=_script(),
                world_size=self._world.size,
                resumed_at_step=step if is_resume else None,
            )
        )
        for tracker in sinks.trackers:
            tracker.started.wait(_LONGEST_START_S)
        at_exit(self.close)  # now, so that it comes before what the tools do at the end of the process
        return sinks


def _script() -> str:
    return Path(sys.argv[0]).name
