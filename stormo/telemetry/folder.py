"""The folder of a run: where each part of it lies, and what its JSON files say."""

from __future__ import annotations

import fcntl
import json
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stormo.errors import StormoError

_CHECKPOINT_NAME = re.compile(r"step-(\d+)")
_SILENT_AFTER_S = 300.0  # validation and saving write no events; longer silence means a dead run


@dataclass(frozen=True)
class RunFolder:
    """Where each part of one run lies."""

    path: Path

    @property
    def name(self) -> str:
        """The run's name, which is that of its folder."""
        return self.path.resolve().name

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.toml"

    @property
    def environment(self) -> Path:
        """Machine, software versions and command line."""
        return self.path / "environment.json"

    @property
    def events(self) -> Path:
        """Every record of the run, one JSON object per line."""
        return self.path / "events.jsonl"

    @property
    def summary(self) -> Path:
        """The result; there is none while the run goes on or after it was killed."""
        return self.path / "summary.json"

    @property
    def lock(self) -> Path:
        """The file that the process which trains the run holds."""
        return self.path / ".lock"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def nodes(self) -> Path:
        """The folder with one file a node: what it drew, and its state."""
        return self.path / "nodes"

    @property
    def tensorboard(self) -> Path:
        """The folder of the TensorBoard event files."""
        return self.path / "tensorboard"

    @property
    def is_run(self) -> bool:
        """Whether the folder holds anything a run writes."""
        return any(part.is_file() for part in (self.events, self.summary, self.config, self.environment))

    def checkpoint_folders(self) -> list[Path]:
        """The published checkpoints, oldest first."""
        if not self.checkpoints.is_dir():
            return []
        found = [(_CHECKPOINT_NAME.fullmatch(entry.name), entry) for entry in self.checkpoints.iterdir()]
        numbered = [(int(match[1]), entry) for match, entry in found if match and entry.is_dir()]
        return [entry for _, entry in sorted(numbered)]


def read_summary(folder: RunFolder) -> dict[str, Any] | None:
    """The content of `summary.json`, or None while there is none."""
    return _read_object(folder.summary)


def read_environment(folder: RunFolder) -> dict[str, Any] | None:
    """The content of `environment.json`, or None if there is none."""
    return _read_object(folder.environment)


def is_held(folder: RunFolder) -> bool | None:
    """Whether a process trains the run now; None where this host cannot know, as it may be another one's."""
    if (read_environment(folder) or {}).get("host") != socket.gethostname():
        return None
    try:
        with folder.lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or no locks on this file system
        return None
    return False


def goes_on(folder: RunFolder, silent_s: float) -> tuple[bool, bool]:
    """Whether a run without a summary, silent for so long, goes on, and whether that is certain.

    On this host it does as long as a process holds it. That of another host is judged by its silence, which cannot
    tell one that was killed a moment ago from one that still goes on.
    """
    held = is_held(folder)
    return (silent_s < _SILENT_AFTER_S, False) if held is None else (held, True)


def _read_object(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise StormoError(f"{path} is not valid JSON ({error}); it was changed after it was written.") from error
    if not isinstance(content, dict):
        raise StormoError(f"{path} holds a JSON {type(content).__name__} where an object belongs.")
    return content
