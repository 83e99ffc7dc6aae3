"""`stormo report RUN…`: one HTML page of one or several runs, and their figures as CSV and PNG files."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from stormo.config.options import Parser
from stormo.errors import SettingError, pluralize, require_package
from stormo.report.charts import AXES, COLOURS, DASHES, PATTERNS, SYMBOLS, Chart, Lanes, Panel, Stack, line_styles
from stormo.report.history import read_history
from stormo.report.page import check_plotly, make_document, make_page, make_panels
from stormo.telemetry.folder import RunFolder, write_whole
from stormo.telemetry.runs_folder import find_run
from stormo.telemetry.text import write_text

_COLOURS, _DASHES = COLOURS["light"], tuple(DASHES.values())
_MARKERS, _HATCHES = tuple(SYMBOLS.values()), tuple(PATTERNS.values())
_MAX_MARKERS = 12


def main(arguments: Sequence[str]) -> int:
    """Write the page, and the CSV and PNG files that were asked for."""
    parser = Parser(
        prog="stormo report",
        description="Write one HTML page of a run, or one that compares several. It opens without a network.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", metavar="RUN", nargs="*", help="name of a run, or its folder (default: the newest)")
    parser.add_argument("--runs-folder", default="runs", metavar="FOLDER", help="folder of all runs (default: runs)")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="page to write (default: report.html in the run's folder; of several runs, in the folder of all runs)",
    )
    parser.add_argument("--csv", metavar="FOLDER", help="write every series and table as CSV files too")
    parser.add_argument("--png", metavar="FOLDER", help="write every figure as a PNG too (needs stormo[plot])")
    options = parser.parse_args(list(arguments))
    check_plotly()
    if options.png is not None:
        require_package("matplotlib", "--png", "plot")
    for option in ("output", "csv", "png"):
        if getattr(options, option) == "":
            raise SettingError(f"--{option} was set to an empty name", "a name is needed", "name a file or folder")
    parent = Path(options.runs_folder)
    found = [find_run(parent, name) for name in options.runs or [None]]
    folders = list({run.path.resolve(): run for run in found}.values())
    labels = run_labels(folders)
    histories = [read_history(folder, label) for folder, label in zip(folders, labels, strict=True)]
    default = folders[0].path / "report.html" if len(folders) == 1 else parent / "report.html"
    output = Path(options.output) if options.output is not None else default
    page, is_given = make_page(make_document(histories)), options.output is not None
    what = f"--output {output} was set" if is_given else f"the page would be {output}"
    write_page(output, page, what, "name another file" if is_given else "name another file with --output")
    lines = [f"page      {output}  ({output.stat().st_size / 1e6:.1f} MB; opens without a network)"]
    for option, name, write in (("--csv", options.csv, write_csv), ("--png", options.png, write_png)):
        if name is not None:
            try:
                written = write(Path(name), make_panels(histories), labels)
            except OSError as error:
                raise _cannot_write(f"{option} {name} was set", error, "name another folder") from None
            lines.append(f"{option[2:]:9} {name}  ({pluralize(len(written), 'file')})")
    write_text("".join(f"{line}\n" for line in lines), sys.stdout)
    return 0


def run_labels(folders: Sequence[RunFolder]) -> list[str]:
    """The names of the runs, or their paths where names are equal."""
    names = [folder.name for folder in folders]
    return [str(folder.path) if names.count(name) > 1 else name for folder, name in zip(folders, names, strict=True)]


def write_page(path: Path, text: str, what: str, instead: str) -> None:
    """Write a page; `what` and `instead` begin and end the error where it cannot be written."""
    if path.is_dir():
        raise SettingError(what, "it is a folder", instead)
    if path.exists() and not path.is_file():
        # Root could replace a device by the file.
        raise SettingError(what, "it is not an ordinary file", instead)
    try:
        write_whole(path, text)
    except OSError as error:
        raise _cannot_write(what, error, instead) from None


def _cannot_write(what: str, error: OSError, instead: str) -> SettingError:
    return SettingError(what, f"it cannot be written ({error.strerror})", instead)


def write_csv(folder: Path, panels: Sequence[Panel], labels: Sequence[str]) -> list[Path]:
    """Write a file for each chart, timeline and table, nothing thinned; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, Iterable[Sequence[Any]]] = {}
    for panel in panels:
        files |= {chart.id: _chart_rows(chart, labels) for chart in panel.charts if chart.whole}
        files |= {lanes.id: lanes.records for lanes in panel.lanes}
        files |= {f"table-{table.id}": [table.columns, *table.rows] for table in panel.tables}
    return [_write_rows(folder / f"{name}.csv", rows) for name, rows in files.items()]


def _chart_rows(chart: Chart, labels: Sequence[str]) -> Iterable[Sequence[Any]]:
    yield ["run", "series", *AXES, chart.y_title]
    for line in chart.whole:
        for index, value in enumerate(line.y):
            positions = [line.at[axis][index] if axis in line.at else "" for axis in AXES]
            yield [labels[line.run], line.name, *positions, "" if value is None else repr(value)]


def _write_rows(path: Path, rows: Iterable[Sequence[Any]]) -> Path:
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
    """Write a picture for each figure, over steps where it has them; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for panel in panels:
        for chart in panel.charts:
            if chart.series:
                written.append(_save_figure(folder / f"{chart.id}.png", 8, 4.5, _draw_chart, chart, labels))
        for stack in panel.stacks:
            height = 1.6 + 0.5 * len(stack.bars)
            written.append(_save_figure(folder / f"stack-{stack.id}.png", 8, height, _draw_stack, stack))
        for lanes in panel.lanes:
            height = 1.4 + 0.35 * len(lanes.rows)
            written.append(_save_figure(folder / f"{lanes.id}.png", 9, height, _draw_lanes, lanes))
    return written


def _save_figure(path: Path, width: float, height: float, draw: Callable[..., None], *content: Any) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    draw(figure.add_subplot(), *content)
    figure.savefig(path, dpi=150)
    return path


def _no_mathtext(text: str) -> str:
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
            markevery=max(len(line.y) // _MAX_MARKERS, 1),
            markersize=5,
            drawstyle="steps-post" if line.mode == "steps" else "default",
            label=_no_mathtext(style.label),
        )
    plot.set(xlabel={"time_s": "running time (s)"}.get(axis, axis), ylabel=_no_mathtext(chart.y_title))
    plot.set_title(_no_mathtext(chart.title), loc="left")
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
            style = {"color": _COLOURS[colour], "alpha": alpha, "edgecolor": "w", "linewidth": 0.5}
            plot.barh(bar.row, bar.length, left=bar.start, label=None if number else name, **style)
            if bar.length > 0.012 * end * len(bar.label):
                middle = bar.start + bar.length / 2, bar.row
                plot.annotate(bar.label, middle, ha="center", va="center", color="w", fontsize=7)
    plot.set_xlim(0, end)
    _finish_bars(plot, lanes.rows, lanes.x_title, lanes.title)


def _finish_bars(plot: Any, rows: Sequence[str], x_title: str, title: str) -> None:
    plot.set_yticks(range(len(rows)), [_no_mathtext(row) for row in rows])
    plot.invert_yaxis()
    plot.set_xlabel(x_title)
    plot.set_title(_no_mathtext(title), loc="left")
    plot.figure.legend(loc="outside lower center", ncols=4, fontsize="small")
