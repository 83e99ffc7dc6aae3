"""Hostile peers."""

from __future__ import annotations

from pathlib import Path

from benchmarks.hostile.verdict import Verdict


def run(folder: Path) -> list[Verdict]:
    """Nothing yet."""
    return []
