"""Finds a task by name (`fashion-mnist`), by file (`my_task.py`) or by import path (`package.module:Class`)."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from stormo.errors import SettingError, unknown_name
from stormo.tasks.task import Task

TASKS = {"fashion-mnist": "stormo.tasks.fashion_mnist:FashionMnist"}


def find_task(name: str) -> type[Task]:
    """The task class a user named; its module is imported."""
    target = TASKS.get(name, name)
    if target.partition(":")[0].endswith(".py"):
        path, _, wanted = target.partition(":")
        return _class_in(_import_file(Path(path)), wanted, name)
    if ":" in target or "." in target:
        module_name, _, wanted = target.partition(":")
        return _class_in(_import_module(module_name, name), wanted, name)
    raise unknown_name("task", name, [*TASKS, "FILE.py", "package.module:Class"])


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise SettingError(f"the task {path} was named", "there is no such file", "check the path")
    if path.stem in sys.stdlib_module_names or path.stem in ("torch", "numpy", "stormo"):
        raise SettingError(
            f"the task {path} was named", f"{path.stem} is also the name of a module it would hide", "rename the file"
        )
    # The file's own folder first, as `python FILE` would: a task may import its neighbours.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _import_module(module_name: str, name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except (TypeError, ValueError):  # "..", ":Class"
        raise unknown_name("task", name, [*TASKS, "FILE.py", "package.module:Class"]) from None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the task was found; something it imports was not
        raise SettingError(
            f"the task {name} was named", f"no module {error.name} can be imported", "check the name and the folder"
        ) from None


def _class_in(module: ModuleType, wanted: str, name: str) -> type[Task]:
    tasks = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Task) and value.__module__ == module.__name__
    }
    if wanted:
        if wanted not in tasks:
            raise unknown_name(f"task class of {module.__name__}", wanted, tasks)
        return tasks[wanted]
    if len(tasks) != 1:
        found = f"it defines {len(tasks)} task classes" + (f" ({', '.join(sorted(tasks))})" if tasks else "")
        raise SettingError(f"the task {name} was named", found, f"name one as {name}:Class, a subclass of stormo.Task")
    return next(iter(tasks.values()))
