"""Resuming a run: which one, which of its settings stay, and which may change.

A change is refused if the saved state would not fit, or if it makes another run. A change that affects the weights is
taken, and shown in the plan's line `changed`. All other settings may change silently; a test lists them, so that a new
setting needs a decision.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stormo.config import options, precedence, toml
from stormo.config.link import Link
from stormo.config.schema import EFFECTIVE, OPTIMIZER_DEFAULTS, Change, ResolvedBatch
from stormo.config.strategies import SPECS, names
from stormo.errors import EXIT_DIVERGED, SettingError, StormoError
from stormo.launch.environments.torchrun import launch_id
from stormo.system.files import MASK, is_own
from stormo.system.hardware import visible_gpus, visible_slices
from stormo.telemetry.folder import RunFolder, read_environment, read_summary
from stormo.telemetry.runs_folder import find_run, launched_run, list_runs

# Settings that cannot change, each with the reason.
REFUSED = {
    "task": "another task is another run",
    "run_name": "a run is found by it",
    "runs_folder": "a run is found in it",
    "seed": "the order of all samples follows from it",
    "optimizer": "no other optimizer can restore the state that is saved",
    "grad_averaging": "the momentum that is saved is a mean with it and a sum without",
    "freeze": "the state that is saved is that of the parameters that were trained",
    "init_from": "a resume takes the weights of its checkpoint",
    "grow_batch": "the steps that are done follow from it",
    "epoch_samples": "the position in the stream is counted in it",
}
# Settings that may change but are shown, as they affect the weights.
SHOWN = frozenset(
    (
        # batch
        *("batch_size", "global_batch_size", "accumulate", "ghost_batch_size", "max_batch_size", "on_resize"),
        *("sync_batch_norm", "micro_batches"),  # over which samples batch norm takes its statistics
        # learning rate
        *("base_lr", "base_batch_size", "lr_rule", "warmup_epochs", "warmup_from"),
        *("decay", "decay_every", "decay_factor", "decay_share", "epochs"),  # a decay ends with the last epoch
        # step
        *("momentum", "beta2", "eps", "trust_coefficient", "nesterov", "weight_decay", "clip_norm", "ema"),
        *("ns_steps", "adjust_lr", "adamw_lr"),
        *("gradient_noise_batch", "gradient_noise", "gradient_noise_decay"),
        *("average_every", "outer_lr", "outer_momentum"),
        *("staleness", "compress", "compress_rank"),
        # arithmetic
        *("precision", "deterministic"),
        # on divergence
        *("on_divergence", "rollback_factor", "max_rollbacks"),
    )
)
_FREE_TASK_OPTIONS = frozenset(("data_folder",))  # other data is noticed by the task's facts
_INEXACT = names(lambda row: row.local_updates)  # strategies that do not compute what one process would
_STRATEGY_KEYS = ("strategy", "servers", "staleness", "mesh", "zero")
_REPLICATED = names(lambda row: row.takes_compression) | {"auto"}  # strategies that take --compress
_COMPRESSION_KEYS = ("compress", "compress_rank")
_LOCATION_KEYS = ("run_name", "runs_folder", "resume")  # which run it is
_MAX_PROCESSES = 64


def read_resumed_run(in_file: Mapping[str, Any], flags: Mapping[str, Any]) -> ResumedRun | None:
    """The run that a command line and its file name, with its config.toml; None for a new run."""
    of_run = in_file.get("run")
    located = of_run if isinstance(of_run, dict) else {}
    # Other types, and `resume` in a file, are refused with the file's other settings.
    located = {key: located[key] for key in ("run_name", "runs_folder") if isinstance(located.get(key), str)}
    folder = run_to_resume(located | dict(flags))
    if folder is None:
        return None
    document = toml.read_toml(folder.config, f"{folder.config} is of the run to resume")
    workers = document.setdefault("workers", {})
    if not isinstance(workers, dict):  # refused with the file's other settings
        return ResumedRun(folder=folder, document=document, workers={})
    document["workers"] = _kept_workers(workers, in_file.get("workers"), flags)
    return ResumedRun(folder=folder, document=document, workers=workers)


@dataclass(frozen=True, kw_only=True)
class ResumedRun:
    """A run to resume."""

    folder: RunFolder
    document: Mapping[str, Any]  # its config.toml, with those settings of its workers that a resume keeps
    workers: Mapping[str, Any]  # all settings of its workers

    def merge(
        self, given: dict[str, Any], defaults: Sequence[options.Option]
    ) -> tuple[dict[str, Any], tuple[Change, ...]]:
        """The settings that the run keeps beside those given now, and the changes to show; a refused change raises."""
        source = str(self.folder.config)
        _require_task(given.get("task"), self.document.get("task"), self.folder)
        toml.require_secrets(self.document, given, source)
        # The file holds every value in force, the task's defaults of that day too; what is missing was not set.
        before = toml.settings_from_toml(self.document, defaults, source)
        before |= {key: given[key] for key, value in before.items() if value == MASK and key in given}
        require_few_processes(before, given)
        kept = precedence.drop_incompatible(before, given)
        gone = dict.fromkeys(key for key in before if key not in kept) | self._lost_with_strategy(before | given)
        keys = ("strategy", "staleness", *_COMPRESSION_KEYS)  # also where the resume does not keep them
        of_workers = {key: self.workers[key] for key in keys if key in self.workers}
        return kept, changes(given | gone, of_workers | before, defaults, self.folder)

    def _lost_with_strategy(self, now: Mapping[str, Any]) -> dict[str, Any]:
        """Settings that affect the weights and end with the run's strategy, with their new values."""
        off = {"compress": "none", "staleness": 0}
        return {key: value for key, value in off.items() if key not in now and self.workers.get(key, value) != value}

    def effective(self) -> ResolvedBatch:
        """The effective values with which the run began."""
        try:
            began = ResolvedBatch(**self.document[EFFECTIVE])
            if began.link is not None:
                Link.read(began.link)
            return began
        except (KeyError, TypeError, ValueError):
            raise SettingError(
                f"run {self.folder.name} was to be resumed",
                f"{self.folder.config} has no valid section [{EFFECTIVE}]",
                "restore that file, or start a new run",
            ) from None

    def location(self) -> dict[str, str]:
        """The name and the folder of the run, even if the user named it by a link or a dot."""
        path = self.folder.path if self.folder.path.name == self.folder.name else self.folder.path.resolve()
        return {"run_name": self.folder.name, "runs_folder": str(path.parent)}


def run_to_resume(flags: Mapping[str, Any]) -> RunFolder | None:
    """The run to resume: named, the newest, or begun by this torchrun; None for a new one.

    `--run-name NAME --resume` starts a new run if NAME never began.
    """
    folder, named = Path(flags.get("runs_folder", "runs")), flags.get("resume")
    if named is None:
        return _restarted_run(folder, flags.get("run_name"))
    if named:
        path = Path(named)
        if (path / "manifest.json").is_file():
            return run_of_checkpoint(path, f"--resume {path} was set")
        return find_run(folder, named)
    if "run_name" in flags:
        run = RunFolder(folder / flags["run_name"])
        return run if run.config.is_file() else None
    runs = list_runs(folder)
    if not runs:
        raise SettingError("--resume was set", f"there is no run in {folder}", "name one with --resume RUN")
    return runs[0]


def require_own(
    run: RunFolder,
    task: Any,
    *,
    is_built_in: bool,
    wish: str = "resumed",
    instead: str = "look at it, and name the task: stormo train TASK --resume RUN",
) -> None:
    """Refuse to import the task that a run's file names where another account could have written it."""
    owners = {str(run.path): run.path, str(run.config): run.config}
    path = Path(str(task).partition(":")[0])
    if path.suffix == ".py" and path.is_file() and path.stat().st_uid != 0:
        owners[f"its task {path}"] = path
    foreign = next((name for name, path in owners.items() if not is_own(path)), None)
    if foreign is not None and not is_built_in:
        raise SettingError(
            f"run {run.name} was to be {wish}",
            f"{foreign} belongs to another account, and the task that its config.toml names would be run as yours",
            instead,
        )


def _restarted_run(folder: Path, name: str | None) -> RunFolder | None:
    """The run that an earlier round of this torchrun has begun; it resumes without --resume."""
    own = launch_id(os.environ)
    if own is None:
        return None
    # Every rank does this: it reads one file, however many runs there are.
    run = launched_run(folder, own) if name is None else RunFolder(folder / name)
    if run is None or not run.config.is_file() or own not in ((read_environment(run) or {}).get("launches") or ()):
        return None
    ended = (read_summary(run) or {}).get("stopped_by")
    if ended == "divergence":
        error = StormoError(f"run {run.name} has diverged, and would again if torchrun restarted it.")
        error.exit_code = EXIT_DIVERGED
        raise error
    return None if ended in ("target", "epochs") else run


def run_of_checkpoint(path: Path, what: str) -> RunFolder:
    """The run that a checkpoint lies in; `what` was set if there is none."""
    run = RunFolder(path.resolve().parent.parent)  # <run>/checkpoints/<step>
    if not run.config.is_file():
        raise SettingError(
            what,
            f"that checkpoint lies in no run: there is no {run.config}",
            "put it back into the checkpoints folder of its run",
        )
    return run


def _kept_workers(before: Mapping[str, Any], in_file: Any, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the workers that a resume keeps: the strategy, unless it changes now, but not the devices."""
    kept = {}
    # CPU processes were asked for. Slices first: a rank that starts CUDA now would not get its own.
    if "num_gpus" in before and not (visible_slices() or visible_gpus()):
        kept["num_gpus"] = before["num_gpus"]
    # A link that is measured now would change the last bits; a worker that was not bound had a reason.
    kept |= {key: False for key in ("tune_link", "bind") if before.get(key) is False}
    set_now = precedence.drop_overridden(in_file if isinstance(in_file, dict) else {}, flags) | dict(flags)
    strategy = before.get("strategy")
    is_kept = "mesh" in before or (strategy in SPECS and SPECS[strategy].is_kept_on_resume)
    is_same = "strategy" not in set_now or set_now["strategy"] == strategy != "auto"
    if is_same and "mesh" not in set_now and is_kept:
        kept |= {key: before[key] for key in _STRATEGY_KEYS if key in before and key not in set_now}
    if _is_replicated(set_now.get("strategy", strategy or "auto"), set_now.get("mesh")):
        kept |= {key: before[key] for key in _COMPRESSION_KEYS if key in before and key not in set_now}
    return kept


def _is_replicated(strategy: Any, mesh: Any) -> bool:
    if mesh is None:
        return strategy in _REPLICATED
    return isinstance(mesh, str) and {part.partition("=")[0].strip() for part in mesh.split(",")} == {"replicate"}


def require_few_processes(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse a number of processes in a run's file that is too large for this machine."""
    limit = max(_MAX_PROCESSES, 2 * len(os.sched_getaffinity(0)))
    for key in ("num_gpus", "loader_workers"):
        number = before.get(key)
        if key not in now and isinstance(number, int) and number > limit:
            flag = f"--{key.replace('_', '-')}"
            raise SettingError(
                f"{key} = {number} was set in the config.toml of the run",
                f"more than {limit} processes are not started because a file says so",
                f"set {flag}",
            )


def changes(
    now: Mapping[str, Any], before: Mapping[str, Any], defaults: Iterable[options.Option], run: RunFolder
) -> tuple[Change, ...]:
    """The settings given now that differ from those of the run and must be shown; refuses what cannot change."""
    _check_location(now, run)
    was = {option.key: option.default for option in defaults} | dict(before)
    was |= {key: value for key, value in OPTIMIZER_DEFAULTS[was["optimizer"]].items() if was[key] is None}
    if "global_batch_size" in before and was["batch_size"] != "auto":
        # Only one of the two is ever set; if both are given now, the global batch counts.
        was["batch_size"] = now.get("batch_size") if "global_batch_size" in now else None
    found = [Change(key=key, before=was.get(key), now=value) for key, value in now.items() if key not in _LOCATION_KEYS]
    found = [change for change in found if not _is_same(change)]
    for change in found:
        why = _refusal(change)
        if why is not None:
            raise _refused(change, why, run)
    ends_others = any(change.key in ("staleness", "compress") for change in found)
    return tuple(change for change in found if change.key in SHOWN or _is_other_algorithm(change, was, ends_others))


def _require_task(now: str | None, before: Any, run: RunFolder) -> None:
    """Refuse another task than the run's, before the options of the task are read."""
    change = Change(key="task", before=before, now=now)
    if now is not None and isinstance(before, str) and not _is_same(change):
        raise _refused(change, REFUSED["task"], run)


def _is_other_algorithm(change: Change, was: Mapping[str, Any], ends_others: bool) -> bool:
    """Whether it begins or ends a strategy that does not compute what one process would."""
    if change.key not in ("strategy", "mesh"):
        return False
    return was["strategy"] in _INEXACT or ends_others or change.now in _INEXACT


def _is_same(change: Change) -> bool:
    if change.key != "task" or change.before is None:
        return bool(change.before == change.now)
    return _file_of(change.before) == _file_of(change.now)


def _file_of(task: str) -> str:
    """A task with the absolute path of its file, so that one file has one name."""
    path, colon, name = task.partition(":")
    return f"{Path(path).resolve()}{colon}{name}" if path.endswith(".py") else task


def _refusal(change: Change) -> str | None:
    """Why a run cannot resume with that, or None."""
    if change.key.startswith("task."):
        is_free = change.key.removeprefix("task.") in _FREE_TASK_OPTIONS
        return None if is_free else "a task with another option is another run"
    if change.key == "precision" and "fp64" in (change.before, change.now):
        return "fp64 gives the weights another type"
    return REFUSED.get(change.key)


def _refused(change: Change, why: str, run: RunFolder) -> SettingError:
    origin = "without it" if change.before is None else f"with {_with_flag(change.key, change.before)}"
    return SettingError(
        f"{_with_flag(change.key, change.now)} was set with --resume",
        f"run {run.name} was started {origin}, and {why}",
        "leave it out, or start a new run",
    )


def _with_flag(key: str, value: Any) -> str:
    if key == "task":
        return f"task {value}"
    flag = key.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value}"


def _check_location(now: Mapping[str, Any], run: RunFolder) -> None:
    """Refuse another name or folder than those of the run."""
    if now.get("run_name", run.name) != run.name:
        raise SettingError(
            f"--run-name {now['run_name']} was set with --resume",
            f"the run to resume is {run.name}",
            "leave one of them out",
        )
    folder = now.get("runs_folder")
    if folder is not None and Path(folder).resolve() not in (run.path.parent.resolve(), run.path.resolve().parent):
        raise SettingError(
            f"--runs-folder {folder} was set with --resume",
            f"the run to resume lies in {os.path.relpath(run.path.resolve().parent)}",
            "leave one of them out",
        )
