"""Checks the class of a task before any process starts, without building a model or reading data.

`tasks/returned.py` and `training/sanity_check.py` check what its methods return.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Mapping

from stormo.config import options
from stormo.errors import SettingError
from stormo.tasks.task import Task

REQUIRED = ("model", "train_data", "validation_data", "loss")
HOOKS = ("on_train_start", "on_step_end", "on_validation_end", "on_epoch_end", "on_train_end")
_NEAR = 0.85  # a letter more, less or other
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
    "optimizers": ("model",),
    "scheduler": ("optimizer",),
    "tensor_plan": ("model",),
    "classifier": ("model",),
    "pieces": ("model",),
    **dict.fromkeys(HOOKS, ("context",)),
    "fetch": (),
    "facts": (),
}
_OPTIONAL = (
    *(name for name in _CALLED_WITH if name not in (*REQUIRED, "__init__")),
    "defaults",
    "num_draws",
    "lr_factors",
)


def check_task(task_class: type[Task]) -> None:
    """Raise an error for the first mistake in the methods and values of the class."""
    _check_required(task_class)
    _check_spelling(task_class)
    _check_several(task_class)
    for method in _CALLED_WITH:
        if getattr(task_class, method, None) is not getattr(Task, method, None):
            _check_method(task_class, method)
    name, num_draws, reduction = task_class.__name__, task_class.num_draws, task_class.loss_reduction
    if not isinstance(num_draws, int) or isinstance(num_draws, bool) or num_draws < 0:
        raise SettingError(
            f"{name}.num_draws is {num_draws!r}",
            "it counts the random numbers that augment() gets for each sample",
            "set a whole number from 0",
        )
    if task_class.scheduler_interval not in ("step", "epoch"):
        raise SettingError(
            f"{name}.scheduler_interval is {task_class.scheduler_interval!r}",
            "it says how often scheduler() is stepped",
            'set it to "step" or "epoch"',
        )
    if not isinstance(task_class.lr_factors, Mapping | property):
        raise SettingError(
            f"{name}.lr_factors is {task_class.lr_factors!r}",
            "it maps patterns of parameter names to factors of the learning rate",
            'set something like {"head.*": 10.0}',
        )
    if reduction not in ("mean", "sum", "local"):
        raise SettingError(
            f"{name}.loss_reduction is {reduction!r}",
            "it says what loss() is over the samples of a batch",
            'set it to "mean", "sum" or "local"',
        )


def has_several_optimizers(task_class: type[Task]) -> bool:
    """Whether it defines `optimizers`."""
    return task_class.optimizers is not Task.optimizers


def _check_several(task_class: type[Task]) -> None:
    """Refuse a task with several optimizers that has one too, or whose validation would have to choose a loss."""
    said = f"class {task_class.__name__} has optimizers()"
    if has_several_optimizers(task_class) and task_class.optimizer is not Task.optimizer:
        raise SettingError(said, "it has optimizer() as well", "leave out one of them")
    if has_several_optimizers(task_class) and task_class.metrics is Task.metrics:
        raise SettingError(
            said, "it has no metrics(), and there is no one loss to validate", f"write {_definition('metrics')}"
        )


def _called_with(task_class: type[Task], method: str) -> tuple[str, ...]:
    is_in_turn = method == "loss" and has_several_optimizers(task_class)
    return (*_CALLED_WITH[method], "optimizer") if is_in_turn else _CALLED_WITH[method]


def check_init(task: Task) -> None:
    """Raise an error where the `__init__` of a task does not call that of `Task`."""
    if not hasattr(task, "options") or not hasattr(task, "_datasets"):
        raise SettingError(
            f"{type(task).__name__}.__init__() was written",
            "it does not call that of stormo.Task, which keeps the options",
            "begin it with super().__init__(options)",
        )


def _check_required(task_class: type[Task]) -> None:
    missing = [method for method in REQUIRED if getattr(task_class, method) is getattr(Task, method)]
    if missing:
        raise SettingError(
            f"class {task_class.__name__} was named as the task",
            f"it has no {' and no '.join(f'{method}()' for method in missing)}",
            f"write {' and '.join(_definition(method) for method in missing)}",
        )


def _check_spelling(task_class: type[Task]) -> None:
    """Refuse a name that was meant to be one of Task's: nothing would use it."""
    open_names = [name for name in _OPTIONAL if getattr(task_class, name) is getattr(Task, name)]
    for name in (name for cls in task_class.__mro__ for name in vars(cls) if not hasattr(Task, name)):
        near = difflib.get_close_matches(name, open_names, n=1, cutoff=_NEAR)
        if near and not name.startswith("_") and _could_be(near[0], inspect.getattr_static(task_class, name)):
            raise SettingError(
                f"{task_class.__name__}.{name} was written",
                f"a task has {near[0]}, and nothing would use {name}",
                f"call it {near[0]}, or _{name} if it is meant for your own code",
            )


def _could_be(optional: str, found: object) -> bool:
    """Whether this has the type of the value, or can be called as the method."""
    if optional not in _CALLED_WITH:
        return isinstance(found, type(getattr(Task, optional)))
    if not inspect.isfunction(found):
        return False
    try:
        inspect.signature(found).bind("self", *_CALLED_WITH[optional])
    except TypeError:
        return False
    return True


def _definition(method: str, wanted: tuple[str, ...] | None = None) -> str:
    return f"def {method}({', '.join(('self', *(wanted or _CALLED_WITH[method])))})"


def _check_method(task_class: type[Task], method: str) -> None:
    found = inspect.getattr_static(task_class, method)
    name, wanted = f"{task_class.__name__}.{method}", _called_with(task_class, method)
    called = f"it is called as {method}({', '.join(wanted)})"
    is_bound_later = isinstance(found, classmethod) or (callable(found) and hasattr(found, "__get__"))
    if not is_bound_later and not isinstance(found, type):  # a class can stand for a function that makes its objects
        kind = type(found).__name__
        definition = _definition(method, wanted)
        raise SettingError(f"{name} is a {kind}", f"{called}, so it must be a method", f"write {definition}")
    is_plain = not isinstance(found, classmethod | staticmethod | type)
    try:
        signature = inspect.signature(found if is_plain else getattr(task_class, method))
    except (TypeError, ValueError):  # a callable without a signature
        return
    try:
        signature.bind(*(("self", *wanted) if is_plain else wanted))
    except TypeError:
        written = f"{name}({', '.join(signature.parameters)})"
        raise SettingError(f"{written} was written", called, f"write {_definition(method, wanted)}") from None


def check_options(task_class: type[Task]) -> None:
    """Raise an error where the options of a task cannot become flags, or its defaults are no settings."""
    name, declared = f"{task_class.__name__}.Options", task_class.Options
    if not isinstance(task_class.defaults, Mapping):
        raise SettingError(
            f"{task_class.__name__}.defaults is a {type(task_class.defaults).__name__}",
            "it holds settings by name",
            'set something like {"optimizer": "adamw"}',
        )
    is_dataclass = isinstance(declared, type) and dataclasses.is_dataclass(declared)
    fields = {field.name for field in dataclasses.fields(declared)} if is_dataclass else set()
    cls = declared if isinstance(declared, type) else type(declared)
    own = {key for key, hint in inspect.get_annotations(cls).items() if "ClassVar" not in str(hint)}
    if not is_dataclass or not own <= fields:  # a subclass of a dataclass may have fields of its own
        raise SettingError(f"{name} was written", "it is not a dataclass", f"put @dataclass above class {cls.__name__}")
    for field in dataclasses.fields(declared):
        if field.default is dataclasses.MISSING:
            hint = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
            raise SettingError(
                f"option {field.name} of {name} has no default",
                "a run must be able to start without it",
                f"give it one, as in {field.name}: {hint} = …",
            )
    try:
        options.options_of("task", declared)
    except SettingError:
        raise
    except (NameError, ValueError) as error:  # a type that is not imported, or one of several types
        why = str(error) if isinstance(error, NameError) else "it is one of several types"
        raise SettingError(
            f"an option of {name} has a type that cannot be read",
            why,
            "declare it as int, float, str, bool, one of those or None, or a Literal of strings",
        ) from None
