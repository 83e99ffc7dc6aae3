"""The text of the page: the summary on top, the timeline, configuration, environment, command."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stormo.energy.summary import joules_text
from stormo.errors import pluralize
from stormo.report.charts import Panel, Table
from stormo.report.history import History, Line
from stormo.telemetry.environment import job_text
from stormo.telemetry.events import speed_of
from stormo.telemetry.runs_folder import ENDS, MISSING
from stormo.telemetry.text import format_duration, format_figure, format_rate, unit_rate

_STATES = {
    "waiting": "nothing written yet",
    "running": "still running",
    "interrupted": "ended without a summary",
}

Figure = tuple[str, str]  # a value, and smaller text under it


def summary_figures(history: History) -> dict[str, Figure]:
    """The summary of one run, by title."""
    return {title: figure(history) for title, figure in _SUMMARY.items()}


def _newest(history: History, key: str) -> Any:
    """A figure of the summary or, without one, of the newest event that has it."""
    if history.summary:
        return history.summary.get(key)
    return next((event[key] for event in reversed(history.current) if event.get(key) is not None), None)


def _accuracy(history: History) -> Figure:
    validation = _newest(history, "validation") or {}
    accuracy, loss = validation.get("accuracy"), validation.get("loss")
    best = history.summary.get("best_validation_accuracy")
    text = [] if best is None else [f"best {100 * best:.2f} %"]
    if accuracy is None:
        return (MISSING, "no validation yet") if loss is None else (format_figure(loss), "validation loss")
    return f"{100 * accuracy:.2f} %", ", ".join([*text, *([f"loss {format_figure(loss)}"] if loss is not None else [])])


def _time(history: History) -> Figure:
    trained_s = history.summary.get("train_time_s")
    if trained_s is None:
        times = (event.get("cumulative_time_s", event.get("train_time_s")) for event in reversed(history.current))
        trained_s = next((time_s for time_s in times if time_s is not None), None)
    whole_s = history.summary.get("wall_time_s", history.clock.total_s)
    target_s = history.summary.get("time_to_target_s")
    text = f"training; {format_duration(whole_s or 0.0)} in all"
    return _or_missing(trained_s, format_duration), text + (
        f"; target after {format_duration(target_s)}" if target_s is not None else ""
    )


def _speed(history: History) -> Figure:
    source = history.summary or next(iter(history.of("step_done")[-1:]), {})
    unit, per_s = speed_of(source)
    mfu = source.get("mfu")
    text = unit_rate(unit) + (f", {100 * mfu:.1f} % of the devices' peak" if mfu is not None else "")
    return _or_missing(per_s, format_rate), text


def _energy_j(history: History) -> float | None:
    found = history.summary.get("energy_j")
    if found is None and history.bill is not None:
        found = history.bill.total_j
    return None if found is None else float(found)


def _energy(history: History) -> Figure:
    joules = _energy_j(history)
    if joules is None:
        return MISSING, "not measured; the ledger says why"
    error_j = None if history.bill is None else history.bill.total_error_j
    text = f"{joules / 3600:.4g} Wh" + (f" ± {joules_text(error_j)}" if error_j is not None else "")
    return joules_text(joules), text


def _per_sample(history: History) -> Figure:
    found = history.summary.get("energy_j_per_sample")
    joules, samples = _energy_j(history), _newest(history, "samples_seen")
    if found is None and joules is not None and samples:
        found = joules / samples
    return (f"{found:.3g} J" if found is not None else MISSING), f"{samples:,} samples" if samples else ""


def _cost(history: History) -> Figure:
    cost, co2e_g = history.summary.get("energy_cost"), history.summary.get("co2e_g")
    text = f"{co2e_g:.3g} g CO2e" if co2e_g is not None else ""
    if cost is not None:
        return f"{cost:.4g} {history.config.get('energy.currency', '')}".strip(), text
    if co2e_g is not None:
        return text, "no price was given"
    return MISSING, "needs --energy-price or --grid-intensity, and measured energy"


def _device(history: History) -> Figure:
    device = history.summary.get("device") or history.environment.get("gpu")
    asked = history.config.get("workers.device")
    if device is None and asked != "auto":  # only the summary knows what auto became
        device = asked
    text = [str(history.summary[key]) for key in ("precision", "strategy") if history.summary.get(key)]
    host = history.environment.get("host")
    return str(device or MISSING), ", ".join([*text, *([f"on {host}"] if host else [])])


def _workers(history: History) -> Figure:
    workers = history.summary.get("world_size", history.started.get("world_size"))
    nodes = len(history.nodes) or history.config.get("workers.num_nodes")
    batch = history.summary.get("global_batch_size", history.started.get("global_batch_size"))
    text = [pluralize(nodes, "node")] if nodes else []
    text += [f"global batch {batch:,}"] if batch else []
    return _or_missing(workers, str), ", ".join(text)


def _end(history: History) -> Figure:
    stopped_by = history.summary.get("stopped_by")
    text = ENDS.get(str(stopped_by), str(stopped_by)) if stopped_by else _STATES.get(history.state, "")
    epochs, steps = _newest(history, "epochs_run") or _newest(history, "epoch"), _newest(history, "steps")
    steps = steps if steps is not None else _newest(history, "step")
    text += f"; epoch {epochs}, step {steps:,}" if epochs is not None and steps is not None else ""
    resumes = history.summary.get("num_resumes")
    return history.state, text + (f", {pluralize(resumes, 'resume')}" if resumes else "")


def _or_missing(value: Any, form: Callable[[Any], str]) -> str:
    return MISSING if value is None else form(value)


_SUMMARY: Mapping[str, Callable[[History], Figure]] = {
    "Accuracy": _accuracy,
    "Time": _time,
    "Speed": _speed,
    "Energy": _energy,
    "Energy per sample": _per_sample,
    "Cost": _cost,
    "Device": _device,
    "Workers": _workers,
    "State": _end,
}

_NOT_COMPARED = ("run.run_name", "run.runs_folder")  # differ always
MAX_TIMELINE_ROWS = 2000  # on the page


def timeline(history: History) -> Iterator[tuple[int, Line, str, str]]:
    """The events of all attempts: step, event, kind and text."""
    for at, event in history.reached:
        name = event.get("event")
        if name == "run_started":
            step = event.get("resumed_at_step")
            text = "started" if step is None else f"resumed at step {step}"
            kind = "start" if step is None else "resume"
            job = f", {of_job}" if (of_job := job_text(event.get("job"))) else ""
            yield at, event, kind, f"{text} with {pluralize(event.get('world_size', '?'), 'worker')}{job}"
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
    """Starts, resumes, checkpoints, notices, rollbacks and ends."""
    rows = [
        [history.label, format_duration(history.clock.running_s(event["time_unix_s"])), kind, text]
        for history in histories
        for _, event, kind, text in timeline(history)
    ]
    hidden = len(rows) - MAX_TIMELINE_ROWS
    table = Table("timeline", "What happened", ["run", "running time", "kind", "what"], rows[:MAX_TIMELINE_ROWS])
    return Panel(
        "timeline",
        "What happened",
        "Running time leaves out the pauses between attempts.",
        tables=[table] if rows else [],
        notes=[f"{hidden:,} later ones are left out."] if hidden > 0 else [],
        why_empty="" if rows else "Nothing has been recorded yet.",
    )


def fact_panels(histories: Sequence[History]) -> list[Panel]:
    """Configuration, environment and command."""
    configs = [history.config for history in histories]
    environments = [dict(_environment(history.environment)) for history in histories]
    commands = [(history.label, history.environment.get("command")) for history in histories]
    known = [[label, shlex.join(map(str, command))] for label, command in commands if command]
    explanation = [
        Table(
            f"plan-{run}",
            f"Effective values of {history.label}",
            ["what", "value and reason"],
            [[part.strip() for part in (f"{line}  ").split("  ", 1)] for line in history.started["explanation"]],
        )
        for run, history in enumerate(histories)
        if history.started.get("explanation")
    ]
    table = Table("command", "Command", ["run", "command"], known, is_code=True)
    why = "environment.json has not been written yet."
    return [
        _compared("Configuration", histories, configs, "config.toml has not been written yet.", explanation),
        _compared("Environment", histories, environments, why),
        Panel("command", "Command", tables=[table] if known else [], why_empty="" if known else why),
    ]


def _environment(environment: Line) -> Iterator[tuple[str, str]]:
    absent = {f"{key}_reason" for key, value in environment.items() if value is None}
    for key, value in environment.items():
        if value is None or key in absent:  # without a repository there is no reason to show
            continue
        if key == "time_unix_s":
            yield "time", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(float(value)))
        elif isinstance(value, dict):
            yield from ((f"{key}.{name}", str(item)) for name, item in value.items())
        elif key != "command":
            yield key, str(value)


def _compared(
    title: str,
    histories: Sequence[History],
    facts: Sequence[Mapping[str, str]],
    why_empty: str,
    more: Sequence[Table] = (),
) -> Panel:
    """One row per key and one column per run; rows in which runs differ are marked."""
    keys = list(dict.fromkeys(key for one in facts for key in one))
    rows = [[key, *(one.get(key, "–") for one in facts)] for key in keys]
    marked = [position for position, row in enumerate(rows) if len(set(row[1:])) > 1 and row[0] not in _NOT_COMPARED]
    table = Table(title.lower(), title, ["key", *(history.label for history in histories)], rows, marked=marked)
    notes = [f"{pluralize(len(marked), 'key')} of {len(rows)} differ between the runs; they are marked."]
    return Panel(
        title.lower(),
        title,
        tables=[table, *more] if rows else [],
        notes=notes if len(histories) > 1 and rows else [],
        why_empty="" if rows else why_empty,
    )
