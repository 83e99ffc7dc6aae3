"""The verb `runs`: the runs of a folder, newest first, one line each.

The state comes from `summary.json`; without one, from whether a process holds the run, or else from its last event.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from stormo.config.options import Parser
from stormo.errors import SettingError
from stormo.telemetry.folder import to_json
from stormo.telemetry.runs_folder import MISSING, RunOverview, align, list_runs, overview
from stormo.telemetry.text import format_duration, format_figure, format_rate, unit_rate, write_text

_TITLES = ("name", "task", "state", "epochs", "accuracy", "loss", "speed", "time", "workers")
_DROPPED_FIRST = ("workers", "speed", "time", "loss", "task", "epochs")  # in this order when the terminal is too narrow
_TEXT_COLUMNS = ("name", "task", "state")  # the others are figures, flush right


def main(arguments: Sequence[str]) -> int:
    """Read the options and list the runs."""
    parser = Parser(prog="stormo runs", description="List the runs of a folder, newest first.", allow_abbrev=False)
    parser.add_argument("--runs-folder", default="runs", metavar="FOLDER", help="folder of all runs (default: runs)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parsed = parser.parse_args(arguments)
    folder, now_unix_s = Path(parsed.runs_folder), time.time()
    if folder.exists() and not folder.is_dir():
        raise SettingError(f"--runs-folder {folder} was set", "it is no folder", "name the folder that holds your runs")
    overviews = [overview(run, now_unix_s=now_unix_s) for run in list_runs(folder)]
    if parsed.json:
        content = [to_json(asdict(one)) for one in overviews]
        write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", sys.stdout)
    elif not overviews:
        write_text(f"No run in {folder}: start one with `stormo train`, or name the folder of yours.\n", sys.stdout)
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        notes = [f"{one.name}: {one.note}" for one in overviews if one.note]
        write_text("\n".join([*_table([_cells(one) for one in overviews], width), *notes]) + "\n", sys.stdout)
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


def _table(rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """The runs as aligned lines; a terminal that is too narrow loses the least important columns."""
    columns = list(_TITLES)
    for dropped in ("", *_DROPPED_FIRST):
        columns = [title for title in columns if title != dropped]
        cells = [[row[_TITLES.index(title)] for title in columns] for row in [_TITLES, *rows]]
        lines = align(cells, num_text_columns=len(set(columns) & set(_TEXT_COLUMNS)))
        if width is None or max(map(len, lines)) <= width:
            break
    return lines
