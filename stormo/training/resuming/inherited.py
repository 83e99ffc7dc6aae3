"""What a run that goes on hands on: how its model was spread, and what its settings had come to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from stormo.config.options import left_below
from stormo.config.schema import EFFECTIVE, Effective
from stormo.config.strategies import SPECS
from stormo.errors import SettingError
from stormo.system.hardware import visible_gpus
from stormo.telemetry.folder import RunFolder
from stormo.training.resuming.table import COPIES

SPREAD = ("strategy", "servers", "staleness", "mesh", "zero")
_MOST_PROCESSES = 64
OF_COPIES = ("compress", "compress_rank")


def inherited_workers(before: dict[str, Any], in_file: Any, flags: dict[str, Any]) -> dict[str, Any]:
    """A run goes on with whatever devices are there now, but spread as before unless that is changed now."""
    kept = {}
    if "num_gpus" in before and not visible_gpus():  # CPU processes are what was asked for
        kept["num_gpus"] = before["num_gpus"]
    set_now = left_below(in_file if isinstance(in_file, dict) else {}, flags) | flags
    strategy = before.get("strategy")
    is_kept = "mesh" in before or (strategy in SPECS and SPECS[strategy].is_kept_on_resume)
    is_same = "strategy" not in set_now or set_now["strategy"] == strategy != "auto"
    if is_same and "mesh" not in set_now and is_kept:
        kept |= {key: before[key] for key in SPREAD if key in before and key not in set_now}
    if _makes_copies(set_now.get("strategy", strategy or "auto"), set_now.get("mesh")):
        kept |= {key: before[key] for key in OF_COPIES if key in before and key not in set_now}
    return kept


def _makes_copies(strategy: Any, mesh: Any) -> bool:
    if mesh is None:
        return strategy in COPIES
    return isinstance(mesh, str) and {part.partition("=")[0].strip() for part in mesh.split(",")} == {"replicate"}


def lost_with_strategy(before: dict[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """What the run's workers had that changes the weights and goes with the strategy it had, as it is now."""
    nothing = {"compress": "none", "staleness": 0}
    return {key: value for key, value in nothing.items() if key not in now and before.get(key, value) != value}


def inherited_effect(document: dict[str, Any], run: RunFolder) -> Effective:
    """What the settings of the run had come to when it began."""
    try:
        return Effective(**document[EFFECTIVE])
    except (KeyError, TypeError):
        raise SettingError(
            f"run {run.name} was to go on",
            f"{run.config} has no valid section [{EFFECTIVE}]",
            "restore that file, or start a new run",
        ) from None


def require_few_processes(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse a number of processes that the file of a run asks for and this machine would choke on."""
    most = max(_MOST_PROCESSES, 2 * len(os.sched_getaffinity(0)))
    for key in ("num_gpus", "loader_workers"):
        number = before.get(key)
        if key not in now and isinstance(number, int) and number > most:
            flag = f"--{key.replace('_', '-')}"
            raise SettingError(
                f"{key} = {number} was set in the config.toml of the run",
                f"more than {most} processes are not started because a file says so",
                f"set {flag}",
            )


def place_of(run: RunFolder) -> dict[str, str]:
    """The name and the folder under which a run writes on, also where it was named by a link or by a dot."""
    path = run.path if run.path.name == run.name else run.path.resolve()
    return {"run_name": run.name, "runs_folder": str(path.parent)}
