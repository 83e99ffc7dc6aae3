"""Which run goes on: the one that was named, the newest, or the one that an earlier round of this launch has begun."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from stormo.errors import EXIT_DIVERGED, SettingError, StormoError
from stormo.launch.environments.torchrun import launch_id
from stormo.system.files import is_own
from stormo.telemetry.folder import RunFolder, read_environment, read_summary
from stormo.telemetry.runs_folder import find_run, launched_run, list_runs


def run_to_resume(flags: dict[str, Any]) -> RunFolder | None:
    """The run to go on with; None for a new one, also where `--run-name NAME --resume` finds that NAME never began."""
    folder, named = Path(flags.get("runs_folder", "runs")), flags.get("resume")
    if named is None:
        return _restarted_run(folder, flags.get("run_name"))
    if named:
        path = Path(named)
        if (path / "manifest.json").is_file():
            return _run_of_checkpoint(path)
        return find_run(folder, named)
    if "run_name" in flags:
        run = RunFolder(folder / flags["run_name"])
        return run if run.config.is_file() else None
    runs = list_runs(folder)
    if not runs:
        raise SettingError("--resume was set", f"there is no run in {folder}", "name one with --resume RUN")
    return runs[0]


def require_own(run: RunFolder, task: Any, *, is_built_in: bool) -> None:
    """Refuse to import the task that a run names itself where another account could have named it."""
    owners = {str(run.path): run.path, str(run.config): run.config}
    path = Path(str(task).partition(":")[0])
    if path.suffix == ".py" and path.is_file() and path.stat().st_uid != 0:
        owners[f"its task {path}"] = path
    foreign = next((name for name, path in owners.items() if not is_own(path)), None)
    if foreign is not None and not is_built_in:
        raise SettingError(
            f"run {run.name} was to go on",
            f"{foreign} belongs to another account, and the task that its config.toml names would be run as yours",
            "look at it, and name the task: stormo train TASK --resume RUN",
        )


def _restarted_run(folder: Path, name: str | None) -> RunFolder | None:
    """The run that an earlier round of this very torchrun has begun; it need not be told to go on with it."""
    own = launch_id(os.environ)
    if own is None:
        return None
    # Every rank looks here: one file is read, however many runs there are.
    run = launched_run(folder, own) if name is None else RunFolder(folder / name)
    if run is None or not run.config.is_file() or own not in ((read_environment(run) or {}).get("launches") or ()):
        return None
    ended = (read_summary(run) or {}).get("stopped_by")
    if ended == "divergence":
        error = StormoError(f"run {run.name} has diverged, and would again if torchrun restarted it.")
        error.exit_code = EXIT_DIVERGED
        raise error
    return None if ended in ("target", "epochs") else run


def _run_of_checkpoint(path: Path) -> RunFolder:
    run = RunFolder(path.resolve().parent.parent)  # <run>/checkpoints/<step>
    if not run.config.is_file():
        raise SettingError(
            f"--resume {path} was set",
            f"that checkpoint lies in no run: there is no {run.config}",
            "put it back into the checkpoints folder of its run",
        )
    return run
