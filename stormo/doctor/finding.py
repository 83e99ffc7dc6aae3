"""What a check found, and a list of findings as text, as JSON and as an exit code."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TextIO, TypeVar, get_args

from stormo.errors import EXIT_FAILURE, StormoError, pluralize
from stormo.telemetry.text import write_text

Level = Literal["ok", "note", "warning", "error"]
Fact = float | int | str | bool | None
_T = TypeVar("_T")
_K = TypeVar("_K", bound=Hashable)

_LEVELS: tuple[Level, ...] = get_args(Level)
_COLOURS: dict[Level, str] = {"ok": "32", "note": "36", "warning": "33", "error": "1;31"}
_Paint = Callable[[str, str], str]  # text, colour
_NO_BREAK_SPACE = "\xa0"
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=\S)")
_MAX_WIDTH = 120


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found, and how to fix it."""

    check: str  # a stable short name: "gpu-driver", "open-files"
    level: Level
    text: str  # what was found, with its numbers
    fix: str = ""  # how to fix it; a warning and an error always have one
    facts: Mapping[str, Fact] = field(default_factory=dict)  # for scripts; names carry units
    where: str = ""  # host, rank, link, GPU; empty for this machine
    group: str = ""  # the heading it is shown under

    def __post_init__(self) -> None:
        assert self.level in _LEVELS, self.level
        assert self.fix or self.level in ("ok", "note"), f"{self.check}: a {self.level} without a fix"


def exit_code(findings: Iterable[Finding]) -> int:
    """1 if there is an error, else 0."""
    return EXIT_FAILURE if any(finding.level == "error" for finding in findings) else 0


def as_json(findings: Sequence[Finding]) -> str:
    """All findings, how many there are of each level, and the exit code, as strict JSON."""
    document = {
        "exit_code": exit_code(findings),
        "counts": {level: sum(finding.level == level for finding in findings) for level in _LEVELS},
        "findings": [_as_dict(finding) for finding in findings],
    }
    return json.dumps(document, indent=2, allow_nan=False)


def show(findings: Sequence[Finding], stream: TextIO) -> None:
    """Print all findings by group, then what to fix, then the number of each level."""
    paint = _painter(stream)
    width = min(shutil.get_terminal_size((100, 24)).columns, _MAX_WIDTH)
    lines = [*_listing(findings, width, paint), *_fixes(findings, width, paint), _count(findings)]
    write_text("".join(f"{line}\n" for line in lines), stream, is_coloured=True)


def grouped(items: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    """The items by their key, in order."""
    groups: dict[_K, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _as_dict(finding: Finding) -> dict[str, Any]:
    texts = {key: getattr(finding, key) for key in ("group", "check", "level", "where", "text", "fix")}
    facts = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in finding.facts.items()
    }
    return {**texts, "facts": facts}


def _listing(findings: Sequence[Finding], width: int, paint: _Paint) -> list[str]:
    groups = grouped(findings, lambda finding: finding.group or finding.where)
    check_width = max((len(finding.check) for finding in findings), default=0)
    indent = 2 + len("warning") + 2 + check_width + 2
    lines: list[str] = []
    for name, members in groups.items():
        lines.append(paint(name, "1"))
        for finding in members:
            text = f"{finding.where}: {finding.text}" if finding.where and finding.group else finding.text
            first, *rest = _wrapped(text, width - indent)
            level = paint(f"{finding.level:<7}", _COLOURS[finding.level])
            lines.append(f"  {level}  {finding.check:<{check_width}}  {first}")
            if finding.level == "note" and finding.fix:
                rest += _wrapped(finding.fix, width - indent, mark="→ ")
            lines += [" " * indent + line for line in rest]
        lines.append("")
    return lines


def _fixes(findings: Sequence[Finding], width: int, paint: _Paint) -> list[str]:
    urgent = [finding for level in ("error", "warning") for finding in findings if finding.level == level]
    lines = [paint("to fix", "1")] if urgent else []
    indent = 2 + len("warning") + 2
    for finding in urgent:
        where = f" ({finding.where})" if finding.where else ""
        first, *rest = _wrapped(f"{finding.check}{where}: {finding.text}", width - indent)
        lines.append(f"  {paint(f'{finding.level:<7}', _COLOURS[finding.level])}  {first}")
        lines += [" " * indent + line for line in [*rest, *_wrapped(finding.fix, width - indent, mark="→ ")]]
    return [*lines, ""] if urgent else []


def _count(findings: Sequence[Finding]) -> str:
    parts = []
    for level in reversed(_LEVELS):
        number = sum(finding.level == level for finding in findings)
        if number or level == "ok":
            parts.append(f"{number} ok" if level == "ok" else pluralize(number, level))
    return ", ".join(parts)


def _wrapped(text: str, width: int, mark: str = "") -> list[str]:
    """Lines of at most that width; commands, paths, and a number with its unit stay whole."""
    lines = textwrap.wrap(
        mark + _BEFORE_UNIT.sub(_NO_BREAK_SPACE, text),
        max(width, 24),
        subsequent_indent=" " * len(mark),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_NO_BREAK_SPACE, " ") for line in lines] or [mark.strip()]


def _painter(stream: TextIO) -> _Paint:
    """Colours text on a terminal that wants it."""
    is_plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") in ("dumb", "unknown")
    if is_plain or not stream.isatty():
        return lambda text, _: text
    return lambda text, colour: f"\x1b[{colour}m{text}\x1b[0m"


def in_one_line(error: Exception) -> str:
    """The error as text of a finding."""
    if isinstance(error, StormoError):
        return str(error).rstrip(".")
    first = next(iter(str(error).splitlines()), "")[:300]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
