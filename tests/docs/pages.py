"""The pages of the documentation: their commands, their code, and the output that they show."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("**/*.md"))]


@dataclass(frozen=True)
class Command:
    """A command of a console block."""

    page: Path
    text: str
    output: list[str]
    around: str  # its heading and the paragraphs beside its block


def read(page: Path) -> str:
    """The text of a page."""
    return page.read_text(encoding="utf-8")


def commands(page: Path) -> list[Command]:
    """All commands of a page, each on one line."""
    found, text = [], read(page)
    for block in re.finditer(r"```console\n(.*?)```", text, re.DOTALL):
        before = text[: block.start()].rstrip().rpartition("\n\n")[2]
        after = text[block.end() :].lstrip().partition("\n\n")[0].partition(" runs ")[0]
        heading = re.findall(r"^## .*$", text[: block.start()], re.MULTILINE)[-1:]
        around = " ".join([before, after[:40], *heading])
        for part in re.split(r"^\$ ", block[1], flags=re.MULTILINE)[1:]:
            command, *output = re.sub(r" \\\n\s+", " ", part).splitlines()
            found.append(Command(page, command, [line for line in output if line], around))
    return found


def check_shown(page: Path, shown: str, printed: str) -> None:
    """Fail where a page does not show what is printed; `UPDATE_GOLDEN=1` writes it into the page."""
    if os.environ.get("UPDATE_GOLDEN"):
        page.write_text(read(page).replace(shown, printed), encoding="utf-8")
    assert printed in read(page), f"{page.name} shows\n{shown}\ninstead of\n{printed}"


def check_plan(page: Path, shown: str, printed: str) -> None:
    """Like `check_shown`, for some lines of a plan, found by their labels; what follows … on a page is not compared."""
    for line in shown.splitlines():
        label = line.split("  ")[0]
        (found,) = (one for one in printed.splitlines() if one.split("  ")[0] == label)
        if not (line.endswith("…") and found.startswith(line.removesuffix("…"))):
            check_shown(page, line, found)
