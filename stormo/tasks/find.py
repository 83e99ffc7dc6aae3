"""Finds a task by name (`fashion-mnist`), by file (`my_task.py`) or by import path (`package.module:Class`)."""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TypeGuard

from stormo.errors import SettingError, StormoError, unknown_name
from stormo.tasks.check import looks_like_task
from stormo.tasks.task import Task

_PACKAGE = str(Path(__file__).parents[1])
_STANDARD_LIBRARY = str(Path(ast.__file__).parent)
TASKS = {
    "fashion-mnist": "stormo.tasks.fashion_mnist:FashionMnist",
    "language-model": "stormo.tasks.language_model:LanguageModel",
}


def find_task(name: str) -> type[Task]:
    """The task class a user named; its module is imported."""
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
    """Refuse a file of another kind and a part of a module that has none, before the module itself is imported."""
    top, dot, _ = name.partition(".")
    instead = f"name {top}.py" if Path(f"{top}.py").is_file() else "name a file that ends in .py, or a module"
    if Path(name).is_file():
        raise SettingError(said, "it is no Python file", instead)
    spec = importlib.machinery.PathFinder.find_spec(top, ["", *sys.path]) if top and dot else None
    if spec is not None and spec.submodule_search_locations is None:
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


def refuse_task(path: Path) -> None:
    """Refuse a file that only defines a task where a script is wanted: run as one, it would do nothing."""
    body, names = _read_names(path)
    runs = any(not isinstance(one, _DEFINING) and not _is_plain(one) for one in body)
    if "Task" in names and "World" not in names and not runs and any(_imports_stormo(one) for one in body):
        raise SettingError(
            f"stormo run {path} was typed",
            "it holds a stormo.Task and nothing that runs by itself",
            f"train it by stormo train {path}",
        )


_DEFINING = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)


def _imports_stormo(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Import):
        return any(one.name.partition(".")[0] == "stormo" for one in statement.names)
    return isinstance(statement, ast.ImportFrom) and (statement.module or "").partition(".")[0] == "stormo"


def _is_plain(statement: ast.stmt) -> bool:
    """Whether it is a text, or names a value that nothing is called for."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    is_named = isinstance(statement, ast.Assign | ast.AnnAssign)
    return is_named and not any(isinstance(node, ast.Call) for node in ast.walk(statement))


def _refuse_script(path: Path) -> None:
    """Refuse a script with a loop of its own before it runs, as it would if it were imported."""
    _, names = _read_names(path)
    if "World" in names and "Task" not in names:
        raise SettingError(
            f"the task {path} was named",
            "it is a script that uses stormo.World and holds no stormo.Task",
            f"run it by stormo run {path}",
        )


def _read_names(path: Path) -> tuple[list[ast.stmt], set[str]]:
    """The statements of a file, and every name in them but those that an import alone mentions."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return [], set()  # said when it is imported or run
    return tree.body, {
        node.id if isinstance(node, ast.Name) else node.attr for node in ast.walk(tree) if _is_name(node)
    }


def _is_name(node: ast.AST) -> TypeGuard[ast.Name | ast.Attribute]:
    return isinstance(node, ast.Name | ast.Attribute)


def check_file_name(path: Path) -> None:
    """Raise a sentence where a file of this name would be found instead of a module that others import."""
    if path.stem in sys.stdlib_module_names or path.stem in ("torch", "numpy", "stormo"):
        raise SettingError(
            f"the task {path} was named", f"{path.stem} is also the name of a module it would hide", "rename the file"
        )


def _import_failure(error: Exception | SystemExit, name: str) -> StormoError:
    """What went wrong in a user's module, with the user's own lines of the traceback behind it."""
    if isinstance(error, StormoError):
        return error
    told = traceback.TracebackException.from_exception(error)
    own = [frame for frame in told.stack if not frame.filename.startswith(("<frozen importlib", _PACKAGE))]
    told.stack = traceback.StackSummary.from_list(own)
    told.__cause__, told.__context__ = None, None
    if isinstance(error, SyntaxError):
        file, line, text = error.filename, error.lineno, error.msg
    else:
        file, line = (own[-1].filename, own[-1].lineno) if own else (None, None)
        text = next(iter(str(error).splitlines()), "")
    place = f"line {line} of {Path(file).name}" if file and line else "its import"
    if _is_of_a_script(error):
        where = next((frame for frame in reversed(own) if not _is_installed(frame.filename)), None)
        place = place if where is None else f"line {where.lineno} of {Path(where.filename).name}"
        return SettingError(
            f"the task {name} was named",
            f"{place} {'ends the process' if isinstance(error, SystemExit) else 'waits for input'} when it is imported",
            'put what only a script does under if __name__ == "__main__":',
        )
    return _ImportFailedError(
        f"the task {name} was named",
        f"{place} raised {type(error).__name__}{f': {text}' if text else ''}",
        "install that package, or set PYTHONPATH to its folder"
        if isinstance(error, ModuleNotFoundError)
        else "mend that line",
        "".join(told.format()),
    )


def _is_of_a_script(error: BaseException) -> bool:
    return isinstance(error, SystemExit) or (isinstance(error, EOFError) and "reading a line" in str(error))


def _is_installed(file: str) -> bool:
    return file.startswith(_STANDARD_LIBRARY) or "site-packages" in file or "dist-packages" in file


class _ImportFailedError(SettingError):
    """A user's module that cannot be imported: the sentence, then the lines of its traceback."""

    def __init__(self, what: str, why: str, instead: str, details: str) -> None:
        super().__init__(what, why, instead)
        self.args = (f"{self}\n{details.rstrip()}",)


def _import_module(module_name: str, name: str, *, is_built_in: bool) -> ModuleType:
    check_module(module_name, f"the task {name} was named")
    here = str(Path.cwd())
    if here not in sys.path and not is_built_in:  # nothing of a built-in task lies in the current folder
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
        raise _no_task(module, name)
    if wanted and wanted not in tasks:
        raise unknown_name(f"task class of {module.__name__}", wanted, tasks)
    if not wanted and len(tasks) > 1:
        found = f"it defines {len(tasks)} task classes ({', '.join(sorted(tasks))})"
        raise SettingError(f"the task {name} was named", found, f"name one as {name}:Class, a subclass of stormo.Task")
    return tasks[wanted or next(iter(tasks))]


def _no_task(module: ModuleType, name: str) -> SettingError:
    for key, value in vars(module).items():
        if isinstance(value, type) and value.__module__ == module.__name__ and looks_like_task(value):
            return SettingError(
                f"the task {name} was named",
                f"its class {key} has the methods of a task and is no subclass of stormo.Task",
                f"write class {key}(stormo.Task)",
            )
    return SettingError(
        f"the task {name} was named",
        "it defines no subclass of stormo.Task",
        "write class MyTask(stormo.Task) in it; stormo new FILE.py writes an example",
    )
