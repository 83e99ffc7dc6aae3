"""`stormo runs`: the runs of a folder, newest first, one line each.

The state comes from `summary.json`; without one, from whether a process holds the run, or else from its last event.
"""

from __future__ import annotations

import json as json_format
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from stormo.errors import SettingError
from stormo.telemetry.folder import to_json
from stormo.telemetry.runs_folder import MISSING, RunOverview, align, list_runs, overview
from stormo.telemetry.text import encodable, format_duration, format_figure, format_rate, unit_rate, write_text

_STATE_STYLES = {"running": "cyan", "done": "green", "stopped": "yellow", "interrupted": "yellow"}
_TITLES = ("name", "task", "state", "epochs", "accuracy", "loss", "speed", "time", "workers")
_DROPPED_FIRST = ("workers", "speed", "time", "loss", "task", "epochs")  # in this order when the terminal is too narrow
_NAME_FOLDS_FROM = 24  # a longer name goes over two lines before a column is dropped
_CELL_FRAME_WIDTH = 3  # what rich puts around a cell
_NUM_TEXT_COLUMNS = 3  # the first ones are text, the others figures and flush right


def main(folder: Path, *, json: bool) -> int:
    """List the runs of a folder."""
    now_unix_s = time.time()
    if folder.exists() and not folder.is_dir():
        raise SettingError(f"--runs-folder {folder} was set", "it is no folder", "name the folder that holds your runs")
    overviews = [overview(run, now_unix_s=now_unix_s) for run in list_runs(folder)]
    if json:
        content = [to_json(asdict(one)) for one in overviews]
        write_text(json_format.dumps(content, indent=2, allow_nan=False) + "\n", sys.stdout)
    elif not overviews:
        write_text(f"No run in {folder}: start one with `stormo train`, or name the folder of yours.\n", sys.stdout)
    elif sys.stdout.isatty():
        _print_rich(overviews)
    else:
        lines = align([_TITLES, *map(_cells, overviews)], num_text_columns=_NUM_TEXT_COLUMNS)
        write_text("\n".join([*lines, *_notes(overviews)]) + "\n", sys.stdout)
    return 0


def _cells(one: RunOverview) -> tuple[str, ...]:
    epochs = MISSING if one.epochs_run is None else str(one.epochs_run)
    if one.epochs is not None:
        epochs += f"/{one.epochs}"
    return (
        one.name,
        one.task or MISSING,
        one.state,
        epochs,
        MISSING if one.validation_accuracy is None else f"{one.validation_accuracy:.4f}",
        MISSING if one.validation_loss is None else format_figure(one.validation_loss),
        MISSING if one.units_per_s is None else f"{format_rate(one.units_per_s)} {unit_rate(str(one.unit))}",
        MISSING if one.train_time_s is None else format_duration(one.train_time_s),
        MISSING if one.world_size is None else str(one.world_size),
    )


def _notes(overviews: Sequence[RunOverview]) -> list[str]:
    return [f"{one.name}: {one.note}" for one in overviews if one.note]


def _print_rich(overviews: Sequence[RunOverview]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    rows = [[encodable(cell, sys.stdout) for cell in _cells(one)] for one in overviews]
    widths = {title: max(len(row[column]) for row in [_TITLES, *rows]) for column, title in enumerate(_TITLES)}
    widths["name"] = min(widths["name"], _NAME_FOLDS_FROM)
    for title in _DROPPED_FIRST:
        if sum(width + _CELL_FRAME_WIDTH for width in widths.values()) > console.width:
            del widths[title]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for title in widths:
        is_text = _TITLES.index(title) < _NUM_TEXT_COLUMNS
        # Only the name may break, at any letter, when the terminal is too narrow for it.
        table.add_column(title, justify="left" if is_text else "right", overflow="fold", no_wrap=title != "name")
    for one, row in zip(overviews, rows, strict=True):
        texts = {title: Text(cell) for title, cell in zip(_TITLES, row, strict=True)}
        texts["state"].stylize(_STATE_STYLES.get(one.state, "red"))
        table.add_row(*(texts[title] for title in widths))
    console.print(table)
    for note in _notes(overviews):
        console.print(Text(encodable(note, sys.stdout), "dim"))
