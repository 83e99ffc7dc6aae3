"""Panels, charts and tables as plain data: described once, for the page (plotly) and for `--png` (matplotlib)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

MAX_POINTS = 1200  # a longer line is drawn by the lowest and highest point of each interval
MAX_LINES = 12  # a chart with more shows the lowest, the mean and the highest of each run
_MAX_COMPARED_LINES = 6  # the same, where several runs are compared
_MERGED_INTERVALS = 300

AXES = ("step", "epoch", "time_s")

# Okabe and Ito's colours, which the colour-blind can distinguish, ordered for a light and a dark background; dashes,
# symbols and patterns by plotly's name, each with matplotlib's.
COLOURS = {
    "light": ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8400"),
    "dark": ("#56B4E9", "#E69F00", "#2BBF95", "#CC79A7", "#F0E442", "#E8793A", "#FFFFFF", "#4C9BD6"),
}
DASHES: dict[str, Any] = {
    **{"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."},
    **{"longdash": (0, (8, 3)), "longdashdot": (0, (8, 2, 2, 2))},
}
SYMBOLS = {
    **{"circle": "o", "square": "s", "triangle-up": "^", "diamond": "D"},
    **{"cross": "P", "x": "X", "triangle-down": "v", "star": "*"},
}
PATTERNS = {"": "", "/": "//", ".": "..", "x": "xx", "-": "--", "\\": "\\\\", "+": "++"}
STYLE = {"colours": COLOURS, "dashes": list(DASHES), "symbols": list(SYMBOLS), "patterns": list(PATTERNS)}


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line: its positions on each axis it has, and its values; None is a gap."""

    run: int  # position of the run on the page
    name: str
    at: Mapping[str, Sequence[float]]
    y: Sequence[float | None]
    mode: str = "lines"  # lines, points (joined), steps (a value holds until the next)

    def thinned(self, most: int = MAX_POINTS) -> Series:
        """The line with at most about that many points; it keeps its peaks."""
        if len(self.y) <= most:
            return self
        kept = thin(self.y, most)
        at = {axis: [positions[index] for index in kept] for axis, positions in self.at.items()}
        return replace(self, at=at, y=[self.y[index] for index in kept])


class LineStyle(NamedTuple):
    """The label of a line, and its index in `COLOURS` (and `SYMBOLS`) and in `DASHES`."""

    label: str
    colour: int
    dash: int


def line_styles(series: Sequence[Series], runs: Sequence[str]) -> list[LineStyle]:
    """Where runs are compared, a colour is a run and a dash a name."""
    names = list(dict.fromkeys(line.name for line in series))
    styles = []
    for line in series:
        kind, label = names.index(line.name), line.name
        if len(runs) > 1:
            label = runs[line.run] if len(names) == 1 else f"{runs[line.run]}: {line.name}"
        styles.append(LineStyle(label, line.run if len(runs) > 1 else kind, kind))
    return styles


def thin(values: Sequence[float | None], most: int) -> list[int]:
    """Indexes of the first, the last, and the lowest and highest value of each of `most / 2` intervals, in order."""
    num_intervals = max((most - 2) // 2, 1)
    kept = {0, len(values) - 1}
    for interval in range(num_intervals):
        begin = interval * len(values) // num_intervals
        end = (interval + 1) * len(values) // num_intervals
        known = [index for index in range(begin, end) if values[index] is not None]
        if known:
            kept.add(min(known, key=lambda index: values[index] or 0.0))
            kept.add(max(known, key=lambda index: values[index] or 0.0))
        elif end > begin:
            kept.add(begin)  # the gap stays a gap
    return sorted(kept)


def make_line(
    run: int, name: str, points: Iterable[tuple[Mapping[str, float], Any]], *, mode: str = "lines"
) -> list[Series]:
    """A list with the line through (position, value) points, empty if no value is known."""
    at: dict[str, list[float]] = {}
    y: list[float | None] = []
    for positions, value in points:
        for axis, position in positions.items():
            at.setdefault(axis, []).append(position)
        y.append(float(value) if isinstance(value, int | float) and math.isfinite(value) else None)
    return [Series(run=run, name=name, at=at, y=y, mode=mode)] if any(value is not None for value in y) else []


def merge_lines(series: Sequence[Series], noun: str) -> tuple[list[Series], str]:
    """The lines or, if there are too many, the lowest, mean and highest of each run, with a note."""
    runs = sorted({line.run for line in series})
    if len(series) <= (MAX_LINES if len(runs) == 1 else _MAX_COMPARED_LINES):
        return list(series), ""
    drawn: list[Series] = []
    for run in runs:
        drawn += _merge_run([line for line in series if line.run == run], noun)
    return (
        drawn,
        f"{len(series)} {noun}: the lowest, the mean and the highest are drawn; stormo report --csv writes all.",
    )


def _merge_run(series: Sequence[Series], noun: str) -> list[Series]:
    if len(series) <= 3:
        return list(series)
    axes = [axis for axis in AXES if all(axis in line.at for line in series)]
    axis_name = axes[-1]
    low = min(min(line.at[axis_name]) for line in series)
    high = max(max(line.at[axis_name]) for line in series)
    width = (high - low) / _MERGED_INTERVALS or 1.0
    buckets: dict[int, list[tuple[dict[str, float], float]]] = {}
    for line in series:
        for index, value in enumerate(line.y):
            if value is not None:
                positions = {axis: line.at[axis][index] for axis in axes}
                buckets.setdefault(int((positions[axis_name] - low) / width), []).append((positions, value))
    merges: dict[str, Callable[[list[float]], float]] = {
        "lowest": min,
        "mean": lambda values: math.fsum(values) / len(values),
        "highest": max,
    }
    return [
        found
        for name, merge in merges.items()
        for found in make_line(
            series[0].run,
            f"{name} of {len(series)} {noun}",
            ((bucket[0][0], merge([value for _, value in bucket])) for _, bucket in sorted(buckets.items())),
        )
    ]


@dataclass(frozen=True)
class Chart:
    """A line chart, or the reason why it is empty."""

    id: str
    title: str
    y_title: str
    series: Sequence[Series] = ()
    all_series: Sequence[Series] = ()  # for the CSV files, where fewer are drawn
    from_zero: bool = False
    top: float | None = None  # end of the axis, such as 100 %
    why_empty: str = ""
    note: str = ""

    @property
    def whole(self) -> Sequence[Series]:
        """Every line, drawn or not."""
        return self.all_series or self.series


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Stacked bars, one per run."""

    id: str
    title: str
    x_title: str
    bars: Sequence[str]
    parts: Sequence[tuple[str, Sequence[float]]]  # name, one value a bar


class Bar(NamedTuple):
    """An interval of time in a row."""

    row: int
    start: float
    length: float
    label: str
    hover: str
    shade: int  # 0 is the full colour, higher is paler


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """A timeline: one row per worker, one colour per kind."""

    id: str
    title: str
    x_title: str
    rows: Sequence[str]
    kinds: Sequence[tuple[str, int, Sequence[Bar]]]  # name, colour, bars
    records: Sequence[Sequence[str | float]]  # for the CSV files: a head, then all rows
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Text in rows; the columns from `first_figure` on are figures."""

    id: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    first_figure: int = 99
    marked: Sequence[int] = ()  # rows that differ between the runs
    is_code: bool = False


class Picture(NamedTuple):
    """An image and its caption."""

    title: str
    address: str  # data:…, as the page loads nothing


@dataclass(frozen=True)
class Panel:
    """One section of the page."""

    id: str
    title: str
    about: str = ""
    charts: Sequence[Chart] = ()
    stacks: Sequence[Stack] = ()
    lanes: Sequence[Lanes] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    notes: Sequence[str] = ()
    why_empty: str = ""
