"""The words of a command line: settings told as flags, and flags taken out again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as flags."""
    words: list[str] = []
    for key, value in settings.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif str(value).startswith("-") or str(value) == "":
            words.append(f"--{name}={value}")
        else:
            words += [f"--{name}", str(value)]
    return words


def without_flags(words: Sequence[str], flags: Mapping[str, int]) -> list[str]:
    """A command line without some flags, each with so many values."""
    kept: list[str] = []
    skipped = 0
    for word in words:
        if skipped:
            skipped -= 1
            continue
        name, equals, _ = word.partition("=")
        name = f"--{name[2:].replace('_', '-').removeprefix('no-')}" if name.startswith("--") else name
        if name in flags:
            skipped = 0 if equals else flags[name]
            continue
        kept.append(word)
    return kept
