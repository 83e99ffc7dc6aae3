"""What the class of a task shows before any process starts; the table in tests/mistakes has the commoner cases."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest
from torch import nn

from stormo.config import options
from stormo.errors import SettingError
from stormo.tasks.check import check_init, check_options, check_task
from stormo.tasks.find import TASKS, find_task
from stormo.tasks.task import Task


class Good(Task):
    """Has what a task needs and nothing else."""

    def model(self) -> Any: ...

    def train_data(self) -> Any: ...

    def validation_data(self) -> Any: ...

    def loss(self, model: Any, batch: Any) -> Any: ...


def changed(**attributes: Any) -> type[Task]:
    """The good task with other attributes."""
    return type("Net", (Good,), attributes)


def answer(task_class: type[Task]) -> str:
    with pytest.raises(SettingError) as caught:
        check(task_class)
    return str(caught.value)


def check(task_class: type[Task]) -> None:
    check_options(task_class)
    check_task(task_class)


@pytest.mark.parametrize("name", TASKS)
def test_built_in_tasks_pass(name: str) -> None:
    check(find_task(name))


def _wrapped(method: Any) -> Any:
    @functools.wraps(method)
    def call(*arguments: Any) -> Any:
        return method(*arguments)

    return call


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"model": nn.Flatten},  # a class makes its objects when it is called
        {"model": staticmethod(lambda: None)},
        {"model": classmethod(lambda cls: None)},
        {"model": functools.cache(lambda self: None)},
        {"model": _wrapped(lambda self: None)},
        {"loss": lambda self, *everything: None},
        {"loss": lambda self, model, batch, smoothing=0.1: None},
        {"loss": staticmethod(lambda model, batch: None)},
        {"__init__": lambda self, options=None: None},
        {"num_draws": 3, "find_unused": True, "name": "mine"},
    ],
)
def test_other_ways_to_write_a_method_pass(attributes: dict[str, Any]) -> None:
    check(changed(**attributes))


def test_all_missing_methods_are_named_at_once() -> None:
    assert answer(type("Net", (Task,), {})) == (
        "class Net was named as the task, but it has no model() and no train_data() and no validation_data() and no "
        "loss(); write def model(self) and def train_data(self) and def validation_data(self) and "
        "def loss(self, model, batch)."
    )


@pytest.mark.parametrize(
    ("attributes", "sentence"),
    [
        ({"model": property(print)}, "Net.model is a property, but it is called as model(), so it must be a method; "),
        ({"loss": None}, "Net.loss is a NoneType, but it is called as loss(model, batch), so it must be a method; "),
        ({"loss": nn.Flatten()}, "Net.loss is a Flatten, but it is called as loss(model, batch), so it must be a "),
        ({"train_data": [1, 2]}, "Net.train_data is a list, but it is called as train_data(), so it must be a method;"),
        (
            {"train_data": lambda self, folder: None},
            "Net.train_data(self, folder) was written, but it is called as train_data(); write def train_data(self).",
        ),
        (
            {"loss": classmethod(lambda cls, batch: None)},
            "Net.loss(batch) was written, but it is called as loss(model, batch); ",
        ),
        ({"metrics": lambda self, batch: None}, "Net.metrics(self, batch) was written, but it is called as metrics("),
        ({"augment": lambda self, batch: None}, "Net.augment(self, batch) was written, but it is called as augment(b"),
        ({"collate": lambda self: None}, "Net.collate(self) was written, but it is called as collate(samples); write "),
        ({"num_draws": -1}, "Net.num_draws is -1, but it counts "),
        ({"num_draws": True}, "Net.num_draws is True, but it counts "),
        ({"defaults": ["adamw"]}, "Net.defaults is a list, but it holds settings by name; "),
    ],
)
def test_what_cannot_be_called_or_used_is_refused(attributes: dict[str, Any], sentence: str) -> None:
    assert answer(changed(**attributes)).startswith(sentence)


@dataclass
class Plain:
    """Options without a line of help."""

    width: int = 3
    kind: Literal["a", "b"] = "a"
    rate: float | None = None
    counter: ClassVar[int] = 0


def test_plain_fields_of_a_dataclass_are_options_without_help() -> None:
    check_options(changed(Options=Plain))
    help_text = options.build_parser("stormo train", options.options_of("task", Plain), "Task").format_help()
    assert "--task.width N" in help_text
    assert "--task.kind {a,b}" in help_text
    assert "(default: 3)" in help_text
    settings = options.parse_flags("stormo train", ["--task.width", "4"], options.options_of("task", Plain), "Task")
    assert options.make_config(settings, Plain).task_options == Plain(width=4)


class Undecorated(Plain):
    depth: int = 2


class Nameless:
    width: int = 3


@dataclass
class Several:
    width: int | str = 3


@dataclass
class Unknown:
    width: "Whatever" = None  # type: ignore[name-defined]  # noqa: F821, UP037


@dataclass
class Factory:
    width: list[int] = dataclasses.field(default_factory=list)


@pytest.mark.parametrize(
    ("declared", "sentence"),
    [
        (Undecorated, "Net.Options was written, but it is not a dataclass; put @dataclass above class Undecorated."),
        (Nameless, "Net.Options was written, but it is not a dataclass; put @dataclass above class Nameless."),
        (Plain(), "Net.Options was written, but it is not a dataclass; "),
        (Several, "an option of Net.Options has a type that cannot be read, but it is one of several types; "),
        (Unknown, "an option of Net.Options has a type that cannot be read, but name 'Whatever' is not "),
        (Factory, "option width of Net.Options has no default, but a run must be able to start without it; "),
    ],
)
def test_options_that_cannot_become_flags_are_refused(declared: Any, sentence: str) -> None:
    assert answer(changed(Options=declared)).startswith(sentence)


def test_an_init_that_leaves_out_that_of_task_is_refused() -> None:
    check_init(Good(None))
    with pytest.raises(SettingError, match=r"begin it with super\(\).__init__\(options\)"):
        check_init(changed(__init__=lambda self, options: None)(None))


def _of_model_and_batch(self: Any, model: Any, batch: Any) -> Any: ...


def _of_one(self: Any, one: Any) -> Any: ...


def _of_none(self: Any) -> Any: ...


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("metric", _of_model_and_batch, "metrics"),
        ("metircs", _of_model_and_batch, "metrics"),
        ("colate", _of_one, "collate"),
        ("optimiser", _of_one, "optimizer"),
        ("tensorplan", _of_one, "tensor_plan"),
        ("fact", _of_none, "facts"),
        ("default", {"epochs": 3}, "defaults"),
        ("num_draw", 2, "num_draws"),
    ],
)
def test_a_misspelt_optional_name_is_refused(name: str, value: Any, meant: str) -> None:
    assert answer(changed(**{name: value})) == (
        f"Net.{name} was written, but a task has {meant}, and nothing would use {name}; "
        f"call it {meant}, or _{name} if it is meant for your own code."
    )
    assert meant in answer(type("Child", (changed(**{name: value}),), {})), "inherited"


def test_names_of_ones_own_are_taken() -> None:
    names = ("metric_names", "features", "dataset", "collate_fn", "augment_batch", "fetch_data", "encode")
    check(changed(**dict.fromkeys(names, _of_none)))
    check(changed(metric=_of_one, augmented=_of_one))  # none can be called as the method is
    check(changed(metric=_of_model_and_batch, metrics=_of_model_and_batch))  # a helper of the real one
    check(changed(_metric=_of_model_and_batch, default=3, metrics_=nn.Linear(1, 1), name="names"))
