"""The verb `new`: writes a task that trains as it is, with a comment on every part that a user will change."""

from __future__ import annotations

import shlex
import sys
from importlib import resources
from pathlib import Path

from stormo.errors import SettingError, full_disk, unknown_name
from stormo.tasks.find import check_file_name
from stormo.telemetry.text import write_text

KINDS = {
    "classification": "classification.py",
    "regression": "regression.py",
    "language-model": "language_model.py",
}


def main(named: str, kind: str) -> int:
    """Write the file, say what to type next, return the exit code."""
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
    name = shlex.quote(str(path))
    said = f"""\
{path} is written: a task of kind {kind} that trains as it is.
  stormo train {name}                 train it
  stormo train {name} --num-gpus 2    on two GPUs, or on two processes of a machine without
  stormo train {name} --help          its options and all others
"""
    write_text(said, sys.stdout)
    return 0
