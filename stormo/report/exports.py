"""Every series and table of the page as CSV files, and every figure as a PNG; nothing is thinned here."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from stormo.errors import MissingPackageError
from stormo.report.charts import AXES, COLOURS, DASHES, PATTERNS, SYMBOLS, Chart, Lanes, Panel, Stack, line_styles

_COLOURS, _DASHES = COLOURS["light"], tuple(DASHES.values())
_MARKERS, _HATCHES = tuple(SYMBOLS.values()), tuple(PATTERNS.values())
_MOST_MARKERS = 12


def check_matplotlib() -> None:
    """Refuse `--png` without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingPackageError("matplotlib", "--png", "plot")


def write_csv(folder: Path, panels: Sequence[Panel], labels: Sequence[str]) -> list[Path]:
    """One file for each chart, picture of workers and table; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, Iterable[Sequence[Any]]] = {}
    for panel in panels:
        files |= {chart.id: _chart_rows(chart, labels) for chart in panel.charts if chart.whole}
        files |= {lanes.id: lanes.records for lanes in panel.lanes}
        files |= {f"table-{table.id}": [table.columns, *table.rows] for table in panel.tables}
    return [_write(folder / f"{name}.csv", rows) for name, rows in files.items()]


def _chart_rows(chart: Chart, labels: Sequence[str]) -> Iterable[Sequence[Any]]:
    yield ["run", "series", *AXES, chart.y_title]
    for line in chart.whole:
        for index, value in enumerate(line.y):
            places = [line.at[axis][index] if axis in line.at else "" for axis in AXES]
            yield [labels[line.run], line.name, *places, "" if value is None else repr(value)]


def _write(path: Path, rows: Iterable[Sequence[Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([_no_formula(cell) for cell in row] for row in rows)
    return path


def _no_formula(cell: Any) -> Any:
    """Put an apostrophe before a text that a spreadsheet would take for a formula; negative numbers stay."""
    if not isinstance(cell, str) or cell[:1] not in ("=", "+", "-", "@", "\t", "\r"):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def write_png(folder: Path, panels: Sequence[Panel], labels: Sequence[str]) -> list[Path]:
    """One picture for each figure, over the steps where it has them; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for panel in panels:
        for chart in panel.charts:
            if chart.series:
                written.append(_picture(folder / f"{chart.id}.png", 8, 4.5, _draw_chart, chart, labels))
        for stack in panel.stacks:
            height = 1.6 + 0.5 * len(stack.bars)
            written.append(_picture(folder / f"stack-{stack.id}.png", 8, height, _draw_stack, stack))
        for lanes in panel.lanes:
            height = 1.4 + 0.35 * len(lanes.rows)
            written.append(_picture(folder / f"{lanes.id}.png", 9, height, _draw_lanes, lanes))
    return written


def _picture(path: Path, width: float, height: float, draw: Callable[..., None], *content: Any) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    draw(figure.add_subplot(), *content)
    figure.savefig(path, dpi=150)
    return path


def _plain(text: str) -> str:
    """The text without mathtext, which matplotlib reads between two dollar signs."""
    return text.replace("$", r"\$")


def _draw_chart(plot: Any, chart: Chart, labels: Sequence[str]) -> None:
    axis = next(axis for axis in AXES if all(axis in line.at for line in chart.series))
    for line, style in zip(chart.series, line_styles(chart.series, labels), strict=True):
        has_markers = len(chart.series) > 1 or line.mode == "points"
        plot.plot(
            line.at[axis],
            [float("nan") if value is None else value for value in line.y],
            color=_COLOURS[style.colour % len(_COLOURS)],
            linestyle=_DASHES[style.dash % len(_DASHES)],
            marker=_MARKERS[style.colour % len(_MARKERS)] if has_markers else None,
            markevery=max(len(line.y) // _MOST_MARKERS, 1),
            markersize=5,
            drawstyle="steps-post" if line.mode == "steps" else "default",
            label=_plain(style.label),
        )
    plot.set(xlabel={"time_s": "running time (s)"}.get(axis, axis), ylabel=_plain(chart.y_title))
    plot.set_title(_plain(chart.title), loc="left")
    if chart.from_zero:
        plot.set_ylim(bottom=0)
    plot.grid(axis="y", alpha=0.3)
    if len(chart.series) > 1:
        plot.legend(fontsize="small")


def _draw_stack(plot: Any, stack: Stack) -> None:
    left = [0.0] * len(stack.bars)
    for index, (name, values) in enumerate(stack.parts):
        colour, hatch = _COLOURS[index % len(_COLOURS)], _HATCHES[index % len(_HATCHES)]
        plot.barh(range(len(left)), values, left=left, label=name, color=colour, hatch=hatch, edgecolor="w")
        left = [before + value for before, value in zip(left, values, strict=True)]
    _finish_bars(plot, stack.bars, stack.x_title, stack.title)


def _draw_lanes(plot: Any, lanes: Lanes) -> None:
    end = max(bar.start + bar.length for _, _, bars in lanes.kinds for bar in bars)
    for name, colour, bars in lanes.kinds:
        for number, bar in enumerate(bars):
            alpha = 1 - min(0.15 * bar.shade, 0.6)
            look = {"color": _COLOURS[colour], "alpha": alpha, "edgecolor": "w", "linewidth": 0.5}
            plot.barh(bar.row, bar.length, left=bar.start, label=None if number else name, **look)
            if bar.length > 0.012 * end * len(bar.label):
                middle = bar.start + bar.length / 2, bar.row
                plot.annotate(bar.label, middle, ha="center", va="center", color="w", fontsize=7)
    plot.set_xlim(0, end)
    _finish_bars(plot, lanes.rows, lanes.x_title, lanes.title)


def _finish_bars(plot: Any, rows: Sequence[str], x_title: str, title: str) -> None:
    plot.set_yticks(range(len(rows)), [_plain(row) for row in rows])
    plot.invert_yaxis()
    plot.set_xlabel(x_title)
    plot.set_title(_plain(title), loc="left")
    plot.figure.legend(loc="outside lower center", ncols=4, fontsize="small")
