"""Turns dataclasses into flags, TOML keys and help, and back: settings are declared once, in `config` and in a task.

Built on argparse: it costs a hundredth of a second to import (tyro, the nearest library, a tenth), tells which
settings were given, and leaves the wording of every error to us. One walk over the fields serves flags and TOML alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from stormo.config import EFFECTIVE, OF_ONE_CALL, OF_OTHER_VERBS, SECTIONS, Effective, NodeRange, TrainConfig
from stormo.errors import SettingError, StormoError, unknown_name

_NEGATIVE = re.compile(r"-\.?\d")
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
    close = difflib.get_close_matches(name, list(open_to_tasks), n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return SettingError(said, "there is no setting of that name", f"{hint}stormo train --help lists them all")


@dataclass(frozen=True, kw_only=True, slots=True)
class Positional:
    """The one argument of a verb that is no option."""

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
    """argparse, with errors raised as one sentence instead of printed."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise UsageError(f"{message[:1].lower()}{message[1:]}", self.prog)


class UsageError(StormoError):
    """A command line that cannot be read."""

    exit_code = SettingError.exit_code

    def __init__(self, message: str, program: str) -> None:
        super().__init__(f"{message}; see {program} --help.")


def build_parser(
    program: str, options: Iterable[Option], task_title: str, positional: Positional = _TASK, *, add_help: bool = True
) -> argparse.ArgumentParser:
    """A parser whose help is grouped by section and shows every default; values stay text until `convert`."""
    parser = Parser(
        prog=program,
        description=positional.description,
        allow_abbrev=False,
        add_help=add_help,
        argument_default=argparse.SUPPRESS,
        formatter_class=_wide_help,
    )
    parser.add_argument(positional.name, nargs="?", metavar=positional.metavar, help=positional.help)
    _add_flags(parser, options, {name: _title(cls) for name, cls in SECTIONS.items()} | {"task": task_title})
    return parser


def _wide_help(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=32, width=110)


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
            group.add_argument(option.flag, dest=option.key, action=argparse.BooleanOptionalAction, help=help_text)
            continue
        metavar = option.metavar or "|".join(({int: "N", float: "X", str: "TEXT"}[option.kind], *option.words))
        group.add_argument(
            option.flag,
            dest=option.key,
            metavar="{" + ",".join(option.choices) + "}" if option.choices else metavar,
            help=help_text,
            **({"nargs": "?", "const": ""} if option.optional_value else {}),
        )


def take_flags(
    program: str, usage: str, description: str, argv: Sequence[str], section: tuple[str, type[Any]]
) -> tuple[dict[str, Any], list[str]]:
    """What a command line says of a verb's own section, by key, and the words that are left for `stormo train`."""
    parser = Parser(
        prog=program,
        usage=usage,
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_wide_help,
    )
    options = options_of(*section)
    _add_flags(parser, options, {section[0]: _title(section[1])})
    namespace, rest = parser.parse_known_args([_dashed(argument) for argument in argv])
    return _converted(namespace, options), rest


def _default_note(option: Option) -> str:
    if option.default is None:
        return "" if "default" in option.help else " (default: automatic)" if option.kind is bool else ""
    return f" (default: {str(option.default).lower() if option.kind is bool else option.default})"


def parse_flags(
    program: str, argv: Sequence[str], options: Sequence[Option], task_title: str, positional: Positional = _TASK
) -> dict[str, Any]:
    """The settings a command line gives, by key; `task` among them where a TASK was named."""
    parser = build_parser(program, options, task_title, positional)
    namespace, rest = parser.parse_known_args([_dashed(argument) for argument in argv])
    _check_unknown(rest, options)
    if rest:
        raise SettingError(f"{rest[0]!r} follows the {positional.name}", positional.once, "leave it out")
    return _converted(namespace, options)


def _check_unknown(rest: Sequence[str], options: Sequence[Option]) -> None:
    unknown = next((argument for argument in rest if argument.startswith("-")), None)
    if unknown is not None:
        raise unknown_name("option", unknown.split("=")[0], [*(option.flag for option in options), "--help"])


def peek_flags(argv: Sequence[str], options: Sequence[Option], is_task: Callable[[str], bool]) -> dict[str, Any]:
    """What a command line says of everything but a task's own options, which are not known yet.

    `is_task` tells a TASK from the value of a task's option: `--task.flip my_task.py` names a task, `--task.width 2`
    does not.
    """
    parser = build_parser("stormo train", options, "Task", add_help=False)
    kept: list[str] = []
    skips_value = False
    for argument in (_dashed(argument) for argument in argv if argument not in ("-h", "--help")):
        is_value = not argument.startswith("-") or _NEGATIVE.match(argument)
        if skips_value and is_value and not is_task(argument):
            skips_value = False
            continue
        is_own = argument.startswith(("--task.", "--no-task."))
        skips_value = is_own and "=" not in argument
        if not is_own:
            kept.append(argument)
    namespace, rest = parser.parse_known_args(kept)
    _check_unknown(rest, options)
    return _converted(namespace, options)


def _converted(namespace: argparse.Namespace, options: Sequence[Option]) -> dict[str, Any]:
    by_key = {option.key: option for option in options}
    return {
        key: by_key[key].convert(value, by_key[key].flag) if key in by_key else value
        for key, value in vars(namespace).items()
    }


def _dashed(argument: str) -> str:
    # Accelerate's users type --batch_size; both spellings name the same option.
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file of settings as plain values; see `settings_from_toml`."""
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(
            f"--config {path} was set", f"it cannot be read ({error.strerror})", "check the path"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"--config {path} was set", f"it is not valid TOML ({error})", "mend that line") from None


def settings_from_toml(document: Mapping[str, Any], options: Sequence[Option], source: str) -> dict[str, Any]:
    """The settings of a parsed TOML file, by key, each checked against its declaration."""
    settings: dict[str, Any] = {}
    sections = {option.section for option in options} | {"task"}
    for name, value in document.items():
        if name == "task":
            if not isinstance(value, str):
                raise SettingError(
                    f"task in {source} is no text", "it names what is trained", "put its options under [task_options]"
                )
            settings["task"] = value
        if name in ("task", EFFECTIVE, *OF_OTHER_VERBS) and name not in sections - {"task"}:
            continue  # what was derived is derived anew, and what is said to another verb is none of this one's
        section = "task" if name == "task_options" else name
        if section not in sections or not isinstance(value, Mapping):
            raise unknown_name(f"section of {source}", name, sections | {"task_options"})
        declared = {option.name: option for option in options if option.section == section}
        for key, content in value.items():
            option = declared.get(key.replace("-", "_"))
            if option is None:
                known = [name for name, one in declared.items() if not one.optional_value]
                raise unknown_name(f"key in section [{name}] of {source}", key, known)
            if option.optional_value:
                raise SettingError(
                    f"{key} was set in {source}", "it is said of one call, not of a run", f"set it by {option.flag}"
                )
            settings[option.key] = option.convert(content, f"{key} in {source}")
    return settings


def make_config(
    settings: Mapping[str, Any], task_options: type[Any] | None, defaults: Mapping[str, Any] | None = None
) -> TrainConfig:
    """The configuration that holds the given settings and the defaults of the rest, a task's own before the usual."""
    weak = dict(defaults or {})
    if settings.get("batch_size", "auto") != "auto":
        weak.pop("global_batch_size", None)  # the two say the same, and what the user says wins
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
    """Every setting that must be the same on all nodes, by key."""
    settings: dict[str, Any] = {"task": config.task}
    for section in SECTIONS:
        settings |= dataclasses.asdict(getattr(config, section))
    if config.task_options is not None:
        settings |= {f"task.{key}": value for key, value in dataclasses.asdict(config.task_options).items()}
    own = ("node_id", "task.data_folder", "stage", *OF_ONE_CALL)
    return {key: value for key, value in settings.items() if key not in own}


def to_toml(config: TrainConfig, effective: Effective) -> str:
    """The settings and what they came to, as TOML that `--config` reads; what was left to be chosen is left out."""
    lines = [f"task = {json.dumps(config.task)}"]
    sections = {section: dataclasses.asdict(getattr(config, section)) for section in SECTIONS if section != "command"}
    if config.batch.global_batch_size is not None and config.batch.batch_size != "auto":
        del sections["batch"]["batch_size"]  # only one of the two is ever set
    if config.stop.on_divergence != "rollback":
        del sections["stop"]["rollback_factor"], sections["stop"]["max_rollbacks"]  # without effect
    for name in OF_ONE_CALL:
        del sections["workers"][name]
    del sections["run"]["resume"]  # said of one call, not of the run
    del sections["run"]["run_name"]  # the folder's own name; a run that repeats this one has another
    if config.task_options is not None:
        sections["task_options"] = dataclasses.asdict(config.task_options)
    sections[EFFECTIVE] = dataclasses.asdict(effective)
    for section, values in sections.items():
        lines += ["", f"[{section}]"]
        lines += [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    # JSON's text is TOML's but for one character, which TOML wants escaped.
    text = str(value) if isinstance(value, NodeRange) else value
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
