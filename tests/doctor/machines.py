"""Machines that a test describes by their files, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

from stormo.doctor.finding import Finding


def write(root: Path, files: dict[str, object]) -> None:
    """Make the files of a machine."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def bad(findings: list[Finding]) -> list[tuple[str, str]]:
    """What is not well: check and level."""
    return [(one.check, one.level) for one in findings if one.level != "ok"]
