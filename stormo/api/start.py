"""`stormo.train` and `stormo.run`: the commands of these names as functions, for scripts and notebooks."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from stormo.api.process import given_settings, refuse_in_worker, run_command
from stormo.api.run import CELL_FILE, Run
from stormo.api.source import Source, find_source, is_plain
from stormo.config.options import as_flags
from stormo.config.plan.checks import check_run_name
from stormo.config.schema import Run as RunSection
from stormo.config.schema import TrainConfig
from stormo.config.toml import read_toml
from stormo.errors import SettingError
from stormo.tasks.find import TASKS, check_file_name
from stormo.tasks.task import Task
from stormo.telemetry.runs_folder import new_run_folder

if TYPE_CHECKING:
    from stormo.api.keywords import TrainSettings

NOT_KEYWORDS = {
    "resume": "call stormo.open_run(NAME).resume()",
    "dry_run": "type stormo train --dry-run",
    "plot_schedule": "type stormo train --dry-run --plot-schedule",
    "print_commands": "type stormo train --print-commands",
    "num_nodes": "set launcher and hosts, or start stormo train on every node",
    "node_id": "set launcher and hosts, or start stormo train on every node",
}


def train(task: str | Task | type[Task] | None = None, **settings: Unpack[TrainSettings]) -> Run:
    """Train a task as `stormo train` does, in processes of its own, and return the run.

    Args:
        task: a name, file or module:Class as on the command line; a subclass of stormo.Task, or an object of it, whose
            options are used. The class may be of a module, of the script that runs, or of a notebook cell.
        settings: the flags of `stormo train`, with underscores; None leaves the choice to stormo.

    Raises:
        SettingError: a setting cannot hold.
        RunFailedError: a worker failed; the text begins with the cause.
        KeyboardInterrupt: Ctrl-C or the stop button; the run has saved its work and can be resumed.
    """
    refuse_in_worker("stormo.train()")
    given = given_settings(settings)
    for key in NOT_KEYWORDS.keys() & given.keys():
        raise SettingError(
            f"{key} was set", "stormo.train() starts the workers of one new run from here", NOT_KEYWORDS[key]
        )
    if task is None and "config" not in given:
        what, why = "stormo.train() was given no task", "there is nothing to train"
        raise SettingError(what, why, 'give a subclass of stormo.Task or a name, such as "fashion-mnist"')
    source = None if task is None or isinstance(task, str) else _source_of(task)
    name = task if isinstance(task, str) else source.name if source else TrainConfig.task
    in_file = read_toml(Path(given["config"])).get("run") if "config" in given else None
    in_file = in_file if isinstance(in_file, dict) else {}  # the command refuses all else, and other types
    texts = {key: value for key, value in in_file.items() if isinstance(value, str)} | given
    parent = Path(texts.get("runs_folder") or RunSection.runs_folder)
    if "run_name" in texts:
        check_run_name(texts["run_name"])
    folder = new_run_folder(parent, texts.get("run_name"), name)
    given |= {"run_name": folder.name, "runs_folder": str(parent)}
    try:
        given |= _own_options(task) if isinstance(task, Task) else {}
        target = [task] if isinstance(task, str) else [_target(source, folder.path)] if source else []
        run_command("train", [*target, *as_flags(given)])
    finally:
        if not folder.is_run:  # it never began
            (folder.path / CELL_FILE).unlink(missing_ok=True)
            shutil.rmtree(folder.path / "__pycache__", ignore_errors=True)  # of that file
            with contextlib.suppress(OSError):
                folder.path.rmdir()
    return Run(folder)


def run(
    function: Callable[..., Any],
    *arguments: Any,
    num_gpus: int | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    backend: Literal["auto", "nccl", "gloo"] = "auto",
    timeout: float | None = None,
) -> None:
    """Call a function that uses stormo.World once in every worker, as `stormo run` does with a script.

    The function may be of a module, of the script that runs, or of a notebook cell. Its arguments are plain values:
    numbers, text, and lists, tuples and dicts of them. What it returns is dropped: save it, or print it.
    """
    refuse_in_worker("stormo.run()")
    if not callable(function) or not hasattr(function, "__qualname__"):
        raise SettingError(
            f"a {type(function).__name__} was given to stormo.run()",
            "workers find a function by its name, and this has none",
            "give a function, and its arguments behind it: stormo.run(function, 3)",
        )
    for argument in arguments:
        if not is_plain(argument):
            raise SettingError(
                f"a {type(argument).__name__} was given to {function.__name__}()",
                "the arguments of stormo.run() go to other processes as text",
                "give numbers, text, and lists, tuples and dicts of them, and make the rest in the function",
            )
    source = find_source(function)
    call = f"{source.name}({', '.join(map(repr, arguments))})"
    settings = given_settings({"num_gpus": num_gpus, "device": device, "backend": backend, "timeout": timeout})
    with tempfile.TemporaryDirectory(prefix="stormo-") as folder:
        script = Path(folder, "stormo_cell.py")
        text = f'{_import_of(source)}\n\nif __name__ == "__main__":\n    {call}\n'
        script.write_text(text, encoding="utf-8")
        run_command("run", [str(script), *as_flags(settings)])


def _source_of(task: Task | type[Task]) -> Source:
    task_class = task if isinstance(task, type) else type(task)
    if not issubclass(task_class, Task):
        what = f"a {task_class.__name__} was given to stormo.train()"
        raise SettingError(what, "it is no stormo.Task", "give the name of a task, a subclass of Task or its object")
    return find_source(task_class)


def _target(source: Source, folder: Path) -> str:
    """The task as the command line names it; the code of cells is written into the run's folder."""
    place = source.place
    if place is None:
        place = str((folder / CELL_FILE).resolve())
        Path(place).write_text(source.text, encoding="utf-8")
    target = f"{place}:{source.name}"
    return next((name for name, built_in in TASKS.items() if built_in == target), target)


def _own_options(task: Task) -> Mapping[str, Any]:
    """The options of a task that differ from its defaults, as flags."""
    usual, found = type(task).Options(), {}
    for field in dataclasses.fields(usual):
        value = getattr(task.options, field.name)
        if value != getattr(usual, field.name):
            found[f"task.{field.name}"] = value
            if value is None:
                what, why = f"option {field.name} was set to None", "no flag of the workers can say so"
                raise SettingError(what, why, "make None its default")
    return found


def _import_of(source: Source) -> str:
    if source.place is None:
        return source.text
    path = Path(source.place)
    if path.suffix != ".py":
        return f"from {source.place} import {source.name}"
    check_file_name(path)
    return (
        f"import sys\nfrom importlib import import_module\n\nsys.path.insert(0, {str(path.parent)!r})\n"
        f"{source.name} = import_module({path.stem!r}).{source.name}"
    )
