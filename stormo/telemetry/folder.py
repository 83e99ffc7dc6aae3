"""The folder of a run: its files, what they hold, and how they are written atomically."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from stormo.system.files import Fields, create, open_to_read, read_object, sync_folder, temporary_name, write_all


def to_json(value: Any) -> Any:
    """The value as JSON knows it: tuples as lists, paths as text, non-finite floats as null."""
    if isinstance(value, float):
        return float(value) if abs(value) < float("inf") else None  # NaN fails the comparison too
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_json(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file as `write_whole` does."""
    write_whole(path, json.dumps(to_json(value), indent=2, allow_nan=False) + "\n")


@contextlib.contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Name this path in errors of the operating system, which name none for an open file."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically: a reader sees the old or the new content, even after a power cut."""
    temporary = temporary_name(path)
    try:
        with name_in_errors(path), create(temporary) as file:
            write_all(file, content.encode() if isinstance(content, str) else content)
            os.fsync(file.fileno())  # before the rename, or the new name could be an empty file
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


_CHECKPOINT_NAME = re.compile(r"step-(\d{1,20})", flags=re.ASCII)
_SILENT_AFTER_S = 300.0  # validation and saving write no events; a longer silence means a dead run


class _Pipeline(TypedDict):
    schedule: str
    num_stages: int
    micro_batches: int
    predicted_bubble: float | None
    measured_bubble: float | None
    spans: list[tuple[Any, ...]]


class _NodeEnergy(TypedDict):
    node_id: str
    host: str
    energy_j: float | None


def _keys(kind: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), kind | None)


_FIGURES = Mapping[str, float | None]
# The types of the files' keys, which are stored names; a figure that was not measured is null.
_SUMMARY: Mapping[str, Any] = {
    **_keys(str, "run_name task strategy mesh device precision stopped_by unit mfu_reason currency weights_sha256"),
    **_keys(str, "sample_order_sha256 noise_scale_reason noise_scale_advice"),
    **_keys(int, "diverged_at_step world_size global_batch_size micro_batch_size accumulate epochs_run epochs steps"),
    **_keys(int, "samples_seen samples_trained num_resumes num_rollbacks staleness_max staleness_bound"),
    **_keys(int, "peak_memory_bytes peak_reserved_memory_bytes"),
    **_keys(float, "train_time_s setup_time_s wall_time_s time_to_target_s samples_per_s images_per_s tokens_per_s"),
    **_keys(float, "units_per_s mfu validation_accuracy validation_loss best_validation_accuracy best_validation_loss"),
    **_keys(float, "input_wait_fraction energy_j energy_wh energy_error_j energy_j_per_sample energy_to_target_j"),
    **_keys(float, "energy_cost co2e_g noise_scale noise_scale_low noise_scale_high staleness_mean"),
    **_keys(_FIGURES, "setup_parts_s validation energy_parts_j energy_parts_error_j energy_kinds_j"),
    "energy_nodes": list[_NodeEnergy] | None,
    "energy_reasons": list[str] | Mapping[str, Any] | str | None,
    "link": Mapping[str, Any] | None,
    "pipeline": _Pipeline | None,
}
_MACHINE: Mapping[str, Any] = {
    **_keys(str, "host platform machine python stormo torch cuda nccl gpu working_folder git_commit git_commit_reason"),
    **_keys(int, "num_cpus pid world_size threads"),
    "time_unix_s": float | None,
    "started_unix_s": float | None,
    "git_has_changes": bool | None,
    "command": list[str],
    "launches": list[str] | None,
    "variables": Mapping[str, str] | None,
}
SUMMARY, ENVIRONMENT = Fields(_SUMMARY), Fields(_MACHINE)


class _Inside:
    """A file or folder of a run, by its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder, _: type) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """The files of one run."""

    path: Path
    config = _Inside("config.toml")  # the resolved configuration
    environment = _Inside("environment.json")  # machine, software versions and command line
    events = _Inside("events.jsonl")  # every record, one JSON object a line
    summary = _Inside("summary.json")  # the result; missing while the run is running and after it was killed
    lock = _Inside(".lock")  # locked by the training process
    checkpoints = _Inside("checkpoints")
    nodes = _Inside("nodes")  # one file a node: its energy and its samples
    tensorboard = _Inside("tensorboard")
    media = _Inside("media")  # pictures that were logged

    @property
    def name(self) -> str:
        """The name of the run and of its folder."""
        return self.path.resolve().name

    @property
    def is_run(self) -> bool:
        """True where the folder holds a file of a run; False where this account may not look."""
        try:
            return any(part.is_file() for part in (self.events, self.summary, self.config, self.environment))
        except PermissionError:
            return False

    def checkpoint_folders(self) -> list[Path]:
        """The published checkpoints, oldest first."""
        if not self.checkpoints.is_dir():
            return []
        found = [(_CHECKPOINT_NAME.fullmatch(entry.name), entry) for entry in self.checkpoints.iterdir()]
        numbered = [(int(match[1]), entry) for match, entry in found if match and entry.is_dir()]
        return [entry for _, entry in sorted(numbered)]


def read_summary(folder: RunFolder) -> dict[str, Any] | None:
    """The content of `summary.json`, or None while there is none."""
    return _read(folder.summary, SUMMARY)


def read_environment(folder: RunFolder) -> dict[str, Any] | None:
    """The content of `environment.json`, or None if there is none."""
    return _read(folder.environment, ENVIRONMENT)


def is_running(folder: RunFolder, silent_s: float) -> tuple[bool, bool]:
    """Whether a run without a summary is running, and whether that is certain.

    On this host its lock decides. A run of another host counts as dead after a long silence.
    """
    guess = silent_s < _SILENT_AFTER_S, False
    if (read_environment(folder) or {}).get("host") != socket.gethostname():
        return guess
    try:
        with open_to_read(folder.lock, 0) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True, True
    except OSError:  # no such file, or no locks on this file system
        return guess
    return False, True


def _read(path: Path, fields: Fields) -> dict[str, Any] | None:
    try:
        return read_object(path, fields)
    except FileNotFoundError:
        return None
