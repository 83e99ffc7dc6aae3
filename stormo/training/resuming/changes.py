"""The settings that a run is told now and did not have before, held against the table."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stormo.config.options import Option
from stormo.config.schema import OPTIMIZER_DEFAULTS, Change
from stormo.errors import SettingError
from stormo.telemetry.folder import RunFolder
from stormo.training.resuming.table import FREE, FREE_TASK_OPTIONS, OWN_ALGORITHMS, REFUSED, SAID


def changes(
    now: Mapping[str, Any], before: Mapping[str, Any], every: Iterable[Option], run: RunFolder
) -> tuple[Change, ...]:
    """What is to be said of the settings given now; those that the run cannot take are refused.

    Args:
        now: settings given with the resume, by key.
        before: those of the run; what was left to be chosen is not there.
        every: all options, with their defaults.
        run: the one that goes on.
    """
    _check_place(now, run)
    was = {option.key: option.default for option in every} | dict(before)
    was |= {key: value for key, value in OPTIMIZER_DEFAULTS[was["optimizer"]].items() if was[key] is None}
    if "global_batch_size" in before and was["batch_size"] != "auto":
        # Only one of the two is ever set; where both are given now, the batch of all workers is what counts.
        was["batch_size"] = now.get("batch_size") if "global_batch_size" in now else None
    found = [Change(key=key, before=was.get(key), now=value) for key, value in now.items() if key not in _ELSEWHERE]
    found = [change for change in found if not _is_same(change)]
    for change in found:
        why = _refusal(change)
        if why is not None:
            raise _refused(change, why, run)
    ends_others = any(change.key in ("staleness", "compress") for change in found)
    return tuple(change for change in found if change.key in SAID or _is_other_algorithm(change, was, ends_others))


def require_task(now: str | None, before: Any, run: RunFolder) -> None:
    """Refuse another task than the run's; asked before the run's options are read, which its own task alone has."""
    change = Change(key="task", before=before, now=now)
    if now is not None and isinstance(before, str) and not _is_same(change):
        raise _refused(change, REFUSED["task"], run)


def _is_other_algorithm(change: Change, was: Mapping[str, Any], ends_others: bool) -> bool:
    """Whether it ends or begins an algorithm that is not that of one process."""
    if change.key not in ("strategy", "mesh"):
        return False
    return was["strategy"] in OWN_ALGORITHMS or ends_others or change.now in OWN_ALGORITHMS


_ELSEWHERE = ("run_name", "runs_folder", "resume")  # they have led to the run


def _is_same(change: Change) -> bool:
    if change.key != "task" or change.before is None:
        return bool(change.before == change.now)
    return _file_of(change.before) == _file_of(change.now)


def _file_of(task: str) -> str:
    """A task with the path of its file written out, so that one file has one name."""
    path, colon, name = task.partition(":")
    return f"{Path(path).resolve()}{colon}{name}" if path.endswith(".py") else task


def _refusal(change: Change) -> str | None:
    """Why a run cannot go on with that, or None."""
    if change.key.startswith("task."):
        is_free = change.key.removeprefix("task.") in FREE_TASK_OPTIONS
        return None if is_free else "a task with another option is another run"
    if change.key == "precision" and "fp64" in (change.before, change.now):
        return "fp64 gives the weights another type"
    if change.key in REFUSED:
        return REFUSED[change.key]
    assert change.key in SAID | FREE, f"{change.key} has no row in the table of what a resume does"
    return None


def _refused(change: Change, why: str, run: RunFolder) -> SettingError:
    return SettingError(
        f"{_with_flag(change.key, change.now)} was set with --resume",
        f"run {run.name} was started {_origin(change)}, and {why}",
        "leave it out, or start a new run",
    )


def _origin(change: Change) -> str:
    return "without it" if change.before is None else f"with {_with_flag(change.key, change.before)}"


def _with_flag(key: str, value: Any) -> str:
    if key == "task":
        return f"task {value}"
    flag = key.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value}"


def _check_place(now: Mapping[str, Any], run: RunFolder) -> None:
    """Refuse another name or folder than those of the run that was named."""
    if now.get("run_name", run.name) != run.name:
        raise SettingError(
            f"--run-name {now['run_name']} was set with --resume",
            f"the run that goes on is {run.name}",
            "leave one of them out",
        )
    folder = now.get("runs_folder")
    if folder is not None and Path(folder).resolve() not in (run.path.parent.resolve(), run.path.resolve().parent):
        raise SettingError(
            f"--runs-folder {folder} was set with --resume",
            f"the run that goes on lies in {os.path.relpath(run.path.resolve().parent)}",
            "leave one of them out",
        )
