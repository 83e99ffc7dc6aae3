"""docs/mistakes.md, made of the table."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.mistakes.mistake import Mistake
from tests.mistakes.scripts import SCRIPT_KINDS
from tests.mistakes.table import KINDS

PAGE = Path(__file__).parents[2] / "docs" / "mistakes.md"
_HEAD = """\
# Mistakes and their answers

What stormo says about mistakes in your own code. Each one ends with exit code 2 and leaves no run behind. An error that
your code raises is shown with its full traceback; the exit code is 1.

A test trains each row. `python -m tests.mistakes` writes this page; do not edit it by hand.
"""


def page() -> str:
    """The whole page."""
    return _HEAD + "".join(f"\n## {title}\n\n{_table(mistakes)}" for title, mistakes in (KINDS | SCRIPT_KINDS).items())


def _table(mistakes: Iterable[Mistake]) -> str:
    rows = [f"| {mistake.name} | {_cell(mistake.says)} |" for mistake in mistakes]
    return "\n".join(["| mistake | what stormo says |", "|---|---|", *rows, ""])


def _cell(text: str) -> str:
    sentence = text.splitlines()[0]  # in the terminal a traceback may follow
    assert "`" not in sentence
    return f"`{sentence}`".replace("|", "\\|")
