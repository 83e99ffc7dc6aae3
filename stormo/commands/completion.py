"""The verb `completion`: prints a script that completes verbs, flags and choices in a shell.

The flags are those that the verbs show in their help, so there is no second list of them.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable, Mapping, Sequence

from stormo.config.options import Parser, train_options
from stormo.errors import unknown_name
from stormo.tasks.find import TASKS
from stormo.telemetry.text import write_text

# "  -h, --help", "  --bind, --no-bind", "  --resume [RUN]", "  --decay {none,step}"; not "  --task.width X"
_FLAGS = re.compile(r"(?m)^  (?:-\w, )?(--[\w-]+)(?![\w.-])(?:, (--no-[\w-]+))?(?: \[?(?:\{([\w,-]+)\}|(\S+)))?")
_TAKE_TASK = ("train", "predict", "scale", "submit")  # and every option of `train`
Flags = Mapping[str, Sequence[str] | None]  # of a verb: the choices of each, None where it takes no value
Verbs = Mapping[str, Callable[[list[str]], int]]


def main(arguments: Sequence[str], verbs: Verbs) -> int:
    """Print the script for a shell."""
    about = "Print a script that completes verbs, flags and choices. In ~/.bashrc: source <(stormo completion bash)"
    parser = Parser(prog="stormo completion", description=about, allow_abbrev=False)
    parser.add_argument("shell", metavar="SHELL", help=" or ".join(_SHELLS))
    shell = parser.parse_args(arguments).shell
    if shell not in _SHELLS:
        raise unknown_name("shell", shell, _SHELLS)
    write_text(_SHELLS[shell]({verb: _flags(verb, verbs) for verb in verbs}), sys.stdout)
    return 0


def _flags(verb: str, verbs: Verbs) -> Flags:
    """The flags in the help of a verb; those of a task's own are unknown."""
    text = io.StringIO()
    for name in dict.fromkeys(("train", verb)) if verb in _TAKE_TASK else (verb,):
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            verbs[name](["--help", "all"] if name == "train" else ["--help"])
    choices = {option.flag: (*option.choices, *option.keywords) for option in train_options()}
    found: dict[str, Sequence[str] | None] = {}
    for name, negative, shown, value in _FLAGS.findall(text.getvalue()):
        found[name] = shown.split(",") if shown else choices.get(name, ()) if value else None
        found |= {negative: None} if negative else {}
    return dict(sorted(found.items()))


# Sets `list` from `verb` (empty where it is typed now), `flag` (the word before) and `current`.
def _body(verbs: Mapping[str, Flags]) -> str:
    choices = {name: words for flags in verbs.values() for name, words in flags.items() if words}
    lines = [f'    if [[ -z $verb ]]; then list="{" ".join(verbs)}"; else', "    case $flag in"]
    lines += [f'        {name}) list="{" ".join(words)}" ;;' for name, words in sorted(choices.items())]
    lines += ["        *) case $verb/$current in"]
    lines += [f'            {verb}/-*) list="{" ".join(flags)}" ;;' for verb, flags in verbs.items()]
    lines += [f'            {"/*|".join(_TAKE_TASK)}/*) list="{" ".join(TASKS)}" ;;']
    lines += [f'            completion/*) list="{" ".join(_SHELLS)}" ;;']
    return "\n".join([*lines, "        esac ;;", "    esac; fi"])


def _bash(verbs: Mapping[str, Flags]) -> str:
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


def _zsh(verbs: Mapping[str, Flags]) -> str:
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


def _fish(verbs: Mapping[str, Flags]) -> str:
    lines = [f"complete -c stormo -n __fish_use_subcommand -f -a '{' '.join(verbs)}'"]
    seen = "complete -c stormo -n '__fish_seen_subcommand_from {}'"
    for verb, flags in verbs.items():
        start = seen.format(verb)
        for name, words in flags.items():
            value = "" if words is None else f" -x -a '{' '.join(words)}'" if words else " -r"
            lines.append(f"{start} -l {name[2:]}{value}")
    lines.append(f"{seen.format(' '.join(_TAKE_TASK))} -a '{' '.join(TASKS)}'")
    lines.append(f"{seen.format('completion')} -f -a '{' '.join(_SHELLS)}'")
    return "\n".join(lines) + "\n"


_SHELLS: dict[str, Callable[[Mapping[str, Flags]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
