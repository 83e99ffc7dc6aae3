"""A run at a glance, read out of its folder.

The state comes from `summary.json`; without one, from whether a process holds the run, or else from its last event.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stormo.errors import StormoError
from stormo.system.files import BadFileError, read_toml
from stormo.system.masking import masked
from stormo.telemetry.events import current_events, read_events, speed_of
from stormo.telemetry.folder import RunFolder, goes_on, read_summary

MISSING = "n/a"


_STATES = {"target": "done", "epochs": "done", "signal": "stopped", "divergence": "diverged", "error": "failed"}


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


def _rough_duration(seconds: float) -> str:
    """`35 s`, `12 min`, `3 h`, `2 d`."""
    for unit, unit_s, limit_s in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172800)):
        if seconds < limit_s:
            return f"{int(seconds // unit_s)} {unit}"
    return f"{int(seconds // 86400)} d"
