"""What a dataclass declares, field by field: the options of `stormo train` and those of a task."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stormo.config.schema import SECTIONS, NodeRange
from stormo.errors import SettingError, suggestion, unknown_name

_RANGE = re.compile(r"([0-9]+)\s*:\s*([0-9]+)")
_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
# Sections and options that a task's own defaults leave alone: where it runs, under which name, and what one call does.
_NOT_FOR_TASKS = ("workers", "command", "task", "run_name", "runs_folder", "resume")


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One setting: a field of a section, a flag, a TOML key."""

    section: str
    name: str
    kind: type[Any]
    choices: tuple[str, ...]
    words: tuple[str, ...] = ()  # that a number's place may be taken by
    takes_range: bool = False  # such as 1:4
    default: Any
    help: str
    metavar: str | None
    optional_value: bool
    dropped: Mapping[str, str] = dataclasses.field(default_factory=dict)  # values of before: what to do instead

    @property
    def flag(self) -> str:
        """The flag, `--batch-size` or, for a task's own option, `--task.width`."""
        dashed = self.name.replace("_", "-")
        return f"--task.{dashed}" if self.section == "task" else f"--{dashed}"

    @property
    def key(self) -> str:
        """The name under which a parsed value is kept."""
        return f"task.{self.name}" if self.section == "task" else self.name

    def convert(self, value: Any, source: str) -> Any:
        """The value in its declared type, or a sentence that says what the source should hold."""
        if self.choices:
            if value in self.choices:
                return value
            if isinstance(value, str) and value in self.dropped:
                raise SettingError(f"{source} {value} was set", "stormo no longer has it", self.dropped[value])
            raise unknown_name(source, str(value), self.choices)
        if value in self.words or (self.kind is bool and isinstance(value, bool)):
            return value
        if self.takes_range and isinstance(value, str) and ":" in value:
            return _range(value, source)
        if self.kind in (int, float) and isinstance(value, str | int | float) and not isinstance(value, bool):
            number = _number(self.kind, value)
            if number is not None:
                return number
        if self.kind is str and isinstance(value, str):
            return value
        if self.kind is str and isinstance(value, int | float) and not isinstance(value, bool):
            raise SettingError(f"{source} was set to {value!r}", "it takes text", f'put it in quotes: "{value}"')
        raise SettingError(
            f"{source} was set to {value!r}",
            f"it takes {' or '.join([_KINDS[self.kind], *(f'the word {word}' for word in self.words)])}",
            f"set it to something like {' or '.join([_example(self), *self.words])}",
        )


def _number(kind: type[Any], value: str | float) -> Any:
    """The value as a finite number of its kind, or None where it is not one."""
    try:
        number = kind(value)
        is_good = math.isfinite(number) and (isinstance(value, str) or number == value)
    except (ValueError, OverflowError):
        return None
    return number if is_good else None


def _range(text: str, source: str) -> NodeRange:
    found = _RANGE.fullmatch(text.strip())
    if found is None:
        raise SettingError(f"{source} was set to {text!r}", "it takes a number or MIN:MAX", "set it to 4 or 1:4")
    least, most = int(found[1]), int(found[2])
    if not 1 <= least <= most:
        why = "at least one node must take part" if least < 1 else f"the least, {least}, is more than the most, {most}"
        raise SettingError(
            f"{source} {text} was set", why, f"set {source} {max(1, min(least, most))}:{max(1, least, most)}"
        )
    return NodeRange(least, most)


def _example(option: Option) -> str:
    if option.default is not None:
        return str(option.default).lower() if option.kind is bool else str(option.default)
    return {int: "4", float: "0.5", str: "text", bool: "true"}[option.kind]


def options_of(section: str, cls: type[Any]) -> list[Option]:
    """The options that a dataclass declares."""
    hints = typing.get_type_hints(cls)
    return [_option(section, field, hints[field.name]) for field in dataclasses.fields(cls)]


def _option(section: str, field: dataclasses.Field[Any], hint: Any) -> Option:
    words: tuple[str, ...] = ()
    takes_range = False
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        if len(members) == 2 and members[0] in (int, float) and typing.get_origin(members[1]) is typing.Literal:
            words = typing.get_args(members.pop())  # a number, or a word in its place
        if members[1:] == [NodeRange]:
            takes_range = bool(members.pop())
        (hint,) = members
    choices: tuple[str, ...] = ()
    if typing.get_origin(hint) is typing.Literal:
        choices, hint = typing.get_args(hint), str
    if hint not in _KINDS:
        raise SettingError(
            f"option {field.name} of section {section} is declared as {hint}",
            "an option is int, float, str, bool, one of those or None, a Literal of strings, or a number or a Literal",
            "declare it as one of these",
        )
    if field.default is dataclasses.MISSING:
        raise SettingError(
            f"option {field.name} of section {section} has no default", "every option needs one", "give it a default"
        )
    return Option(
        section=section,
        name=field.name,
        kind=hint,
        choices=choices,
        words=words,
        takes_range=takes_range,
        default=field.default,
        help=field.metadata.get("help", ""),
        metavar=field.metadata.get("metavar"),
        optional_value=field.metadata.get("optional_value", False),
        dropped=field.metadata.get("dropped", {}),
    )


def train_options(task_options: type[Any] | None = None) -> list[Option]:
    """Every option of `stormo train`, with those of a task behind them."""
    found = [option for section, cls in SECTIONS.items() for option in options_of(section, cls)]
    return found + (options_of("task", task_options) if task_options else [])


def defaults_of_task(
    defaults: Mapping[str, Any], options: Sequence[Option], task: str
) -> tuple[dict[str, Any], list[Option]]:
    """A task's own defaults, checked like settings of a file, and the options with these in place of the usual ones."""
    open_to_tasks = {
        option.name: option
        for option in options
        if option.section not in _NOT_FOR_TASKS and option.name not in _NOT_FOR_TASKS
    }
    checked: dict[str, Any] = {}
    for name, value in defaults.items():
        if name not in open_to_tasks:
            raise _not_a_default(name, task, open_to_tasks, options)
        checked[name] = open_to_tasks[name].convert(value, f"{name} in the defaults of task {task}")
    return checked, [
        dataclasses.replace(option, default=checked[option.key]) if option.key in checked else option
        for option in options
    ]


def _not_a_default(name: str, task: str, open_to_tasks: Iterable[str], options: Iterable[Option]) -> SettingError:
    said = f"{name!r} is in the defaults of task {task}"
    if any(option.name == name for option in options):
        return SettingError(said, "it is no part of how a task is trained", "leave it out, and set it with its flag")
    hint = suggestion(name, open_to_tasks)
    return SettingError(said, "there is no setting of that name", f"{hint}stormo train --help lists them all")
