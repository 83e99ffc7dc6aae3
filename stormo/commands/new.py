"""The verb `new`: writes a task that trains at once, with a comment on every part that a user will change."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from stormo.config.options import Parser
from stormo.errors import SettingError, full_disk, unknown_name
from stormo.tasks.find import check_file_name
from stormo.telemetry.text import write_text

KINDS = {
    "classification": "classification.py",
    "regression": "regression.py",
    "language-model": "language_model.py",
}


def main(arguments: Sequence[str]) -> int:
    """Read the options, write the file, and say what to type next."""
    parser = Parser(
        prog="stormo new", description="Write a task that trains at once, to start from.", allow_abbrev=False
    )
    parser.add_argument("file", metavar="FILE.py", help="file to write; one that is there is left alone")
    kinds = "|".join(KINDS)
    parser.add_argument("--kind", default="classification", metavar=kinds, help="(default: classification)")
    parsed = parser.parse_args(arguments)
    write_task(parsed.file, parsed.kind)
    name = shlex.quote(str(Path(parsed.file)))
    text = f"""\
{Path(parsed.file)} is written: a task of kind {parsed.kind} that trains at once.
  stormo train {name}                 train it
  stormo train {name} --num-gpus 2    on two GPUs, or on two processes of a machine without
  stormo train {name} --help          its options and all others
"""
    write_text(text, sys.stdout)
    return 0


def write_task(named: str, kind: str) -> None:
    """Write a task into a new file."""
    path = Path(named)
    if kind not in KINDS:
        raise unknown_name("--kind", kind, KINDS)
    if not named or path.is_dir():
        what = f"the folder {path} was named" if named else "an empty name was given"
        raise SettingError(what, "a task is a Python file", f"name one, such as {path / 'my_task.py'}")
    if named.startswith("-"):
        raise SettingError(f"the file {path} was named", "it would be taken for a flag", f"name it {named.lstrip('-')}")
    if path.suffix != ".py":
        better = path.with_suffix(".py") if path.name != ".py" else path.with_name("my_task.py")
        raise SettingError(f"the file {path} was named", "a task is a Python file", f"name it {better}")
    check_file_name(path)
    text = resources.files("stormo.tasks.templates").joinpath(KINDS[kind]).read_text(encoding="utf-8")
    try:
        with path.open("x", encoding="utf-8") as file:  # never over a file that is there
            try:
                file.write(text)
                file.flush()
            except OSError:
                path.unlink()
                raise
    except FileExistsError:
        raise SettingError(f"the file {path} was named", "it is there already", "name another one") from None
    except OSError as error:
        instead = "make room" if full_disk(error) else "make its folder, or name another"
        raise SettingError(f"the file {path} was named", f"it cannot be written ({error.strerror})", instead) from None
