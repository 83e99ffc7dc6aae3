"""Every series and table of the page as CSV files, and every figure as a PNG; here nothing is thinned."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from stormo.errors import MissingPackageError
from stormo.report.charts import AXES, Chart, Lanes, Panel

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8400")  # as in page.js
_DASHES = ("-", "--", ":", "-.", (0, (8, 3)), (0, (8, 2, 2, 2)))
_SYMBOLS = "os^DPXv*"
_MOST_SYMBOLS = 12


def check_matplotlib() -> None:
    """An error with the extra to install where the package of the pictures is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingPackageError("matplotlib", "--png", "plot")


def write_csv(folder: Path, panels: Sequence[Panel], labels: Sequence[str]) -> list[Path]:
    """One file a chart, one a picture of workers and one a table; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for panel in panels:
        for chart in panel.charts:
            if chart.whole:
                written.append(_write(folder / f"{chart.id}.csv", _chart_rows(chart, labels)))
        for lanes in panel.lanes:
            written.append(_write(folder / f"{lanes.id}.csv", lanes.records))
        for table in panel.tables:
            written.append(_write(folder / f"table-{table.id}.csv", [table.columns, *table.rows]))
    return written


def _chart_rows(chart: Chart, labels: Sequence[str]) -> Iterable[Sequence[Any]]:
    yield ["run", "series", *AXES, chart.y_title]
    for line in chart.whole:
        for index, value in enumerate(line.y):
            places = [line.at[axis][index] if axis in line.at else "" for axis in AXES]
            yield [labels[line.run], line.name, *places, "" if value is None else repr(value)]


def _write(path: Path, rows: Iterable[Sequence[Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerows([_harmless(cell) for cell in row] for row in rows)
    return path


def _harmless(cell: Any) -> Any:
    """A text that a spreadsheet would take for a formula gets an apostrophe; negative figures stay figures."""
    if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@", "\t", "\r") and not _is_figure(cell):
        return f"'{cell}"
    return cell


def _is_figure(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def write_png(folder: Path, panels: Sequence[Panel], labels: Sequence[str]) -> list[Path]:
    """One picture a figure, along the steps where it has them; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [chart for panel in panels for chart in panel.charts if chart.series]
    return [
        *(_draw(folder / f"{chart.id}.png", chart, labels) for chart in drawn),
        *(_draw_stack(folder / f"stack-{stack.id}.png", stack) for panel in panels for stack in panel.stacks),
        *(_draw_lanes(folder / f"{lanes.id}.png", lanes) for panel in panels for lanes in panel.lanes),
    ]


def _draw(path: Path, chart: Chart, labels: Sequence[str]) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    plane = figure.add_subplot()
    axis = next(axis for axis in AXES if all(axis in line.at for line in chart.series))
    names = list(dict.fromkeys(line.name for line in chart.series))
    is_compared = len(labels) > 1
    for line in chart.series:
        kind = names.index(line.name)
        own = line.run if is_compared else kind
        plane.plot(
            line.at[axis],
            [float("nan") if value is None else value for value in line.y],
            color=_COLOURS[own % len(_COLOURS)],
            linestyle=_DASHES[kind % len(_DASHES)],
            marker=_SYMBOLS[own % len(_SYMBOLS)] if len(chart.series) > 1 or line.mode == "points" else None,
            markevery=max(len(line.y) // _MOST_SYMBOLS, 1),
            markersize=5,
            drawstyle="steps-post" if line.mode == "steps" else "default",
            # Mathtext would read what stands between two dollar signs.
            label=(f"{labels[line.run]}: {line.name}" if is_compared else line.name).replace("$", r"\$"),
        )
    plane.set(xlabel={"time_s": "running time (s)"}.get(axis, axis), ylabel=chart.y_title.replace("$", r"\$"))
    plane.set_title(chart.title.replace("$", r"\$"), loc="left")
    if chart.from_zero:
        plane.set_ylim(bottom=0)
    plane.grid(axis="y", alpha=0.3)
    if len(chart.series) > 1:
        plane.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    return path


def _draw_stack(path: Path, stack: Any) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.6 + 0.5 * len(stack.bars)), layout="constrained")
    plane = figure.add_subplot()
    left = [0.0] * len(stack.bars)
    for position, (name, values) in enumerate(stack.parts):
        hatch = ("", "//", "..", "xx", "--", "\\\\", "++")[position % 7]
        plane.barh(
            range(len(stack.bars)), values, left=left, label=name, color=_COLOURS[position], hatch=hatch, edgecolor="w"
        )
        left = [before + value for before, value in zip(left, values, strict=True)]
    plane.set_yticks(range(len(stack.bars)), [bar.replace("$", r"\$") for bar in stack.bars])
    plane.invert_yaxis()
    plane.set(xlabel=stack.x_title, title=stack.title)
    figure.legend(loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(path, dpi=150)
    return path


def _draw_lanes(path: Path, lanes: Lanes) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.4 + 0.35 * len(lanes.rows)), layout="constrained")
    plane = figure.add_subplot()
    end = max(bar.start + bar.length for _, _, bars in lanes.kinds for bar in bars)
    for name, colour, bars in lanes.kinds:
        for number, bar in enumerate(bars):
            plane.barh(
                bar.row,
                bar.length,
                left=bar.start,
                label=None if number else name,
                color=_COLOURS[colour],
                alpha=1 - min(0.15 * bar.shade, 0.6),
                edgecolor="w",
                linewidth=0.5,
            )
            if bar.length > 0.012 * end * len(bar.label):
                where = bar.start + bar.length / 2, bar.row
                plane.annotate(bar.label, where, ha="center", va="center", color="w", fontsize=7)
    plane.set_yticks(range(len(lanes.rows)), lanes.rows)
    plane.invert_yaxis()
    plane.set(xlabel=lanes.x_title, xlim=(0, end))
    plane.set_title(lanes.title.replace("$", r"\$"), loc="left")
    figure.legend(loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(path, dpi=150)
    return path
