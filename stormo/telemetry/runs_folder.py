"""The folder of all runs: lists them, finds one by name, path or launch, and shows each at a glance.

The state of a run comes from `summary.json`; without one, from its lock or its last event.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stormo.errors import SettingError, StormoError, suggestion, unknown_name
from stormo.system.files import BadFileError, masked, private_folder, read_lines, read_object, read_toml
from stormo.telemetry.events import EventFile, current_events, parse_event, read_events, speed_of
from stormo.telemetry.folder import RunFolder, is_running, read_environment, read_summary, write_json
from stormo.telemetry.record import Notice
from stormo.telemetry.text import run_reference

_MOST_BYTES = 4096  # of the file of a launch
_MOST_NAMED = 5  # runs in the error for an unknown name


def list_runs(folder: Path) -> list[RunFolder]:
    """The runs in a folder, the newest first."""
    if not folder.is_dir():
        return []
    runs = [run for entry in folder.iterdir() if entry.is_dir() and (run := RunFolder(entry)).is_run]
    return sorted(runs, key=lambda run: (_start_unix_s(run), run.name), reverse=True)


def note_launch(folder: Path, launch: str, name: str) -> None:
    """Keep which run a torchrun started, so that its ranks need not search all runs."""
    file = _launch_file(folder, launch)
    private_folder(file.parent)
    write_json(file, {"launch": launch, "run": name})


def forget_launch(folder: Path, launch: str) -> None:
    """Remove that file when the run has ended."""
    _launch_file(folder, launch).unlink(missing_ok=True)


def launched_run(folder: Path, launch: str) -> RunFolder | None:
    """The run that a torchrun started, or None."""
    try:
        content = read_object(_launch_file(folder, launch), max_bytes=_MOST_BYTES)
    except (BadFileError, FileNotFoundError):
        return None
    name = content.get("run") if content.get("launch") == launch else None
    return RunFolder(folder / name) if isinstance(name, str) and Path(name).name == name else None


def _launch_file(folder: Path, launch: str) -> Path:
    """In a folder of this user: a group may share its runs folder."""
    return folder / f".launches-{os.geteuid()}" / f"{hashlib.sha256(launch.encode()).hexdigest()[:32]}.json"


def run_started_at(folder: Path, started_unix_s: float) -> RunFolder | None:
    """The run that the workers of an agent on this host trained; None where they had not begun one."""
    for run in list_runs(folder):
        environment = read_environment(run) or {}
        if (environment.get("started_unix_s"), environment.get("host")) == (started_unix_s, socket.gethostname()):
            return run
    return None


def note_failure(run: RunFolder, cause: str) -> str | None:
    """Write into a run why it failed; how to resume it, where it has a checkpoint."""
    summary = read_summary(run)
    if summary is None or summary.get("stopped_by") == "error":
        with contextlib.closing(EventFile(run)) as events:
            events.write(Notice(kind="error", text=cause))
    if not run.checkpoint_folders():
        return None
    return f"resume with: stormo train --resume {run_reference(run.name, str(run.path))}"


def failure_of(events: Sequence[Mapping[str, Any]]) -> str | None:
    """Why the workers of a run failed, where that is the last thing that happened."""
    last = events[-1] if events else {}
    return str(last.get("text")) if (last.get("event"), last.get("kind")) == ("notice", "error") else None


def default_run_name(task: str) -> str:
    """The name of a run without `--run-name`: its task and the time."""
    slug = task.rpartition("/")[2].replace(".py", "").replace(":", "-").replace(".", "-")
    return f"{slug or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"


def require_new_run(parent: Path, name: str) -> None:
    """Refuse the name of an existing run."""
    if RunFolder(parent / name).is_run:
        raise SettingError(
            f"--run-name {name} was set",
            f"{parent / name} exists",
            f"resume it with --resume {name}, or set another name",
        ) from None


def new_run_folder(parent: Path, given_name: str | None, task: str) -> RunFolder:
    """Make the folder of a new run, under a free name."""
    name = given_name or default_run_name(task)
    for attempt in range(1, 1000):
        folder = parent / (name if attempt == 1 else f"{name}-{attempt}")
        if folder.is_dir() or not make_run_folder(folder):
            if given_name is not None:
                require_new_run(parent, name)
                return RunFolder(folder)  # its run was killed before it wrote anything; the lock keeps others out
            continue
        return RunFolder(folder)
    raise AssertionError("a thousand runs in one second")


def make_run_folder(folder: Path) -> bool:
    """Make a folder; False where another process was faster."""
    try:
        if not folder.parent.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)  # private: settings, command lines, weights
    except OSError as error:
        if isinstance(error, FileExistsError) and folder.is_dir():
            return False
        raise SettingError(
            f"--runs-folder {folder.parent} was set",
            f"{folder} cannot be made ({error.strerror})",
            "set another folder",
        ) from None
    return True


def find_run(folder: Path, name_or_path: str | None) -> RunFolder:
    """The run of that name in the folder, or the one at that path; None is the newest."""
    if name_or_path is None:
        name_or_path = next((run.name for run in list_runs(folder)), "newest")  # a name that the error shows
    for candidate in (folder / name_or_path, Path(name_or_path)):
        run = RunFolder(candidate)
        if run.is_run:
            return run
    if any((path / "slurm.json").is_file() for path in (folder / name_or_path, Path(name_or_path))):
        raise SettingError(
            f"run {name_or_path!r} was asked for",
            "it was submitted and has not begun",
            "squeue --me shows its job",
        )
    runs = list_runs(folder)
    if not runs:
        raise SettingError(
            f"run {name_or_path!r} was asked for",
            f"there is no run in {folder}",
            "set --runs-folder to the folder that holds your runs",
        )
    raise _unknown_run(name_or_path, [run.name for run in runs])


def _unknown_run(name: str, names: list[str]) -> SettingError:
    if len(names) <= _MOST_NAMED:
        return unknown_name("run", name, names)
    near = difflib.get_close_matches(Path(name).name, names, n=_MOST_NAMED, cutoff=0.0)
    return SettingError(
        f"run {name!r} was asked for",
        f"none of the {len(names)} runs has that name",
        f"{suggestion(name, near)}the nearest are: {', '.join(near)}; stormo runs lists all",
    )


def _start_unix_s(run: RunFolder) -> float:
    """When the run first started; before its first event, the time of its folder."""
    try:
        first = next((parse_event(line) for line in read_lines(run.events)), None)
    except (BadFileError, FileNotFoundError, ValueError):
        first = None  # reading the run shows the error
    if first is not None and isinstance(first.get("time_unix_s"), int | float):
        return float(first["time_unix_s"])
    return run.path.stat().st_mtime


MISSING = "n/a"
ENDS = {  # by `stopped_by`
    "target": "reached its target",
    "epochs": "trained all its epochs",
    "script": "reached its end",
    "signal": "stopped by a signal; it can be resumed",
    "divergence": "diverged",
    "error": "ended by an error",
}
_STATES = {
    **{"target": "done", "epochs": "done", "script": "done"},  # script: a user's own loop, which has logged
    **{"signal": "stopped", "divergence": "diverged", "error": "failed"},
}


@dataclass(frozen=True, kw_only=True)
class RunOverview:
    """One run at a glance; None: not known yet."""

    name: str
    folder: str
    state: str  # running, done, stopped, failed, interrupted or unreadable
    note: str | None = None  # why the state is not certain
    task: str | None = None
    world_size: int | None = None
    epochs_run: int | None = None
    epochs: int | None = None
    validation_accuracy: float | None = None
    validation_loss: float | None = None
    unit: str | None = None  # of the speed: images, tokens, ...
    units_per_s: float | None = None
    train_time_s: float | None = None


def overview(run: RunFolder, *, now_unix_s: float) -> RunOverview:
    """A run at a glance; a damaged file becomes the state `unreadable`, with the reason."""
    try:
        summary = read_summary(run)
        if summary is not None:
            return _finished(run, summary)
        return _unfinished(run, current_events(read_events(run.events)), now_unix_s)
    except (StormoError, OSError) as error:
        return RunOverview(name=run.name, folder=str(run.path), state="unreadable", note=str(error))


def _noted_failure(run: RunFolder) -> str | None:
    """Why the workers of a run with a summary failed; None also where the events cannot be read."""
    with contextlib.suppress(StormoError, OSError):
        return failure_of(read_events(run.events))
    return None


def _finished(run: RunFolder, summary: Mapping[str, Any]) -> RunOverview:
    stopped_by = str(summary.get("stopped_by"))
    unit, units_per_s = speed_of(summary)
    return RunOverview(
        name=run.name,
        folder=str(run.path),
        state=_STATES.get(stopped_by, stopped_by),
        note=_noted_failure(run) if stopped_by == "error" else None,
        task=summary.get("task"),
        world_size=summary.get("world_size"),
        epochs_run=summary.get("epochs_run"),
        epochs=summary.get("epochs"),
        validation_accuracy=summary.get("validation_accuracy"),
        validation_loss=summary.get("validation_loss"),
        unit=unit,
        units_per_s=units_per_s,
        train_time_s=summary.get("train_time_s"),
    )


def _unfinished(run: RunFolder, events: Sequence[Mapping[str, Any]], now_unix_s: float) -> RunOverview:
    started = last_event(events, "run_started")
    epoch = last_event(events, "epoch_done")
    step = last_event(events, "step_done")
    if events:
        silent_s = max(now_unix_s - float(events[-1].get("time_unix_s", 0.0)), 0.0)
        since = f"last event {_rough_duration(silent_s)} ago"
    else:
        silent_s = max(now_unix_s - run.path.stat().st_mtime, 0.0)
        since = f"no event yet, folder changed {_rough_duration(silent_s)} ago"
    running, is_certain = is_running(run, silent_s)
    why = "still running" if running else "it was killed"
    why = why if is_certain else "killed or still running"
    failure = failure_of(events)
    newest = max((event for event in (epoch, step) if event), key=lambda event: event.get("step", 0), default={})
    unit, units_per_s = speed_of(newest)
    return RunOverview(
        name=run.name,
        folder=str(run.path),
        state="failed" if failure else "running" if running else "interrupted",
        note=failure or f"no summary: {why} ({since})",
        task=started.get("task"),
        world_size=started.get("world_size"),
        epochs_run=epoch.get("epoch", 0) if started else None,
        epochs=started.get("epochs"),
        validation_accuracy=(epoch.get("validation") or {}).get("accuracy"),
        validation_loss=(epoch.get("validation") or {}).get("loss"),
        unit=unit if newest else None,
        units_per_s=units_per_s,
        train_time_s=newest.get("cumulative_time_s", newest.get("train_time_s")),
    )


def flat_config(path: Path) -> dict[str, str]:
    """The resolved configuration as `table.key` and value; empty before it is written."""
    try:
        content = read_toml(path)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise BadFileError(path, f"it is not valid TOML ({error}); it was changed after it was written") from None
    return {name: str(masked(name, value)) for name, value in flat(content, ".")}


def flat(values: Mapping[str, Any], separator: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a mapping and of those inside it, each with its whole name."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, separator, f"{prefix}{key}{separator}")
        else:
            yield f"{prefix}{key}", value


def last_event(events: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """The last event of that name, or an empty one."""
    return next((event for event in reversed(events) if event["event"] == name), {})


def align(rows: Sequence[Sequence[str]], *, num_text_columns: int) -> list[str]:
    """The rows as lines of aligned columns, text to the left and figures to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < num_text_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _rough_duration(seconds: float) -> str:
    """`35 s`, `12 min`, `3 h`, `2 d`."""
    for unit, unit_s, limit_s in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172800)):
        if seconds < limit_s:
            return f"{int(seconds // unit_s)} {unit}"
    return f"{int(seconds // 86400)} d"
