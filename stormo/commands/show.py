"""The verb `show`: one run with its configuration, epochs, curves, checkpoints, notices and how to resume it."""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stormo.config.options import Parser
from stormo.energy import read_bill
from stormo.energy.summary import joules_text
from stormo.errors import pluralize
from stormo.telemetry.environment import job_text
from stormo.telemetry.events import current_events, read_events, speed_of
from stormo.telemetry.folder import RunFolder, read_environment, read_summary, to_json
from stormo.telemetry.runs_folder import MISSING, RunOverview, align, find_run, flat_config, overview
from stormo.telemetry.text import (
    encodable,
    format_duration,
    format_figure,
    format_rate,
    format_share,
    run_reference,
    unit_rate,
    write_text,
)

_CURVE_WIDTH = 40
_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_LEVELS = "_.:-=+*#"
_RESUMABLE_STATES = ("stopped", "failed", "interrupted")


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Everything the files of one run say."""

    folder: RunFolder
    overview: RunOverview
    summary: Mapping[str, Any] | None
    environment: Mapping[str, Any]
    starts: Sequence[Mapping[str, Any]]
    steps: Sequence[Mapping[str, Any]]
    epochs: Sequence[Mapping[str, Any]]
    notices: Sequence[Mapping[str, Any]]
    checkpoints: Sequence[Path]
    resume_command: str | None


def main(arguments: Sequence[str]) -> int:
    """Read the options and show one run."""
    parser = Parser(prog="stormo show", description="Show one run.", allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", nargs="?", help="name of the run, or its folder (default: the newest)")
    parser.add_argument("--runs-folder", default="runs", metavar="FOLDER", help="folder of all runs (default: runs)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parsed = parser.parse_args(arguments)
    run = _read(find_run(Path(parsed.runs_folder), parsed.run))
    text = json.dumps(_as_json(run), indent=2, allow_nan=False) if parsed.json else "\n".join(_lines(run))
    write_text(f"{text}\n", sys.stdout)
    return 0


def sparkline(values: Sequence[float | None], *, levels: str = _BLOCKS, width: int = _CURVE_WIDTH) -> str:
    """The course of a series in one line, each sign the mean of its share; a share without a figure stays blank."""
    num_signs = min(len(values), width)
    # Measured against the largest figure, so that sums and differences of huge ones stay finite.
    scale = max((abs(value) for value in values if value is not None and math.isfinite(value)), default=0.0) or 1.0
    means: list[float | None] = []
    for sign in range(num_signs):
        share = values[sign * len(values) // num_signs : (sign + 1) * len(values) // num_signs]
        known = [value / scale for value in share if value is not None and math.isfinite(value)]
        means.append(math.fsum(known) / len(known) if known else None)
    present = [mean for mean in means if mean is not None]
    if not present:
        return " " * num_signs
    low, high = min(present), max(present)
    middle = (len(levels) - 1) // 2
    return "".join(
        " "
        if mean is None
        else levels[round((mean - low) / (high - low) * (len(levels) - 1)) if high > low else middle]
        for mean in means
    )


def _read(folder: RunFolder) -> _Run:
    events = current_events(read_events(folder.events))
    one = overview(folder, now_unix_s=time.time())
    checkpoints = folder.checkpoint_folders()
    is_resumable = bool(checkpoints) and one.state in _RESUMABLE_STATES
    return _Run(
        folder=folder,
        overview=one,
        summary=read_summary(folder),
        environment=read_environment(folder) or {},
        starts=[event for event in events if event["event"] == "run_started"],
        steps=[event for event in events if event["event"] == "step_done"],
        epochs=[event for event in events if event["event"] == "epoch_done"],
        notices=[event for event in events if event["event"] == "notice"],
        checkpoints=checkpoints,
        # The settings come from the run's own config.toml; how many workers there are is up to the launch.
        resume_command=f"stormo train --resume {run_reference(one.name, one.folder)}" if is_resumable else None,
    )


def _as_json(run: _Run) -> dict[str, Any]:
    content: dict[str, Any] = to_json(
        {
            "run": asdict(run.overview),
            "started": run.starts[-1] if run.starts else None,
            "jobs": [event["job"] for event in run.starts if event.get("job")],
            "environment": run.environment or None,
            "epochs": run.epochs,
            "last_step": run.steps[-1] if run.steps else None,
            "notices": run.notices,
            "checkpoints": [{"path": path, "size_bytes": _size_bytes(path)} for path in run.checkpoints],
            "resume_command": run.resume_command,
            "summary": run.summary,
        }
    )
    return content


def _lines(run: _Run) -> Iterator[str]:
    one = run.overview
    yield f"{one.name}: {one.task or 'task not known yet'}, {one.state}"
    if one.note:
        yield one.note
    sections = {
        "Configuration": _configuration(run),
        "Result": _result(run.summary),
        "Attempts": _attempts(run.starts),
        "Energy": _energy(run.folder),
        "Epochs": _epoch_table(run.epochs),
        "Curves": _curves(run),
        "Checkpoints": [f"{path}  {_size_bytes(path) / 2**20:,.1f} MiB" for path in run.checkpoints],
        "Notices": [f"{event.get('kind')}: {event.get('text')}" for event in run.notices],
        "Resume with": _resume(run),
    }
    for title, lines in sections.items():
        if lines:
            yield from ["", title, *(f"  {line}" for line in lines)]
    if not run.epochs:
        yield from ["", f"No epoch is done yet; {_last_step(run)}."]


def _resume(run: _Run) -> list[str]:
    if run.resume_command is None:
        return []
    num_workers = _show(run.overview.world_size, str)
    return [run.resume_command, f"resumes from {run.checkpoints[-1].name}; workers so far: {num_workers}"]


def _last_step(run: _Run) -> str:
    if not run.steps:
        return "no step was recorded"
    step = run.steps[-1]
    loss = _show(step.get("loss"), format_figure)
    return f"the last recorded step is {step.get('step')} with a training loss of {loss}"


def _configuration(run: _Run) -> list[str]:
    plan = run.starts[-1].get("explanation") if run.starts else None
    lines = list(plan or [f"{key} = {value}" for key, value in flat_config(run.folder.config).items()])
    environment = run.environment
    software = [f"{name} {environment[name]}" for name in ("stormo", "torch", "python") if environment.get(name)]
    if software or environment.get("host"):
        lines.append(", ".join([*software, *([f"on {environment['host']}"] if environment.get("host") else [])]))
    if environment.get("git_commit"):
        changed = " with changes" if environment.get("git_has_changes") else ""
        lines.append(f"git commit {environment['git_commit']}{changed}")
    if environment.get("command"):
        lines.append(f"command: {shlex.join(environment['command'])}")
    return lines


def _result(summary: Mapping[str, Any] | None) -> list[str]:
    if summary is None:
        return []
    unit, units_per_s = speed_of(summary)
    rows = [
        ("stopped by", _show(summary.get("stopped_by"), str)),
        ("validation accuracy", _show(summary.get("validation_accuracy"), format_figure)),
        ("validation loss", _show(summary.get("validation_loss"), format_figure)),
        ("training time", _show(summary.get("train_time_s"), format_duration)),
        ("whole time", _show(summary.get("wall_time_s"), format_duration)),
        ("time to target", _show(summary.get("time_to_target_s"), format_duration)),
        (unit_rate(unit), _show(units_per_s, format_rate)),
        *([] if summary.get("mfu") is None else [("MFU", format_share(summary["mfu"]))]),
        ("input wait", _show(summary.get("input_wait_fraction"), format_share)),
        ("peak memory", _show(summary.get("peak_memory_bytes"), _mib)),
        *([] if (taken := summary.get("peak_reserved_memory_bytes")) is None else [("taken of the GPU", _mib(taken))]),
        ("weights SHA-256", _show(summary.get("weights_sha256"), str)),
    ]
    return align(rows, num_text_columns=2)


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


def _attempts(starts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The scheduler jobs of the run, in order."""
    return [
        f"from step {start.get('resumed_at_step') or 0} with {pluralize(start.get('world_size', '?'), 'worker')}: {job}"
        for start in starts
        if (job := job_text(start.get("job")))
    ]


def _energy(folder: RunFolder) -> list[str]:
    """The energy so far, also of a run that is running or was killed; nothing for runs that recorded none."""
    if not folder.nodes.is_dir():
        return []
    bill = read_bill(folder.path)
    if bill.total_j is None:
        return [f"not measured: {'; '.join(bill.reasons)}"]
    rows = [["", "energy", "share", "at most off by"]]
    for part, joules in [*bill.parts_j.items(), ("all", bill.total_j)]:
        if joules:
            error_j = bill.total_error_j if part == "all" else bill.error_j[part]
            rows.append([part, joules_text(joules), format_share(joules / bill.total_j), joules_text(error_j)])
    return [*align(rows, num_text_columns=1), *bill.reasons]


def _epoch_table(epochs: Sequence[Mapping[str, Any]]) -> list[str]:
    if not epochs:
        return []
    metrics = list(dict.fromkeys(name for epoch in epochs for name in epoch.get("validation") or {}))
    unit, _ = speed_of(epochs[0])
    has_mfu = any(epoch.get("mfu") is not None for epoch in epochs)
    titles = [unit_rate(unit), *["MFU"] * has_mfu, "time", "total", "lr"]
    rows = [["epoch", "train loss", *("val loss" if name == "loss" else name for name in metrics), *titles]]
    for epoch in epochs:
        validation = epoch.get("validation") or {}
        rows.append(
            [
                _show(epoch.get("epoch"), str),
                _show(epoch.get("train_loss"), format_figure),
                *(_show(validation.get(name), format_figure) for name in metrics),
                _show(speed_of(epoch)[1], format_rate),
                *[_show(epoch.get("mfu"), format_share)] * has_mfu,
                _show(epoch.get("epoch_time_s"), format_duration),
                _show(epoch.get("cumulative_time_s"), format_duration),
                _show(epoch.get("learning_rate"), lambda value: f"{value:.3g}"),
            ]
        )
    return align(rows, num_text_columns=0)


def _curves(run: _Run) -> list[str]:
    """One sparkline a series, followed by its first and last figure."""
    # The steps are denser than the epochs, but for a run that was too short for their records.
    points, loss = (run.steps, "loss") if len(run.steps) > 1 else (run.epochs, "train_loss")
    training, rate = ([point.get(name) for point in points] for name in (loss, "learning_rate"))
    series = {
        "training loss": (training, format_figure),
        "validation loss": ([(epoch.get("validation") or {}).get("loss") for epoch in run.epochs], format_figure),
        "accuracy": ([(epoch.get("validation") or {}).get("accuracy") for epoch in run.epochs], format_figure),
        unit_rate(speed_of(run.epochs[0])[0] if run.epochs else "samples"): (
            [speed_of(epoch)[1] for epoch in run.epochs],
            format_rate,
        ),
        "learning rate": (rate, "{:.3g}".format),
    }
    levels = _BLOCKS if encodable(_BLOCKS, sys.stdout) == _BLOCKS else _ASCII_LEVELS
    rows = [
        [title, sparkline(values, levels=levels), f"{_show(values[0], show)} to {_show(values[-1], show)}"]
        for title, (values, show) in series.items()
        if len(values) > 1 and any(value is not None for value in values)
    ]
    return align(rows, num_text_columns=3) if rows else []


def _show(value: Any, form: Any) -> str:
    return MISSING if value is None else str(form(value))


def _size_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
