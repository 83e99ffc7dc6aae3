"""Every block of docs/your-own-model.md and docs/scripts.md is run: files are written, commands typed, output compared.

One command is started as a user does, with an agent of its own; the others are run by `tests.programs`.
"""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import programs

ROOT = Path(__file__).parents[2]
PAGE = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("your-own-model.md", "scripts.md"))
FILES = dict(re.findall(r"<!-- (\S+\.py) -->\n```python\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [
    (command, [line for line in rest.split("\n") if line])
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    for command, _, rest in (part.partition("\n") for part in block.split("$ ")[1:])
]
AS_TYPED = ["run", "resumable.py"]


def test_no_block_is_left_out() -> None:
    assert PAGE.count("```") == 2 * (len(FILES) + len(re.findall(r"```console", PAGE)))
    assert len(COMMANDS) == 12
    assert sum(command.split()[1:3] == AS_TYPED for command, _ in COMMANDS) == 1


@pytest.mark.parametrize(("command", "expected"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_command_prints_what_the_page_says(command: str, expected: list[str], tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    done = _start(command.split(), tmp_path)
    assert done.returncode == 0, done.stderr
    # What the machine took, or why it is not known, is not on the page.
    printed = [line for line in done.stdout.splitlines() if not line.startswith("Energy: ")]
    assert matches(printed, expected), done.stdout


def _start(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    program, *arguments = words
    if program == "python":
        return programs.run(arguments, folder)
    if arguments[:2] == AS_TYPED:
        command = [sys.executable, "-m", "stormo", *arguments]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    if arguments[0] == "run":
        _, script, flag, num_workers = arguments
        assert flag == "--num-gpus"
        return programs.run([script], folder, int(num_workers))
    num_ranks = 1 if "--dry-run" in arguments else int(arguments[arguments.index("--num-gpus") + 1])
    return programs.run(["-m", "stormo", *arguments], folder, num_ranks)


def matches(lines: list[str], expected: list[str]) -> bool:
    """Whether lines are as expected; `…` stands for any text within a line, and alone for any lines."""
    parts = [r"(?:.*\n)*?" if line == "…" else ".*?".join(map(re.escape, line.split("…"))) + "\n" for line in expected]
    return re.fullmatch("".join(parts), "".join(line + "\n" for line in lines)) is not None


def test_five_lines_and_the_import() -> None:
    """Of each pair in examples/, and of the page, whose script has a second loader."""
    pairs = [(FILES["train.py"], FILES["train_world.py"], 6)]
    for name in ("resnet", "regression"):
        plain, world = (
            (ROOT / "examples" / f"{name}_{kind}.py").read_text(encoding="utf-8") for kind in ("plain", "world")
        )
        pairs.append((plain.partition("\n")[2], world.partition("\n")[2], 5))
    for plain, world, most in pairs:
        difference = list(difflib.unified_diff(plain.splitlines(), world.splitlines(), lineterm="", n=0))[2:]
        changed = [line for line in difference if line.startswith("+") and line not in ("+", "+import stormo")]
        removed = [line for line in difference if line.startswith("-")]
        assert len(changed) <= most, changed
        assert len(removed) <= most - 2, removed
