"""What can be known of a task before any process starts: a look at its class, without building a model or reading data.

What only shows with a model and a batch is looked at in `tasks/returned.py` and `rehearsal.py`.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stormo.config import options
from stormo.errors import SettingError
from stormo.tasks.task import Task

REQUIRED = ("model", "train_data", "validation_data", "loss")
# What each method is called with, beside the task itself.
_CALLED_WITH: dict[str, tuple[str, ...]] = {
    "__init__": ("options",),
    "model": (),
    "train_data": (),
    "validation_data": (),
    "loss": ("model", "batch"),
    "metrics": ("model", "batch"),
    "augment": ("batch", "draws"),
    "collate": ("samples",),
    "optimizer": ("model",),
    "tensor_plan": ("model",),
    "classifier": ("model",),
    "pieces": ("model",),
    "fetch": (),
    "facts": (),
}


def check_task(task_class: type[Task]) -> None:
    """Raise a sentence for the first mistake in what the class defines, its options aside."""
    _check_required(task_class)
    for method in _CALLED_WITH:
        if getattr(task_class, method, None) is not getattr(Task, method, None):
            _check_method(task_class, method)
    _check_values(task_class)


def check_made(task: Task) -> None:
    """Raise a sentence where a task's own `__init__` has left out that of `Task`."""
    if not hasattr(task, "options") or not hasattr(task, "_datasets"):
        raise SettingError(
            f"{type(task).__name__}.__init__() was written",
            "it does not call that of stormo.Task, which keeps the options",
            "begin it with super().__init__(options)",
        )


def looks_like_task(candidate: type[Any]) -> bool:
    """Whether a class that is no task has the methods of one."""
    return sum(method in vars(candidate) for method in REQUIRED) >= 2


def note_method(error: BaseException, task: Task) -> None:
    """Have the traceback of a user's own error end with the method of the task that it came from."""
    codes = {
        code: method
        for method in _CALLED_WITH
        if getattr(type(task), method, None) is not getattr(Task, method, None)
        and (code := getattr(inspect.unwrap(getattr(type(task), method)), "__code__", None)) is not None
    }
    for frame, line in traceback.walk_tb(error.__traceback__):
        method = codes.get(frame.f_code)
        if method is not None:
            file = Path(frame.f_code.co_filename).name
            error.add_note(f"stormo: it was raised in {type(task).__name__}.{method}(), {file}, line {line}.")
            return


def _check_required(task_class: type[Task]) -> None:
    missing = [method for method in REQUIRED if getattr(task_class, method) is getattr(Task, method)]
    if not missing:
        return
    similar = _similar(task_class, missing)
    raise SettingError(
        f"class {task_class.__name__} was named as the task",
        f"it has no {' and no '.join(f'{method}()' for method in missing)}",
        f"write {' and '.join(_definition(method) + similar.get(method, '') for method in missing)}",
    )


def _similar(task_class: type[Task], missing: Sequence[str]) -> dict[str, str]:
    """Where a method of another name may be meant for a missing one: a remark on it."""
    found: dict[str, str] = {}
    for cls in task_class.__mro__[: task_class.__mro__.index(Task)]:
        for name, value in vars(cls).items():
            if callable(value) and name not in _CALLED_WITH and not name.startswith("__"):
                inside = [method for method in missing if method in name]
                for method in difflib.get_close_matches(name, missing, n=1) or inside[:1]:
                    found.setdefault(method, f" ({name}() looks like it: rename it)")
    return found


def _definition(method: str) -> str:
    return f"def {method}({', '.join(('self', *_CALLED_WITH[method]))})"


def _check_method(task_class: type[Task], method: str) -> None:
    found = inspect.getattr_static(task_class, method)
    name, wanted = f"{task_class.__name__}.{method}", _CALLED_WITH[method]
    called = f"it is called as {method}({', '.join(wanted)})"
    is_bound_later = isinstance(found, classmethod) or (callable(found) and hasattr(found, "__get__"))
    if not is_bound_later and not isinstance(found, type):  # a class stands for a function that makes one
        raise SettingError(
            f"{name} is {_article(type(found).__name__)}",
            f"{called}, so it must be a method",
            f"write {_definition(method)}",
        )
    is_plain = not isinstance(found, classmethod | staticmethod | type)
    try:
        signature = inspect.signature(found if is_plain else getattr(task_class, method))
    except (TypeError, ValueError):  # a callable that does not tell
        return
    try:
        signature.bind(*(("self", *wanted) if is_plain else wanted))
    except TypeError:
        written = f"{name}({', '.join(signature.parameters)})"
        raise SettingError(f"{written} was written", called, f"write {_definition(method)}") from None


def _article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def _check_values(task_class: type[Task]) -> None:
    name, num_draws = task_class.__name__, task_class.num_draws
    if not isinstance(task_class.name, str):
        raise SettingError(f"{name}.name is {task_class.name!r}", "it is shown as text", 'set something like "my-task"')
    if not isinstance(num_draws, int) or isinstance(num_draws, bool) or num_draws < 0:
        raise SettingError(
            f"{name}.num_draws is {num_draws!r}",
            "it counts the random numbers that augment() gets for each sample",
            "set a whole number from 0",
        )
    if task_class.loss_reduction not in ("mean", "sum", "local"):
        raise SettingError(
            f"{name}.loss_reduction is {task_class.loss_reduction!r}",
            "it says what loss() is over the samples of a batch",
            'set it to "mean", "sum" or "local"',
        )
    if not isinstance(task_class.find_unused, bool):
        raise SettingError(
            f"{name}.find_unused is {task_class.find_unused!r}", "it is a switch", "set it to True or False"
        )


def check_options(task_class: type[Task]) -> None:
    """Raise a sentence where the options of a task cannot become flags, or its defaults no settings."""
    if not isinstance(task_class.defaults, Mapping):
        raise SettingError(
            f"{task_class.__name__}.defaults is {_article(type(task_class.defaults).__name__)}",
            "it holds settings by name",
            'set something like {"optimizer": "adamw"}',
        )
    declared: Any = task_class.Options
    name = f"{task_class.__name__}.Options"
    if not isinstance(declared, type):
        raise SettingError(
            f"{name} is {_article(type(declared).__name__)}",
            "it must be a class",
            "set it to a dataclass, not to one of its values",
        )
    fields = {field.name for field in dataclasses.fields(declared)} if dataclasses.is_dataclass(declared) else None
    if fields is None or not set(inspect.get_annotations(declared)) - _class_variables(declared) <= fields:
        raise SettingError(
            f"{name} was written", "it is not a dataclass", f"put @dataclass above class {declared.__name__}"
        )
    for field in dataclasses.fields(declared):
        if field.init and field.default is dataclasses.MISSING:
            raise SettingError(
                f"option {field.name} of {name} has no default",
                "a run must be able to start without it",
                f"give it one, as in {field.name}: {_written(field.type)} = …",
            )
    try:
        options.options_of("task", declared)
    except NameError as error:
        raise SettingError(
            f"an option of {name} is declared with a type that is not there", str(error), "import it"
        ) from None
    except ValueError as error:
        if isinstance(error, SettingError):
            raise
        raise SettingError(
            f"an option of {name} is declared as one of several types",
            "an option is int, float, str, bool, one of those or None, or a Literal of strings",
            "declare it as one of these",
        ) from None


def _class_variables(declared: type[Any]) -> set[str]:
    return {name for name, hint in inspect.get_annotations(declared).items() if "ClassVar" in str(hint)}


def _written(hint: Any) -> str:
    return hint if isinstance(hint, str) else getattr(hint, "__name__", str(hint))
