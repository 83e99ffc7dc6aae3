"""Finds a task by name (`fashion-mnist`), by file (`my_task.py`) or by import path (`package.module:Class`)."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType

from stormo.errors import SettingError, StormoError, unknown_name
from stormo.tasks.task import Task

_PACKAGE = str(Path(__file__).parents[1])
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
TASKS = {
    "fashion-mnist": "stormo.tasks.fashion_mnist:FashionMnist",
    "language-model": "stormo.tasks.language_model:LanguageModel",
}


def find_task(name: str) -> type[Task]:
    """The task class that the user named; its module is imported."""
    target = TASKS.get(name, name)
    if target.partition(":")[0].endswith(".py"):
        path, _, wanted = target.partition(":")
        return _class_in(_import_file(Path(path)), wanted, name)
    if ":" in target or "." in target:
        module_name, _, wanted = target.partition(":")
        return _class_in(_import_module(module_name, name, is_built_in=name in TASKS), wanted, name)
    beside = [f"{name}.py"] if Path(f"{name}.py").is_file() else []
    raise unknown_name("task", name, [*TASKS, *beside, "FILE.py", "package.module:Class"])


def check_module(name: str, said: str) -> None:
    """Refuse a file that is no Python file, and a part of a module that has none, before anything is imported."""
    top, dot, _ = name.partition(".")
    instead = f"name {top}.py" if Path(f"{top}.py").is_file() else "name a file that ends in .py, or a module"
    if Path(name).is_file():
        raise SettingError(said, "it is no Python file", instead)
    if dot and Path(f"{top}.py").is_file() and not Path(top).is_dir():
        raise SettingError(said, f"{top} is a module that holds no others", instead)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise SettingError(f"the task {path} was named", "there is no such file", "check the path")
    check_file_name(path)
    _refuse_script(path)
    # The file's own folder first, as `python FILE` would: a task may import its neighbours.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _import_failure(error, str(path)) from error
    return module


def _refuse_script(path: Path) -> None:
    """Refuse a script with its own training loop before an import would run it."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError):
        return  # raised when it is imported
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {alias.name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
    names |= {(node.module or "").partition(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)}
    if {"stormo", "World"} <= names and "Task" not in names:
        raise SettingError(
            f"the task {path} was named",
            "it is a script that uses stormo.World and holds no stormo.Task",
            f"run it by stormo run {path}",
        )


def check_file_name(path: Path) -> None:
    """Refuse a file whose name hides a module that others import."""
    if path.stem in sys.stdlib_module_names or path.stem in ("torch", "numpy", "stormo"):
        raise SettingError(
            f"the task {path} was named", f"{path.stem} is also the name of a module it would hide", "rename the file"
        )


def _import_failure(error: Exception | SystemExit, name: str) -> StormoError:
    """What went wrong in a user's module, followed by the user's own lines of the traceback."""
    if isinstance(error, StormoError):
        return error
    trimmed = traceback.TracebackException.from_exception(error)
    own = [frame for frame in trimmed.stack if not frame.filename.startswith(("<frozen importlib", _PACKAGE))]
    said, last = f"the task {name} was named", own[-1] if own else None
    if isinstance(error, SystemExit):
        last = next((frame for frame in reversed(own) if not frame.filename.startswith(_INSTALLED)), last)
        return SettingError(
            said,
            f"{_location(last)} ends the process when it is imported",
            'put what only a script does under if __name__ == "__main__":',
        )
    trimmed.stack = traceback.StackSummary.from_list(own)
    trimmed.__cause__, trimmed.__context__ = None, None
    where, text = _location(last), next(iter(str(error).splitlines()), "")
    if isinstance(error, SyntaxError) and error.filename:
        where, text = f"line {error.lineno} of {Path(error.filename).name}", error.msg
    failed = SettingError(
        said,
        f"{where} raised {type(error).__name__}{f': {text}' if text else ''}",
        "install that package, or set PYTHONPATH to its folder"
        if isinstance(error, ModuleNotFoundError)
        else "fix that line",
    )
    failed.args = (f"{failed}\n{''.join(trimmed.format()).rstrip()}",)
    return failed


def _location(frame: traceback.FrameSummary | None) -> str:
    return f"line {frame.lineno} of {Path(frame.filename).name}" if frame else "its import"


def _import_module(module_name: str, name: str, *, is_built_in: bool) -> ModuleType:
    check_module(module_name, f"the task {name} was named")
    here = str(Path.cwd())
    if here not in sys.path and not is_built_in:  # built-in tasks need nothing from the current folder
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        if isinstance(error, TypeError | ValueError) and module_name[:1] in ("", "."):  # "..", ":Class"
            raise unknown_name("task", name, [*TASKS, "FILE.py", "package.module:Class"]) from None
        if (
            not isinstance(error, ModuleNotFoundError)
            or error.name is None
            or not f"{module_name}.".startswith(f"{error.name}.")
        ):
            raise _import_failure(error, name) from error  # the task was found; something in it fails
        raise SettingError(
            f"the task {name} was named", f"no module {error.name} can be imported", "check the name and the folder"
        ) from None


def _class_in(module: ModuleType, wanted: str, name: str) -> type[Task]:
    tasks = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Task) and value.__module__ == module.__name__
    }
    if not tasks:
        raise SettingError(
            f"the task {name} was named",
            "it defines no subclass of stormo.Task",
            "write class MyTask(stormo.Task) in it; stormo new FILE.py writes an example",
        )
    if wanted and wanted not in tasks:
        raise unknown_name(f"task class of {module.__name__}", wanted, tasks)
    if not wanted and len(set(tasks.values())) > 1:
        found = f"it defines {len(tasks)} task classes ({', '.join(sorted(tasks))})"
        raise SettingError(f"the task {name} was named", found, f"name one as {name}:Class, a subclass of stormo.Task")
    return tasks[wanted or next(iter(tasks))]
