"""Turns dataclasses into flags, TOML keys and help, and back: settings are declared once, in `schema` and in a task.

Built on argparse: it costs a hundredth of a second to import (tyro, the nearest library, a tenth), tells which
settings were given, and leaves the wording of every error to us.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from stormo.config.precedence import drop_incompatible
from stormo.config.schema import CALL_ONLY, SECTIONS, NodeRange, TrainConfig
from stormo.errors import SettingError, StormoError, suggestion, unknown_name

_RANGE = re.compile(r"([0-9]+)\s*:\s*([0-9]+)")
_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
# Sections and options that a task's defaults cannot set.
_NOT_FOR_TASKS = ("workers", "command", "task", "run_name", "runs_folder", "resume")


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One setting: a field of a section, a flag, a TOML key."""

    section: str
    name: str
    kind: type[Any]
    choices: tuple[str, ...]
    keywords: tuple[str, ...] = ()  # taken instead of a number, such as auto
    takes_range: bool = False  # such as 1:4
    default: Any
    help: str
    metavar: str | None
    optional_value: bool
    common: bool = False  # in the short help
    joins: str | None = None  # a flag that may be repeated: what stands between its values

    @property
    def flag(self) -> str:
        """The flag, `--batch-size` or, for a task's own option, `--task.width`."""
        if self.section == "task":
            return f"--task.{self.name.replace('_', '-')}"
        return f"--{self.name.rstrip('_').replace('_', '-')}"  # from_ is --from

    @property
    def key(self) -> str:
        """The key of a parsed value."""
        return f"task.{self.name}" if self.section == "task" else self.name

    def convert(self, value: Any, source: str) -> Any:
        """The value in its declared type."""
        if self.choices:
            if value in self.choices:
                return value
            raise unknown_name(source, str(value), self.choices)
        if value in self.keywords or (self.kind is bool and isinstance(value, bool)):
            return value
        if self.takes_range and isinstance(value, str) and ":" in value:
            return _range(value, source)
        if self.kind in (int, float) and isinstance(value, str | int | float) and not isinstance(value, bool):
            number = _number(self.kind, value)
            if isinstance(number, int) and number.bit_length() > 63:  # no file of a run could be read again
                raise SettingError(f"{source} {value} was set", "it must fit in 63 bits", "set a smaller number")
            if number is not None:
                return number
        if self.kind is str and isinstance(value, str):
            return value
        if self.kind is str and isinstance(value, int | float) and not isinstance(value, bool):
            raise SettingError(f"{source} was set to {value!r}", "it takes text", f'put it in quotes: "{value}"')
        raise SettingError(
            f"{source} was set to {value!r}",
            f"it takes {' or '.join([_KINDS[self.kind], *(f'the word {word}' for word in self.keywords)])}",
            f"set it to something like {' or '.join([_example(self), *self.keywords])}",
        )


def _number(kind: type[Any], value: str | float) -> Any:
    """The value as a finite number of this type; None where it is none."""
    try:
        number = kind(value)
        is_good = math.isfinite(number) and (isinstance(value, str) or number == value)
    except (ValueError, OverflowError):
        return None
    return number if is_good else None


def _range(text: str, source: str) -> NodeRange:
    found = _RANGE.fullmatch(text.strip())
    least, most = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= least <= most:
        why = "it takes a number or MIN:MAX, where 1 ≤ MIN ≤ MAX"
        raise SettingError(f"{source} was set to {text!r}", why, "set it to 4 or 1:4")
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
    keywords: tuple[str, ...] = ()
    takes_range = False
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        if len(members) == 2 and members[0] in (int, float) and typing.get_origin(members[1]) is typing.Literal:
            keywords = typing.get_args(members.pop())  # taken instead of a number
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
    return Option(
        section=section,
        name=field.name,
        kind=hint,
        choices=choices,
        keywords=keywords,
        takes_range=takes_range,
        default=field.default,
        help=field.metadata.get("help", ""),
        metavar=field.metadata.get("metavar"),
        optional_value=field.metadata.get("optional_value", False),
        common=section == "task" or field.metadata.get("common", False),
        joins=field.metadata.get("joins"),
    )


def train_options(task_options: type[Any] | None = None) -> list[Option]:
    """Every option of `stormo train`, with those of a task behind them."""
    found = [option for section, cls in SECTIONS.items() for option in options_of(section, cls)]
    return found + (options_of("task", task_options) if task_options else [])


def defaults_of_task(
    defaults: Mapping[str, Any], options: Sequence[Option], task: str
) -> tuple[dict[str, Any], list[Option]]:
    """A task's defaults, checked like the settings of a file, and the options with these defaults."""
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
        return SettingError(said, "a task cannot set a default for it", "leave it out, and set its flag")
    hint = suggestion(name, open_to_tasks)
    return SettingError(said, "there is no setting of that name", f"{hint}stormo train --help all lists them")


_HELP = ("-h", "--help")
_NEGATIVE = re.compile(r"-\.?\d")


@dataclass(frozen=True, kw_only=True, slots=True)
class Positional:
    """The positional argument of a command."""

    name: str
    metavar: str
    help: str
    description: str
    once: str  # why a second one is refused


_TASK = Positional(
    name="task",
    metavar="TASK",
    help="what to train (default: fashion-mnist)",
    description="Train TASK: a built-in name, a file, or package.module:Class.",
    once="one task is trained at a time",
)


class Parser(argparse.ArgumentParser):
    """argparse that raises its errors."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise UsageError(f"{message[:1].lower()}{message[1:]}", self.prog)


class UsageError(StormoError):
    """A command line that cannot be parsed."""

    exit_code = SettingError.exit_code

    def __init__(self, message: str, program: str) -> None:
        super().__init__(f"{message}; see {program} --help.")


def build_parser(
    program: str, options: Sequence[Option], task_title: str, positional: Positional = _TASK
) -> argparse.ArgumentParser:
    """A parser whose help shows the common options by section, with defaults; values stay text until `convert`."""
    hidden = frozenset(option.key for option in options if not option.common)
    epilog = f"{program} --help all shows the other {len(hidden)} options." if hidden else None
    usage = f"{program} [{positional.metavar}] [options]" if hidden else None
    about = {"description": positional.description, "epilog": epilog}
    parser = _parser(prog=program, usage=usage, **about)
    parser.add_argument(positional.name, nargs="?", metavar=positional.metavar, help=positional.help)
    _add_flags(parser, options, {name: _title(cls) for name, cls in SECTIONS.items()} | {"task": task_title})
    return parser


def all_common(options: Iterable[Option]) -> list[Option]:
    """The options, of which the help shows every one."""
    return [dataclasses.replace(option, common=True) for option in options]


def _without_all(argv: Sequence[str]) -> list[str]:
    """The arguments without the `all` of `--help all`, which is no task."""
    before = ("", *argv)
    return [argument for argument, last in zip(argv, before, strict=False) if argument != "all" or last not in _HELP]


def _parser(**options: Any) -> Parser:
    formatter = functools.partial(argparse.HelpFormatter, max_help_position=32, width=110)
    return Parser(**options, allow_abbrev=False, argument_default=argparse.SUPPRESS, formatter_class=formatter)


def _title(section: type[Any]) -> str:
    return (section.__doc__ or "").rstrip(".")


def _add_flags(parser: argparse.ArgumentParser, options: Iterable[Option], titles: Mapping[str, str]) -> None:
    groups: dict[str, Any] = {}
    for option in options:
        if option.section not in groups:
            groups[option.section] = parser.add_argument_group(titles[option.section])
        group = groups[option.section]
        help_text = option.help.replace("%", "%%") + _default_note(option)
        if option.kind is bool:
            shown = help_text if option.common else argparse.SUPPRESS
            group.add_argument(option.flag, dest=option.key, action=argparse.BooleanOptionalAction, help=shown)
            continue
        metavar = option.metavar or "|".join(({int: "N", float: "X", str: "TEXT"}[option.kind], *option.keywords))
        if option.choices and option.metavar:  # too many to stand on the line of the flag
            help_text = help_text.replace(option.help, f"{option.help}; one of {', '.join(option.choices)}")
        elif option.choices:
            metavar = "{" + ",".join(option.choices) + "}"
        group.add_argument(
            option.flag,
            dest=option.key,
            metavar=metavar,
            help=help_text if option.common else argparse.SUPPRESS,
            **({"nargs": "?", "const": ""} if option.optional_value else {}),
            **({"action": "append"} if option.joins is not None else {}),
        )


def take_flags(
    program: str, usage: str, description: str, argv: Sequence[str], section: tuple[str, type[Any]]
) -> tuple[dict[str, Any], list[str]]:
    """The settings of one section on a command line, and the remaining arguments, which are those of `stormo train`."""
    parser = _parser(prog=program, usage=usage, description=description)
    options = all_common(options_of(*section))
    _add_flags(parser, options, {section[0]: _title(section[1])})
    namespace, rest = parser.parse_known_args([dashed(argument) for argument in argv])
    return _converted(namespace, options), rest


def _default_note(option: Option) -> str:
    if option.default is None:
        return "" if "default" in option.help else " (default: automatic)" if option.kind is bool else ""
    return f" (default: {str(option.default).lower() if option.kind is bool else option.default})"


def parse_flags(
    program: str, argv: Sequence[str], options: Sequence[Option], task_title: str, positional: Positional = _TASK
) -> dict[str, Any]:
    """The settings of a command line, by key, including `task` where it was given."""
    arguments = _without_all(argv)
    if len(arguments) < len(argv):
        options = all_common(options)
    parser = build_parser(program, options, task_title, positional)
    namespace, rest = parser.parse_known_args([dashed(argument) for argument in arguments])
    unknown = next((argument.split("=")[0] for argument in rest if argument.startswith("-")), None)
    if unknown is not None:
        near = suggestion(unknown, [*(option.flag for option in options), "--help"])
        raise SettingError(
            f"option {unknown!r} was asked for", "there is none of that name", f"{near}{program} --help all lists them"
        )
    if rest:
        raise SettingError(f"{rest[0]!r} follows the {positional.name}", positional.once, "leave it out")
    return _converted(namespace, options)


def peek_flags(argv: Sequence[str], options: Sequence[Option], is_task: Callable[[str], bool]) -> dict[str, Any]:
    """The settings of a command line without those of the task, whose options are not known yet; ignores unknown flags.

    `is_task` tells a TASK from the value of a task's option: `--task.flip my_task.py` names a task, `--task.width 2`
    does not.
    """
    parser = build_parser("stormo train", options, "Task")
    known = {option.flag for option in options}
    known |= {f"--no-{option.flag[2:]}" for option in options if option.kind is bool}
    kept: list[str] = []
    skips_value = False
    for argument in (dashed(argument) for argument in _without_all(argv) if argument not in _HELP):
        is_value = not argument.startswith("-") or _NEGATIVE.match(argument)
        if skips_value and is_value and not is_task(argument):
            skips_value = False
            continue
        is_unknown = not is_value and argument.partition("=")[0] not in known
        skips_value = is_unknown and "=" not in argument
        if not is_unknown:
            kept.append(argument)
    namespace, _ = parser.parse_known_args(kept)
    return _converted(namespace, options)


def _converted(namespace: argparse.Namespace, options: Sequence[Option]) -> dict[str, Any]:
    by_key = {option.key: option for option in options}
    found: dict[str, Any] = {}
    for key, value in vars(namespace).items():
        option = by_key.get(key)
        text = option.joins.join(value) if option and option.joins is not None else value
        found[key] = option.convert(text, option.flag) if option else value
    return found


def dashed(argument: str) -> str:
    """A flag in its one spelling: `--batch_size=4` is `--batch-size=4`."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def make_config(
    settings: Mapping[str, Any], task_options: type[Any] | None, defaults: Mapping[str, Any] | None = None
) -> TrainConfig:
    """The configuration of these settings; `defaults` are the task's."""
    weak = drop_incompatible(defaults or {}, settings)
    if settings.get("batch_size", "auto") != "auto":
        weak.pop("global_batch_size", None)  # the user's batch size replaces it
    effective = {**weak, **settings}
    number = weak.get("batch_size")
    sections = {
        section: cls(**{f.name: effective[f.name] for f in dataclasses.fields(cls) if f.name in effective})
        for section, cls in SECTIONS.items()
    }
    own = {key.removeprefix("task."): value for key, value in settings.items() if key.startswith("task.")}
    return TrainConfig(
        task=settings.get("task", TrainConfig.task),
        task_options=task_options(**own) if task_options else None,
        given=frozenset(settings),
        auto_batch_size=number if isinstance(number, int) else TrainConfig.auto_batch_size,
        **sections,
    )


def flat_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that must be the same on all nodes, by key."""
    settings: dict[str, Any] = {"task": config.task}
    for section in SECTIONS:
        settings |= dataclasses.asdict(getattr(config, section))
    if config.task_options is not None:
        settings |= {f"task.{key}": value for key, value in dataclasses.asdict(config.task_options).items()}
    own = ("node_id", "task.data_folder", "stage", *CALL_ONLY)
    return {key: value for key, value in settings.items() if key not in own}


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as command-line arguments."""
    arguments: list[str] = []
    for key, value in settings.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
        elif str(value).startswith("-") or str(value) == "":
            arguments.append(f"--{name}={value}")
        else:
            arguments += [f"--{name}", str(value)]
    return arguments


def without_flags(arguments: Sequence[str], flags: Mapping[str, int]) -> list[str]:
    """Arguments without these flags and their values; `flags` maps each to its number of values."""
    kept: list[str] = []
    skipped = 0
    for argument in arguments:
        if skipped:
            skipped -= 1
            continue
        name, equals, _ = argument.partition("=")
        name = f"--{name[2:].replace('_', '-').removeprefix('no-')}" if name.startswith("--") else name
        if name in flags:
            skipped = 0 if equals else flags[name]
            continue
        kept.append(argument)
    return kept
