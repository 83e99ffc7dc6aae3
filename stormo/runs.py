"""`stormo runs`: the runs of a folder, newest first, one line each.

The state comes from `summary.json`; without one, from whether a process holds the run, or else from its last event.
"""

from __future__ import annotations

import json as json_format
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stormo.errors import SettingError, StormoError
from stormo.files import BadFileError, read_toml
from stormo.masking import masked
from stormo.telemetry.events import current_events, read_events, speed_of
from stormo.telemetry.files import to_json
from stormo.telemetry.finding import list_runs
from stormo.telemetry.folder import RunFolder, goes_on, read_summary
from stormo.telemetry.text import encodable, format_duration, format_figure, format_rate, unit_rate, write_text

MISSING = "n/a"
_STATES = {"target": "done", "epochs": "done", "signal": "stopped", "divergence": "diverged", "error": "failed"}
_STATE_STYLES = {"running": "cyan", "done": "green", "stopped": "yellow", "interrupted": "yellow"}
_TITLES = ("name", "task", "state", "epochs", "accuracy", "loss", "speed", "time", "workers")
_DROPPED_FIRST = ("workers", "speed", "time", "loss", "task", "epochs")  # in this order when the terminal is too narrow
_NAME_FOLDS_FROM = 24  # a longer name goes over two lines before a column is dropped
_CELL_FRAME_WIDTH = 3  # what rich puts around a cell
_NUM_TEXT_COLUMNS = 3  # the first ones are text, the others figures and flush right


@dataclass(frozen=True, kw_only=True)
class RunOverview:
    """One run at a glance; None is what is not known yet."""

    name: str
    folder: str
    state: str  # running, done, stopped, failed, interrupted or unreadable
    note: str | None = None  # why the state is not certain
    task: str | None = None
    world_size: int | None = None
    epochs_run: int | None = None
    epochs: int | None = None
    validation_accuracy: float | None = None
    validation_loss: float | None = None
    unit: str | None = None  # of the speed: images, tokens, ...
    units_per_s: float | None = None
    train_time_s: float | None = None


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


def overview(run: RunFolder, *, now_unix_s: float) -> RunOverview:
    """What a run's files say about it; a damaged file becomes the state `unreadable`, with the reason."""
    try:
        summary = read_summary(run)
        if summary is not None:
            return _finished(run, summary)
        return _unfinished(run, current_events(read_events(run.events)), now_unix_s)
    except (StormoError, OSError) as error:
        return RunOverview(name=run.name, folder=str(run.path), state="unreadable", note=str(error))


def _finished(run: RunFolder, summary: Mapping[str, Any]) -> RunOverview:
    stopped_by = str(summary.get("stopped_by"))
    unit, units_per_s = speed_of(summary)
    return RunOverview(
        name=run.name,
        folder=str(run.path),
        state=_STATES.get(stopped_by, stopped_by),
        task=summary.get("task"),
        world_size=summary.get("world_size"),
        epochs_run=summary.get("epochs_run"),
        epochs=summary.get("epochs"),
        validation_accuracy=summary.get("validation_accuracy"),
        validation_loss=summary.get("validation_loss"),
        unit=unit,
        units_per_s=units_per_s,
        train_time_s=summary.get("train_time_s"),
    )


def _unfinished(run: RunFolder, events: Sequence[Mapping[str, Any]], now_unix_s: float) -> RunOverview:
    started = last_event(events, "run_started")
    epoch = last_event(events, "epoch_done")
    step = last_event(events, "step_done")
    if events:
        silent_s = max(now_unix_s - float(events[-1].get("time_unix_s", 0.0)), 0.0)
        since = f"last event {_rough_duration(silent_s)} ago"
    else:
        silent_s = max(now_unix_s - run.path.stat().st_mtime, 0.0)
        since = f"no event yet, folder changed {_rough_duration(silent_s)} ago"
    is_running, is_certain = goes_on(run, silent_s)
    judged = "still running" if is_running else "it ended without a word"
    judged = judged if is_certain else "killed or still running"
    newest = max((event for event in (epoch, step) if event), key=lambda event: event.get("step", 0), default={})
    unit, units_per_s = speed_of(newest)
    return RunOverview(
        name=run.name,
        folder=str(run.path),
        state="running" if is_running else "interrupted",
        note=f"no summary: {judged} ({since})",
        task=started.get("task"),
        world_size=started.get("world_size"),
        epochs_run=epoch.get("epoch", 0) if started else None,
        epochs=started.get("epochs"),
        validation_accuracy=(epoch.get("validation") or {}).get("accuracy"),
        validation_loss=(epoch.get("validation") or {}).get("loss"),
        unit=unit if newest else None,
        units_per_s=units_per_s,
        train_time_s=newest.get("cumulative_time_s", newest.get("train_time_s")),
    )


def flat_config(path: Path) -> dict[str, str]:
    """The resolved configuration as `table.key` and value; none before it is written."""
    try:
        content = read_toml(path)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise BadFileError(path, f"it is not valid TOML ({error}); it was changed after it was written") from None
    return dict(_flat(content, ""))


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(masked(key, value))


def last_event(events: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """The last event of that name, or an empty one."""
    return next((event for event in reversed(events) if event["event"] == name), {})


def align(rows: Sequence[Sequence[str]], *, num_text_columns: int) -> list[str]:
    """The rows as lines of equal columns, text flush left and figures flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < num_text_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


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


def _rough_duration(seconds: float) -> str:
    """`35 s`, `12 min`, `3 h`, `2 d`."""
    for unit, unit_s, limit_s in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172800)):
        if seconds < limit_s:
            return f"{int(seconds // unit_s)} {unit}"
    return f"{int(seconds // 86400)} d"
