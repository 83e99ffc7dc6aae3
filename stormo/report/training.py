"""Panels of the training: loss, metrics, speed, learning rate, waiting, stragglers, gradient noise, the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stormo.config.strategies import SPECS
from stormo.errors import pluralize
from stormo.parallel.pipeline.schedules import Span
from stormo.report.charts import Bar, Chart, Lanes, Panel, Series, Table, make_line, merge_lines
from stormo.report.history import History, Line, Position
from stormo.telemetry.events import speed_of
from stormo.telemetry.text import format_share

_NO_STEP = "No step has been recorded yet."
_NO_EPOCH = "No epoch is done yet."
_NO_WORKERS = "No epoch with the times of each worker is done yet."
_MAX_BARS = 6000  # in a figure
# What a pipeline worker does, and its colour: a backward is whole, or split into gradients of inputs and of weights.
_KINDS = {"F": ("forward", 0), "B": ("backward", 1), "I": ("gradients of inputs", 1), "W": ("gradients of weights", 2)}

Figure = Callable[[Line], Any]


def training_panels(histories: Sequence[History]) -> list[Panel]:
    """All panels of this file but the pipeline, in the order of the page."""
    makers = (_loss, _metrics, _throughput, _learning_rate_and_batch, _waiting, _stragglers, _noise)
    return [maker(histories) for maker in makers]


def event_lines(
    histories: Sequence[History], event_name: str, name: str, figure: Figure, *, mode: str = "lines"
) -> list[Series]:
    """One line per run: a figure of each event of a kind."""
    lines: list[Series] = []
    for run, history in enumerate(histories):
        points = ((position, figure(event)) for position, event in history.positioned(event_name))
        lines += make_line(run, name, points, mode=mode)
    return lines


def _step_lines(histories: Sequence[History], name: str, figure: Figure) -> list[Series]:
    """One line per run: a figure of each step record or, where there are too few, of each epoch."""
    lines: list[Series] = []
    for run, history in enumerate(histories):
        event_name, mode = _densest(history)
        lines += [replace(line, run=run) for line in event_lines([history], event_name, name, figure, mode=mode)]
    return lines


def _densest(history: History) -> tuple[str, str]:
    """The kind of event with the most points of training, and how its line is drawn."""
    is_short = len(history.of("step_done")) < 2 and history.of("epoch_done")
    return ("epoch_done", "points") if is_short else ("step_done", "lines")


def _loss(histories: Sequence[History]) -> Panel:
    series = _step_lines(histories, "training", lambda event: event.get("loss", event.get("train_loss")))
    series += event_lines(histories, "epoch_done", "validation", _metric("loss"), mode="points")
    about = "Training loss over all workers since the last point; validation loss of each epoch. A run too short for "
    about += "such points shows its training loss of each epoch."
    return Panel("loss", "Loss", about, charts=[Chart("loss", "Loss", "loss", series, why_empty=_NO_STEP)])


def _metric(name: str) -> Figure:
    return lambda event: (event.get("validation") or {}).get(name)


def _metrics(histories: Sequence[History]) -> Panel:
    epochs = [event for history in histories for event in history.of("epoch_done")]
    names = dict.fromkeys(name for event in epochs for name in event.get("validation") or {} if name != "loss")
    charts = []
    for index, name in enumerate(names):
        series = event_lines(histories, "epoch_done", "validation", _metric(name), mode="points")
        text = name.replace("_", " ")
        charts.append(Chart(f"metric-{index}", f"Validation {text}", text, series))
    why = "" if charts else f"{_NO_EPOCH} Or the task has no metric besides its loss."
    return Panel("accuracy", "Accuracy", "Exact over the whole validation set.", charts=charts, why_empty=why)


def _throughput(histories: Sequence[History]) -> Panel:
    units = {speed_of(event)[0] for history in histories for event in history.of(_densest(history)[0])[-1:]}
    is_shared = len(units) == 1  # runs that count images and tokens are compared by their samples
    unit = next(iter(units)) if is_shared else "samples"
    figure: Figure = (lambda event: speed_of(event)[1]) if is_shared else (lambda event: event.get("samples_per_s"))
    total = _step_lines(histories, "all workers", figure)
    each = _worker_chart(histories, _own_samples_per_s, "throughput-worker", "Each worker", "samples/s", _NO_WORKERS)
    all_workers = Chart("throughput", "All workers together", f"{unit}/s", total, from_zero=True, why_empty=_NO_STEP)
    about = "The speed of a worker is its share of the samples over its own training time."
    return Panel("throughput", "Throughput", about, charts=[all_workers, each])


def _worker_chart(
    histories: Sequence[History], figure: Callable[[Line, Line], float | None], id: str, title: str, y: str, why: str
) -> Chart:
    """One line per worker: a figure of each epoch."""
    lines: list[Series] = []
    for run, history in enumerate(histories):
        points: dict[int, list[tuple[Position, float | None]]] = {}
        for position, epoch in history.positioned("epoch_done"):
            for worker in epoch.get("workers") or ():
                points.setdefault(int(worker["rank"]), []).append((position, figure(worker, epoch)))
        for rank in sorted(points):
            lines += make_line(run, f"worker {rank}", points[rank], mode="points")
    drawn, note = merge_lines(lines, "workers")
    return Chart(id, title, y, drawn, all_series=lines, from_zero=True, why_empty=why, note=note)


def _own_samples_per_s(worker: Line, epoch: Line) -> float | None:
    samples = float(epoch.get("samples_per_s") or 0.0) * float(epoch.get("epoch_time_s") or 0.0)
    time_s = worker.get("train_time_s")
    return samples / len(epoch["workers"]) / time_s if time_s and samples else None


def _learning_rate_and_batch(histories: Sequence[History]) -> Panel:
    rate = _step_lines(histories, "learning rate", lambda event: event.get("learning_rate"))
    batch = [line for run, history in enumerate(histories) for line in _batch_line(run, history)]
    charts = [
        Chart("rate", "Learning rate", "learning rate", rate, from_zero=True, why_empty=_NO_STEP),
        Chart("batch", "Global batch", "samples a step", batch, from_zero=True, why_empty=_NO_STEP),
    ]
    return Panel("rate", "Learning rate and batch", charts=charts)


def _batch_line(run: int, history: History) -> list[Series]:
    of_run = history.started.get("global_batch_size")
    points = (
        (position, event.get("global_batch_size") or of_run) for position, event in history.positioned("step_done")
    )
    return make_line(run, "global batch", points, mode="steps")


def _waiting(histories: Sequence[History]) -> Panel:
    waits = event_lines(histories, "step_done", "input", _input_wait_percent)
    exposed = event_lines(histories, "epoch_done", "communication", _exposed_percent, mode="points")
    why = "Exposed communication was not measured: it needs two workers under ddp and a whole epoch."
    unit = "% of training time"
    charts = [
        Chart("wait-input", "Input wait", unit, waits, from_zero=True, why_empty=_NO_STEP),
        Chart("wait-communication", "Exposed communication", unit, exposed, from_zero=True, why_empty=why),
    ]
    about = "Share of the training time in which devices waited for input, or for the gradients of others."
    return Panel("waiting", "Waiting", about, charts=charts)


def _input_wait_percent(step: Line) -> float | None:
    share = step.get("input_wait_fraction")
    return None if share is None else 100 * share


def _exposed_percent(epoch: Line) -> float | None:
    """The mean over the workers whose exposed time was measured."""
    measured = [worker for worker in epoch.get("workers") or () if worker.get("exposed_s") is not None]
    total_s = sum(worker.get("train_time_s") or 0.0 for worker in measured)
    return 100 * sum(worker["exposed_s"] for worker in measured) / total_s if total_s else None


def _own_time_s(worker: Line) -> float:
    """The time a worker was busy, without waiting for others, which makes all look equal."""
    return float(worker.get("train_time_s") or 0.0) - float(worker.get("exposed_s") or 0.0)


def _behind_percent(worker: Line, epoch: Line) -> float | None:
    fastest_s = min(_own_time_s(one) for one in epoch["workers"])
    return 100 * (_own_time_s(worker) / fastest_s - 1) if fastest_s > 0 and len(epoch["workers"]) > 1 else None


def _stragglers(histories: Sequence[History]) -> Panel:
    is_single = all((history.started.get("world_size") or 1) == 1 for history in histories)
    why = "One worker cannot fall behind." if is_single else _NO_WORKERS
    chart = _worker_chart(histories, _behind_percent, "stragglers", "Behind the fastest worker", "% more time", why)
    about = (
        "How much longer than the fastest worker each one was busy in an epoch, without measured waiting for others."
    )
    return Panel("stragglers", "Stragglers", about, charts=[chart])


def _noise(histories: Sequence[History]) -> Panel:
    lines = event_lines(histories, "step_done", "noise scale", lambda event: event.get("noise_scale"))
    for run, history in enumerate(histories):
        if any(event.get("noise_scale") is not None for event in history.of("step_done")):
            lines += _batch_line(run, history)
    reasons, advice = (
        list(dict.fromkeys(str(history.summary[key]) for history in histories if history.summary.get(key)))
        for key in ("noise_scale_reason", "noise_scale_advice")
    )
    why = f"It was not measured: {'; '.join(reasons) or _NO_STEP}"
    chart = Chart("noise", "Gradient noise scale", "samples", lines, from_zero=True, why_empty=why)
    about = "Batches beyond it bring little."
    return Panel("noise", "Gradient noise scale", about, charts=[chart], notes=advice)


@dataclass(frozen=True)
class _ScheduleRun:
    """One run of a pipeline schedule, forward and backward, from the summary of a training."""

    label: str
    summary: Mapping[str, Any]
    spans: Sequence[Span]

    @property
    def num_workers(self) -> int:
        return 1 + max(span.worker for span in self.spans)

    @property
    def start_s(self) -> float:
        return min(span.start for span in self.spans)

    @property
    def length_s(self) -> float:
        return max(span.stop for span in self.spans) - self.start_s


def pipeline_panel(histories: Sequence[History]) -> Panel:
    """A timeline of each run, its idle share and that of the schedule, and a table of its workers."""
    schedule_runs = [
        _ScheduleRun(history.label, found, [Span(*row) for row in found["spans"]])
        for history in histories
        if (found := history.summary.get("pipeline"))
    ]
    is_comparison = len(histories) > 1
    why = "" if schedule_runs else "The model was not split into stages (--strategy pipeline)."
    if not schedule_runs and any(_has_stages(history) and not history.summary for history in histories):
        why = "The trace of the schedule is written when the run ends."
    columns = ["run", "worker", "stages", "forward", "backward", "idle"]
    rows = [row for one in schedule_runs for row in _worker_rows(one)]
    return Panel(
        "pipeline",
        "Pipeline",
        "What the workers of one replica did in one early run of the schedule; where nothing is drawn they waited.",
        lanes=[_lanes(number, one, is_comparison=is_comparison) for number, one in enumerate(schedule_runs)],
        tables=[Table("pipeline", "Workers of the pipeline", columns, rows, first_figure=3)] if rows else [],
        notes=[f"{one.label}: {_idle_text(one)}" if is_comparison else _idle_text(one) for one in schedule_runs],
        why_empty=why,
    )


def _has_stages(history: History) -> bool:
    spec = SPECS.get(history.config.get("workers.strategy", ""))
    return (spec is not None and spec.axis == "pipeline") or "pipeline=" in history.config.get("workers.mesh", "")


def _idle_text(one: _ScheduleRun) -> str:
    summary = one.summary
    sizes = f"{pluralize(summary['num_stages'], 'stage')} on {pluralize(one.num_workers, 'worker')}"
    text = f"The workers were idle for {format_share(summary['measured_bubble'])} of the time. "
    text += f"The schedule is {summary['schedule']}, {sizes}, {pluralize(summary['micro_batches'], 'micro-batch')}"
    if summary["predicted_bubble"] is None:
        return f"{text}."
    share = format_share(summary["predicted_bubble"])
    return f"{text}: {share} would be idle if all stages took equally long and sending took no time."


def _lanes(number: int, one: _ScheduleRun, *, is_comparison: bool) -> Lanes:
    prefix = f"{one.label}: " if is_comparison else ""
    scale, unit = (1.0, "s") if one.length_s >= 10 else (1e3, "ms")
    total = 1 + max(span.micro_batch for span in one.spans)
    most = max(1, _MAX_BARS * total // len(one.spans))
    drawn = [span for span in one.spans if span.micro_batch < most]
    records: list[list[str | float]] = [["worker", "start_s", "stop_s", "what", "micro_batch", "stage"]]
    for span in one.spans:
        records.append([span.worker, span.start, span.stop, _KINDS[span.kind][0], span.micro_batch, span.stage])
    return Lanes(
        id=f"pass-{number}",
        title=f"{prefix}One run of {one.summary['schedule']}",
        x_title=unit,
        rows=[f"worker {worker}" for worker in range(one.num_workers)],
        kinds=[
            (name, colour, [_bar(one, span, scale, unit) for span in drawn if span.kind == kind])
            for kind, (name, colour) in _KINDS.items()
            if any(span.kind == kind for span in drawn)
        ],
        records=records,
        note=f"The first {most} of {total} micro-batches are drawn; stormo report --csv writes all."
        if most < total
        else "",
    )


def _bar(one: _ScheduleRun, span: Span, scale: float, unit: str) -> Bar:
    start, stop = ((moment - one.start_s) * scale for moment in (span.start, span.stop))
    return Bar(
        row=span.worker,
        start=round(start, 4),
        length=round(stop - start, 4),
        label=str(span.micro_batch),
        hover=f"{_KINDS[span.kind][0]} of micro-batch {span.micro_batch}, stage {span.stage}: "
        f"{start:.4g} to {stop:.4g} {unit} ({stop - start:.3g} {unit})",
        shade=span.stage // one.num_workers,
    )


def _worker_rows(one: _ScheduleRun) -> Iterator[list[str]]:
    for worker in range(one.num_workers):
        own = [span for span in one.spans if span.worker == worker]
        forward_s = sum(span.stop - span.start for span in own if span.kind == "F")
        backward_s = sum(span.stop - span.start for span in own if span.kind != "F")
        stages = ", ".join(str(stage) for stage in sorted({span.stage for span in own}))
        idle = 1.0 - (forward_s + backward_s) / one.length_s if one.length_s else 0.0
        times = [f"{1e3 * seconds:,.1f} ms" for seconds in (forward_s, backward_s)]
        yield [one.label, str(worker), stages, *times, format_share(idle)]
