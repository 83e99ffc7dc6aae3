"""The words of the page: what happened when, configuration, environment, command."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence

from stormo.errors import counted
from stormo.report.history import History, Line
from stormo.report.panel import Panel, Table
from stormo.report.summary import ENDS
from stormo.telemetry.job import job_words
from stormo.telemetry.text import format_duration

_NOT_COMPARED = ("run.run_name", "run.runs_folder")  # always different
MOST_HAPPENINGS = 2000  # on the page; more of them are no use


def happenings(history: History) -> Iterator[tuple[int, Line, str, str]]:
    """Everything of note in all attempts: the step it lies at, the event, its kind and its words."""
    for at, event in history.reached:
        name = event.get("event")
        if name == "run_started":
            step = event.get("resumed_at_step")
            words = "started" if step is None else f"resumed at step {step}"
            kind = "start" if step is None else "resume"
            job = f", {words_of}" if (words_of := job_words(event.get("job"))) else ""
            yield at, event, kind, f"{words} with {counted(event.get('world_size', '?'), 'worker')}{job}"
        elif name == "checkpoint_saved":
            took = event.get("save_time_s")
            yield at, event, "checkpoint", f"{event.get('path')}{f', {took:.2f} s' if took is not None else ''}"
        elif name == "notice":
            yield at, event, str(event.get("kind") or "info"), str(event.get("text"))
        elif name == "divergence_noticed":
            back = event.get("rolled_back_to_step")
            yield at, event, "divergence" if back is None else "rollback", str(event.get("text"))
        elif name == "run_ended":
            stopped_by = str((event.get("summary") or {}).get("stopped_by"))
            yield at, event, "end", ENDS.get(stopped_by, stopped_by)


def timeline_panel(histories: Sequence[History]) -> Panel:
    """Starts, resumes, checkpoints, notices, rollbacks and ends, in order."""
    rows = [
        [history.label, format_duration(history.clock.running_s(event["time_unix_s"])), kind, words]
        for history in histories
        for _, event, kind, words in happenings(history)
    ]
    hidden = len(rows) - MOST_HAPPENINGS
    table = Table(
        id="timeline",
        title="What happened",
        columns=["run", "running time", "kind", "what"],
        rows=rows[:MOST_HAPPENINGS],
    )
    return Panel(
        id="timeline",
        title="What happened",
        about="Running time leaves out the pauses between attempts.",
        tables=[table] if rows else [],
        notes=[f"{hidden:,} later ones are left out."] if hidden > 0 else [],
        why_empty="" if rows else "Nothing has been recorded yet.",
    )


def fact_panels(histories: Sequence[History]) -> list[Panel]:
    """Configuration, environment and command."""
    configs = [history.config for history in histories]
    environments = [dict(_environment(history.environment)) for history in histories]
    commands = [
        [history.label, shlex.join(map(str, history.environment.get("command") or ()))] for history in histories
    ]
    known = [row for row in commands if row[1]]
    explanation = [
        Table(
            id=f"plan-{run}",
            title=f"How the settings of {history.label} came out",
            columns=["what", "value and reason"],
            rows=[[part.strip() for part in (f"{line}  ").split("  ", 1)] for line in history.started["explanation"]],
        )
        for run, history in enumerate(histories)
        if history.started.get("explanation")
    ]
    return [
        _compared(
            "configuration", "Configuration", histories, configs, "config.toml has not been written yet.", explanation
        ),
        _compared("environment", "Environment", histories, environments, "environment.json has not been written yet."),
        Panel(
            id="command",
            title="Command",
            tables=[Table(id="command", title="Command", columns=["run", "command"], rows=known, is_code=True)]
            if known
            else [],
            why_empty="" if known else "environment.json has not been written yet.",
        ),
    ]


def _environment(environment: Line) -> Iterator[tuple[str, str]]:
    absent = {f"{key}_reason" for key, value in environment.items() if value is None}
    for key, value in environment.items():
        if value is None or key in absent:  # no repository, nothing to say of one
            continue
        if key == "time_unix_s":
            yield "time", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(float(value)))
        elif isinstance(value, dict):
            yield from ((f"{key}.{name}", str(item)) for name, item in value.items())
        elif key != "command":
            yield key, str(value)


def _compared(
    name: str,
    title: str,
    histories: Sequence[History],
    facts: Sequence[Mapping[str, str]],
    why_empty: str,
    more: Sequence[Table] = (),
) -> Panel:
    """A row a key and a column a run; rows in which runs differ are marked."""
    keys = list(dict.fromkeys(key for one in facts for key in one))
    rows = [[key, *(one.get(key, "–") for one in facts)] for key in keys]
    marked = [position for position, row in enumerate(rows) if len(set(row[1:])) > 1 and row[0] not in _NOT_COMPARED]
    table = Table(
        id=name, title=title, columns=["key", *(history.label for history in histories)], rows=rows, marked=marked
    )
    notes = [f"{counted(len(marked), 'key')} of {len(rows)} differ between the runs; they are marked."]
    return Panel(
        id=name,
        title=title,
        tables=[table, *more] if rows else [],
        notes=notes if len(histories) > 1 and rows else [],
        why_empty="" if rows else why_empty,
    )
