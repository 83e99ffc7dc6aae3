"""The verb `completion`: prints a script that completes verbs, flags and choices in a shell.

The flags are those that the verbs show in their help, so there is no second list of them.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from stormo.config.options import Parser, train_options
from stormo.errors import unknown_name
from stormo.tasks.find import TASKS
from stormo.telemetry.text import write_text

# "  -h, --help", "  --bind, --no-bind", "  --resume [RUN]", "  --decay {none,step}"; not "  --task.width X"
_FLAGS = re.compile(
    r"^  (?:-\w, )?(--[\w-]+)(?![\w.-])(?:, (--no-[\w-]+))?(?: \[?(?:\{([\w,-]+)\}|(\S+)))?", re.MULTILINE
)
_TAKE_TASK = ("train", "predict", "scale", "submit")  # and every option of `train`


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One flag of a verb."""

    name: str
    choices: tuple[str, ...] = ()
    takes_value: bool = False


def main(arguments: Sequence[str], verbs: Mapping[str, Callable[[list[str]], int]]) -> int:
    """Print the script for a shell."""
    parser = Parser(
        prog="stormo completion",
        description="Print a script that completes the verbs, flags and choices of stormo.",
        epilog="In ~/.bashrc: source <(stormo completion bash)",
        allow_abbrev=False,
    )
    parser.add_argument("shell", metavar="SHELL", help=" or ".join(_SHELLS))
    shell = parser.parse_args(arguments).shell
    if shell not in _SHELLS:
        raise unknown_name("shell", shell, _SHELLS)
    write_text(_SHELLS[shell]({verb: _flags(verb, verbs) for verb in verbs}), sys.stdout)
    return 0


def _flags(verb: str, verbs: Mapping[str, Callable[[list[str]], int]]) -> list[Flag]:
    """The flags in the help of a verb; those of a task's own are unknown."""
    help_text = io.StringIO()
    for name in {verb, "train"} if verb in _TAKE_TASK else {verb}:
        with contextlib.redirect_stdout(help_text), contextlib.suppress(SystemExit):
            verbs[name](["--help", "all"] if name == "train" else ["--help"])
    choices = {option.flag: (*option.choices, *option.keywords) for option in train_options()}
    found: dict[str, Flag] = {}
    for name, negative, shown, value in _FLAGS.findall(help_text.getvalue()):
        known = tuple(shown.split(",")) if shown else choices.get(name, ())
        found.setdefault(name, Flag(name=name, choices=known, takes_value=bool(shown or value)))
        if negative:
            found.setdefault(negative, Flag(name=negative))
    return sorted(found.values(), key=lambda flag: flag.name)


# Sets `list` from `verb` (empty where it is typed now), `flag` (the word before) and `current`.
def _body(verbs: Mapping[str, Sequence[Flag]]) -> str:
    choices = {flag.name: flag.choices for flags in verbs.values() for flag in flags if flag.choices}
    lines = [f'    if [[ -z $verb ]]; then list="{" ".join(verbs)}"; else', "    case $flag in"]
    lines += [f'        {name}) list="{" ".join(words)}" ;;' for name, words in sorted(choices.items())]
    lines += ["        *) case $verb/$current in"]
    lines += [f'            {verb}/-*) list="{_names(flags)}" ;;' for verb, flags in verbs.items()]
    lines += [f'            {"/*|".join(_TAKE_TASK)}/*) list="{" ".join(TASKS)}" ;;']
    lines += [f'            completion/*) list="{" ".join(_SHELLS)}" ;;']
    return "\n".join([*lines, "        esac ;;", "    esac; fi"])


def _names(flags: Iterable[Flag]) -> str:
    return " ".join(flag.name for flag in flags)


def _bash(verbs: Mapping[str, Sequence[Flag]]) -> str:
    return f"""\
_stormo() {{
    local list= verb= current=${{COMP_WORDS[COMP_CWORD]}} flag=${{COMP_WORDS[COMP_CWORD-1]}}
    if [[ $flag == "=" ]]; then flag=${{COMP_WORDS[COMP_CWORD-2]}}; fi  # --strategy=ddp is three words
    if [[ $current == "=" ]]; then current=; fi
    if ((COMP_CWORD > 1)); then verb=${{COMP_WORDS[1]}}; fi
{_body(verbs)}
    COMPREPLY=($(compgen -W "$list" -- "$current"))
}}
complete -o default -F _stormo stormo
"""


def _zsh(verbs: Mapping[str, Sequence[Flag]]) -> str:
    return f"""\
#compdef stormo
_stormo() {{
    local list= verb= current=${{words[CURRENT]}} flag=${{words[CURRENT-1]}}
    if ((CURRENT > 2)); then verb=${{words[2]}}; fi
    if [[ $current == --*=* ]]; then flag=${{current%%=*}}; current=; compset -P "*="; fi
{_body(verbs)}
    if [[ -n $list ]]; then compadd -- ${{=list}}; fi
    if [[ -n $verb && $current != -* ]]; then _files; fi
}}
compdef _stormo stormo
"""


def _fish(verbs: Mapping[str, Sequence[Flag]]) -> str:
    lines = [f"complete -c stormo -n __fish_use_subcommand -f -a '{' '.join(verbs)}'"]
    seen = "complete -c stormo -n '__fish_seen_subcommand_from {}'"
    for verb, flags in verbs.items():
        start = seen.format(verb)
        for flag in flags:
            value = f" -x -a '{' '.join(flag.choices)}'" if flag.choices else " -r" if flag.takes_value else ""
            lines.append(f"{start} -l {flag.name[2:]}{value}")
    lines.append(f"{seen.format(' '.join(_TAKE_TASK))} -a '{' '.join(TASKS)}'")
    lines.append(f"{seen.format('completion')} -f -a '{' '.join(_SHELLS)}'")
    return "\n".join(lines) + "\n"


_SHELLS: dict[str, Callable[[Mapping[str, Sequence[Flag]]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
