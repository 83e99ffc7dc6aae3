"""Which runs there are: by name, by path, by age and by the torchrun that has begun them; and the name of a new one."""

from __future__ import annotations

import difflib
import hashlib
import os
import time
from pathlib import Path

from stormo.errors import SettingError, suggestion, unknown_name
from stormo.system.files import BadFileError, private_folder, read_lines, read_object
from stormo.telemetry.events import parse_event
from stormo.telemetry.files import write_json
from stormo.telemetry.folder import RunFolder

_MOST_BYTES = 4096  # of the note of a launch
_MOST_NAMED = 5  # of the runs, to somebody who has misspelt one


def list_runs(folder: Path) -> list[RunFolder]:
    """The runs directly in a folder, the one started last first."""
    if not folder.is_dir():
        return []
    runs = [run for entry in folder.iterdir() if entry.is_dir() and (run := RunFolder(entry)).is_run]
    return sorted(runs, key=lambda run: (_start_unix_s(run), run.name), reverse=True)


def note_launch(folder: Path, launch: str, name: str) -> None:
    """Note which run a torchrun has begun, so that none of its ranks looks through all runs for it."""
    file = _launch_file(folder, launch)
    private_folder(file.parent)
    write_json(file, {"launch": launch, "run": name})


def forget_launch(folder: Path, launch: str) -> None:
    """Forget it: the run has come to its end."""
    _launch_file(folder, launch).unlink(missing_ok=True)


def launched_run(folder: Path, launch: str) -> RunFolder | None:
    """The run that a torchrun has begun; None where there is none."""
    try:
        said = read_object(_launch_file(folder, launch), max_bytes=_MOST_BYTES)
    except (BadFileError, FileNotFoundError):
        return None
    name = said.get("run") if said.get("launch") == launch else None
    return RunFolder(folder / name) if isinstance(name, str) and Path(name).name == name else None


def _launch_file(folder: Path, launch: str) -> Path:
    """A file of this user's own folder: accounts of a group may share the folder of their runs."""
    return folder / f".launches-{os.geteuid()}" / f"{hashlib.sha256(launch.encode()).hexdigest()[:32]}.json"


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
            "squeue --me shows its job",
        )
    runs = list_runs(folder)
    if not runs:
        raise SettingError(
            f"run {name_or_path!r} was asked for",
            f"there is no run in {folder}",
            "name the folder that holds your runs",
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
    """When the run first started; the folder's own time stands in until its first event is written."""
    try:
        first = next((parse_event(line) for line in read_lines(run.events)), None)
    except (BadFileError, FileNotFoundError, ValueError):
        first = None  # what is wrong with it is said where it is read
    if first is not None and isinstance(first.get("time_unix_s"), int | float):
        return float(first["time_unix_s"])
    return run.path.stat().st_mtime
