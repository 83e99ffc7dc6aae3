"""A run that was trained before: its checkpoint, and its task with the settings that its model still needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stormo.config import options, toml
from stormo.config.schema import TrainConfig
from stormo.errors import SettingError
from stormo.tasks.check import check_options, check_task
from stormo.tasks.find import TASKS, find_task
from stormo.tasks.task import Task
from stormo.telemetry.folder import RunFolder
from stormo.telemetry.runs_folder import find_run
from stormo.training.resume import require_few_processes, require_own, run_of_checkpoint
from stormo.training.settings import Settings

if TYPE_CHECKING:
    from stormo.checkpoint.format import Found

# Settings of the run that its model keeps beside the options of its task; batch, optimizer and workers it does not.
_KEPT = frozenset(
    (
        *("seed", "deterministic", "precision", "channels_last", "autotune"),
        *("loader", "loader_workers", "validation_batch_size"),
    )
)


def split_task_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments without those of the task (`--task.width 8`), which are known once the run is found, and these."""
    own, of_task = list[str](), list[str]()
    takes_value = False
    for argument in arguments:
        is_flag = argument.startswith(("--task.", "--no-task."))
        is_value = takes_value and not argument.startswith("--")
        (of_task if is_flag or is_value else own).append(argument)
        takes_value = argument.startswith("--task.") and "=" not in argument
    return own, of_task


def run_of(source: str, runs_folder: Path) -> RunFolder:
    """The run that is named, or whose checkpoint is."""
    path = Path(source)
    if (path / "manifest.json").is_file():
        return run_of_checkpoint(path, f"checkpoint {path} was named")
    return find_run(runs_folder, source)


def read_run(
    run: RunFolder, program: str, given: Mapping[str, Any], task_flags: Sequence[str]
) -> tuple[TrainConfig, type[Task]]:
    """The run's task, and the settings that its model needs; what is given now wins."""
    source = str(run.config)
    document = toml.read_toml(run.config, f"{run.config} is of the run {run.name}")
    name = document.get("task")
    instead = "look at it, and copy the run to a folder of yours"
    require_own(run, name, is_built_in=name in TASKS, wish="used", instead=instead)
    task_class = find_task(name if isinstance(name, str) else TrainConfig.task)
    check_options(task_class)
    check_task(task_class)
    declared = options.train_options(task_class.Options)
    of_task = [option for option in declared if option.section == "task"]
    title = f"Task {task_class.name}"
    now = dict(given) | options.parse_flags(program, task_flags, of_task, title)
    toml.require_secrets(document, now, source)
    before = toml.settings_from_toml(document, declared, source)
    require_few_processes(before, now)
    kept = {key: value for key, value in before.items() if key in _KEPT or key.startswith("task.") or key == "task"}
    return Settings(values=kept | now, of_task={}, given=sorted(now)).config(task_class.Options), task_class


def find_checkpoint(source: str, runs_folder: Path, *, is_best: bool, step: int | None) -> tuple[str, Path]:
    """The checkpoint that was asked for, and a name for it."""
    from stormo.checkpoint import find

    path = Path(source)
    if (path / "manifest.json").is_file():
        if is_best or step is not None:
            option = "--best" if is_best else f"--step {step}"
            raise SettingError(
                f"{option} was set", f"{path} is one checkpoint", "leave it out, or name the run instead"
            )
        return _name_of(path.resolve().parent), path
    if find(path):  # a folder of checkpoints, such as a script's own
        name, folder = _name_of(path.resolve()), path
    else:
        run = find_run(runs_folder, source)
        name, folder = run.name, run.checkpoints
    found = find(folder)
    if not found:
        raise SettingError(f"the weights of run {name} were asked for", "it has no checkpoint yet", "train it first")
    if step is None:
        return name, _best(name, found) if is_best else found[0].path
    for one in found:
        if one.step == step:
            return name, one.path
    steps = ", ".join(str(one.step) for one in reversed(found))
    raise SettingError(f"--step {step} was set", f"{name} has no such checkpoint", f"choose one of: {steps}")


def _name_of(folder: Path) -> str:
    """The run that a folder of checkpoints belongs to, or its own name."""
    return (folder.parent if folder.name == "checkpoints" else folder).name


def _best(name: str, found: Sequence[Found]) -> Path:
    from stormo.checkpoint import CorruptCheckpointError, read_manifest

    ranked = []
    for one in found:
        try:
            metric = read_manifest(one.path).metric
        except CorruptCheckpointError:
            continue  # it cannot be used either
        if metric is not None:
            ranked.append((metric, one.step, one.path))
    if not ranked:
        raise SettingError(
            f"the best checkpoint of {name} was asked for", "none was saved with a validation", "take the newest"
        )
    return max(ranked)[2]
