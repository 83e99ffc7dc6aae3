"""The command line: options as flags with their help, and back.

Built on argparse: it costs a hundredth of a second to import (tyro, the nearest library, a tenth), tells which
settings were given, and leaves the wording of every error to us.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from stormo.config.options.declared import Option, options_of
from stormo.config.schema import SECTIONS
from stormo.errors import SettingError, StormoError, suggestion

_NEGATIVE = re.compile(r"-\.?\d")


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
        if option.choices and option.metavar:  # too many to stand on the line of the flag
            help_text = help_text.replace(option.help, f"{option.help}; one of {', '.join(option.choices)}")
        elif option.choices:
            metavar = "{" + ",".join(option.choices) + "}"
        group.add_argument(
            option.flag,
            dest=option.key,
            metavar=metavar,
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
    _check_unknown(program, rest, options)
    if rest:
        raise SettingError(f"{rest[0]!r} follows the {positional.name}", positional.once, "leave it out")
    return _converted(namespace, options)


def _check_unknown(program: str, rest: Sequence[str], options: Sequence[Option]) -> None:
    unknown = next((argument.split("=")[0] for argument in rest if argument.startswith("-")), None)
    if unknown is not None:
        near = suggestion(unknown, [*(option.flag for option in options), "--help"])
        raise SettingError(
            f"option {unknown!r} was asked for", "there is none of that name", f"{near}{program} --help lists them all"
        )


def peek_flags(argv: Sequence[str], options: Sequence[Option], is_task: Callable[[str], bool]) -> dict[str, Any]:
    """What a command line says of everything but a task's own options, which are not known yet; nor is a typing error.

    `is_task` tells a TASK from the value of a task's option: `--task.flip my_task.py` names a task, `--task.width 2`
    does not.
    """
    parser = build_parser("stormo train", options, "Task", add_help=False)
    known = {option.flag for option in options}
    known |= {f"--no-{option.flag[2:]}" for option in options if option.kind is bool}
    kept: list[str] = []
    skips_value = False
    for argument in (_dashed(argument) for argument in argv if argument not in ("-h", "--help")):
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
