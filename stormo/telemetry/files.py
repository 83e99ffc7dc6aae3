"""The run folder: its layout, the `events.jsonl` sink, `summary.json`, `environment.json`, and how to read them back.

A resumed run goes on in the same `events.jsonl`; `current_events` leaves out what the resume made obsolete.
Nothing here imports torch: the versions of its libraries are handed in.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import stormo
from stormo.errors import SettingError, StormoError, unknown_name
from stormo.telemetry.record import NodeSampled, Record, RunEnded, RunStarted, ValidationProgress, flatten

_TAIL_BLOCK_BYTES = 65536
_GIT_TIMEOUT_S = 5.0
_CHECKPOINT_NAME = re.compile(r"step-(\d+)")

_RECORDED_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
_RECORDED_VARIABLE_PREFIXES = ("SLURM_", "NCCL_", "GLOO_")

_MASK = "***"
_SECRET_WORDS = frozenset(
    ("token", "secret", "password", "passwd", "passphrase", "key", "apikey", "jwt", "auth", "credential", "credentials")
)
_URL_PASSWORD = re.compile(r"(://[^/\s:@]*):[^/\s@]+@")
_TOKEN_SHAPE = re.compile(r"\b(?:hf_|ghp_|gho_|ghs_|github_pat_|glpat-|sk-|xox[abp]-|AKIA)[A-Za-z0-9_-]{12,}")


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


class EventFile:
    """Appends every record to `events.jsonl` and writes `summary.json` at the end of the run."""

    def __init__(self, folder: RunFolder, *, clock: Callable[[], float] = time.time) -> None:
        folder.path.mkdir(parents=True, exist_ok=True)
        _repair_last_line(folder.events)
        self._folder = folder
        self._clock = clock
        self._file: BinaryIO = folder.events.open("ab")

    def write(self, record: Record) -> None:
        """Append one record; validation progress is for the eye only, and a node's own file has its samples."""
        if isinstance(record, ValidationProgress | NodeSampled):
            return
        if isinstance(record, RunStarted):
            # The summary of the attempt before this one would make a running run look finished;
            # its content stays in events.jsonl.
            self._folder.summary.unlink(missing_ok=True)
        event = {"event": _event_name(record), "time_unix_s": self._clock(), **flatten(record)}
        self._file.write(json.dumps(to_json(event), allow_nan=False).encode() + b"\n")
        # Handing the line to the kernel survives a kill of this process. No fsync per line: on a busy
        # parallel file system one can take seconds, and every worker would wait for it.
        self._file.flush()
        if isinstance(record, RunEnded):
            os.fsync(self._file.fileno())
            write_json(self._folder.summary, record.summary)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def to_json(value: Any) -> Any:
    """The value with tuples as lists, paths as text and non-finite floats as null, which JSON does not know."""
    if isinstance(value, float):
        return float(value) if abs(value) < float("inf") else None  # not-a-number fails the comparison too
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


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old or the new content, never a part, even after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())  # before the rename, or the new name could point at an empty file
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder_fd = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder_fd)  # makes the rename itself durable
    finally:
        os.close(folder_fd)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Every complete event of the file in order, none if there is no file; a last line cut short is left out."""
    if not path.is_file():
        return []
    events: list[dict[str, Any]] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            event = _parse_event(line)
            if event is not None:
                events.append(event)
            elif line.endswith(b"\n"):
                raise StormoError(
                    f"{path}: line {number} is not a JSON object; the file was damaged after it was written."
                )
    return events


def current_events(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The events that still hold: a resume at step 100, or a rollback to it, makes records of later steps obsolete."""
    kept: list[Mapping[str, Any]] = []
    for event in events:
        if event["event"] == "run_started":
            resumed_at_step = event.get("resumed_at_step")
            # Started anew in the same folder: nothing that was there before belongs to this run.
            kept = [] if resumed_at_step is None else [old for old in kept if old.get("step", 0) <= resumed_at_step]
        elif event["event"] == "divergence_noticed" and event.get("rolled_back_to_step") is not None:
            kept = [old for old in kept if old.get("step", 0) <= event["rolled_back_to_step"]]
        kept.append(event)
    return kept


def speed_of(figures: Mapping[str, Any]) -> tuple[str, float | None]:
    """The unit of an event or a summary and how many of it a second; older runs counted images alone."""
    unit = str(figures.get("unit", "images"))
    return unit, figures.get("units_per_s", figures.get(f"{unit}_per_s"))


def read_summary(folder: RunFolder) -> dict[str, Any] | None:
    """The content of `summary.json`, or None while there is none."""
    return _read_object(folder.summary)


def read_environment(folder: RunFolder) -> dict[str, Any] | None:
    """The content of `environment.json`, or None if there is none."""
    return _read_object(folder.environment)


def list_runs(folder: Path) -> list[RunFolder]:
    """The runs directly in a folder, the one started last first."""
    if not folder.is_dir():
        return []
    runs = [run for entry in folder.iterdir() if entry.is_dir() and (run := RunFolder(entry)).is_run]
    return sorted(runs, key=lambda run: (_start_unix_s(run), run.name), reverse=True)


def default_run_name(task: str) -> str:
    """The name of a run that the user gives none: its task and the time."""
    slug = task.rpartition("/")[2].replace(".py", "").replace(":", "-").replace(".", "-")
    return f"{slug or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"


def require_new_run(parent: Path, name: str) -> None:
    """Refuse the name of a run that is there already."""
    if RunFolder(parent / name).is_run:
        raise SettingError(
            f"--run-name {name} was set",
            f"{parent / name} is there already",
            f"go on with it by --resume {name}, or set another name",
        ) from None


def find_run(folder: Path, name_or_path: str) -> RunFolder:
    """The run of that name in the folder, or the one at that path."""
    for candidate in (folder / name_or_path, Path(name_or_path)):
        run = RunFolder(candidate)
        if run.is_run:
            return run
    if any((path / "slurm.json").is_file() for path in (folder / name_or_path, Path(name_or_path))):
        raise SettingError(
            f"run {name_or_path!r} was asked for",
            "it was submitted and has not begun",
            f"see stormo status {name_or_path}",
        )
    runs = list_runs(folder)
    if not runs:
        raise SettingError(
            f"run {name_or_path!r} was asked for",
            f"there is no run in {folder}",
            "name the folder that holds your runs",
        )
    raise unknown_name("run", name_or_path, [run.name for run in runs])


def collect_environment(extra: Mapping[str, Any]) -> dict[str, Any]:
    """What is needed to run the same thing again; `extra` adds what this file cannot know, such as torch's version."""
    environment: dict[str, Any] = {
        "time_unix_s": time.time(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "num_cpus": len(os.sched_getaffinity(0)),  # those this process may use, not those the node has
        "python": platform.python_version(),
        "stormo": stormo.__version__,
        "pid": os.getpid(),
        "command": mask_secrets(sys.argv),
        "working_folder": str(Path.cwd()),
        **_git_state(Path.cwd()),
        "variables": {
            name: _MASK if _is_secret_name(name) else value
            for name, value in sorted(os.environ.items())
            if name in _RECORDED_VARIABLES or name.startswith(_RECORDED_VARIABLE_PREFIXES)
        },
    }
    return {**environment, **extra}


def mask_secrets(arguments: Sequence[str]) -> list[str]:
    """A command line in which whatever looks like a password or a token is replaced by asterisks."""
    masked: list[str] = []
    follows_secret_name = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_option = argument.startswith("-")
        if follows_secret_name and not is_option:
            masked.append(_MASK)
            follows_secret_name = False
            continue
        follows_secret_name = is_option and not equals and _is_secret_name(name)
        if equals and _is_secret_name(name):
            masked.append(f"{name}={_MASK}")
        else:
            masked.append(_TOKEN_SHAPE.sub(_MASK, _URL_PASSWORD.sub(rf"\1:{_MASK}@", argument)))
    return masked


def _is_secret_name(name: str) -> bool:
    return not _SECRET_WORDS.isdisjoint(re.split(r"[^a-z0-9]+", name.lower()))


def _git_state(folder: Path) -> dict[str, Any]:
    """The commit of the folder and whether tracked files differ from it, or the reason why they are not known."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except FileNotFoundError:
        return {"git_commit": None, "git_commit_reason": "git is not installed"}
    except subprocess.TimeoutExpired:
        return {"git_commit": None, "git_commit_reason": f"git did not answer within {_GIT_TIMEOUT_S:g} s"}
    except subprocess.CalledProcessError as error:
        lines = str(error.stderr).strip().splitlines()
        return {"git_commit": None, "git_commit_reason": lines[0] if lines else f"git ended with {error.returncode}"}
    return {"git_commit": commit.strip(), "git_has_changes": bool(changes.strip())}


def _git(folder: Path, *arguments: str) -> str:
    # Without the optional locks, a status never gets in the way of the user's own git commands.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    done = subprocess.run(
        ["git", *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        timeout=_GIT_TIMEOUT_S,
        encoding="utf-8",
        errors="replace",
    )
    return done.stdout


def _event_name(record: Record) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(record).__name__).lower()


def _parse_event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:  # malformed JSON and malformed UTF-8 alike
        return None
    return event if isinstance(event, dict) and "event" in event else None


def _repair_last_line(path: Path) -> None:
    """Remove a last line that a kill cut short, so that the next record starts on a line of its own."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        size_bytes = file.seek(0, os.SEEK_END)
        start, tail = size_bytes, b""
        while start > 0 and b"\n" not in tail:
            block_start = max(0, start - _TAIL_BLOCK_BYTES)
            file.seek(block_start)
            tail = file.read(start - block_start) + tail
            start = block_start
        last_line = tail[tail.rfind(b"\n") + 1 :]
        if not last_line:
            return
        if _parse_event(last_line) is None:
            file.truncate(size_bytes - len(last_line))
        else:  # only its line end is missing
            file.seek(0, os.SEEK_END)
            file.write(b"\n")


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


def _start_unix_s(run: RunFolder) -> float:
    """When the run first started; the folder's own time stands in until its first event is written."""
    if run.events.is_file():
        with run.events.open("rb") as file:
            first = _parse_event(file.readline())
        if first is not None and isinstance(first.get("time_unix_s"), (int, float)):
            return float(first["time_unix_s"])
    return run.path.stat().st_mtime
