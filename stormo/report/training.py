"""Panels of the training: loss, metrics, speed, learning rate, waiting, stragglers, gradient noise, the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stormo.errors import counted
from stormo.parallel.pipeline.bubble import Span
from stormo.report.charts import Bar, Chart, Lanes, Panel, Series, Table, gathered, uncrowded
from stormo.report.history import History, Line, Places
from stormo.telemetry.events import speed_of

_NO_STEP = "No step has been recorded yet."
_NO_EPOCH = "No epoch is done yet."
_NO_WORKERS = "No epoch with the times of each worker is done yet; runs of older versions did not record them."

Figure = Callable[[Line], Any]


def training_panels(histories: Sequence[History]) -> list[Panel]:
    """All panels of this file, in the order of the page."""
    makers = (_loss, _metrics, _throughput, _rate_and_batch, _waiting, _stragglers, _noise)
    return [maker(histories) for maker in makers]


def event_lines(
    histories: Sequence[History], event_name: str, name: str, figure: Figure, *, mode: str = "lines"
) -> list[Series]:
    """One line a run: a figure of each event of a kind."""
    return [
        line
        for run, history in enumerate(histories)
        for line in gathered(
            run, name, ((places, figure(event)) for places, event in history.placed(event_name)), mode=mode
        )
    ]


def _step_lines(histories: Sequence[History], name: str, figure: Figure) -> list[Series]:
    """One line a run: a figure of each record of steps or, where these make no line, of each epoch."""
    return [
        replace(line, run=run)
        for run, history in enumerate(histories)
        for event_name, mode in [_densest(history)]
        for line in event_lines([history], event_name, name, figure, mode=mode)
    ]


def _densest(history: History) -> tuple[str, str]:
    """The kind of event that has the most to tell of training, and how its line is drawn."""
    is_short = len(history.of("step_done")) < 2 and history.of("epoch_done")
    return ("epoch_done", "points") if is_short else ("step_done", "lines")


def _loss(histories: Sequence[History]) -> Panel:
    series = _step_lines(histories, "training", lambda event: event.get("loss", event.get("train_loss")))
    series += event_lines(
        histories, "epoch_done", "validation", lambda event: _validation(event).get("loss"), mode="points"
    )
    chart = Chart(id="loss", title="Loss", y_title="loss", series=series, why_empty=_NO_STEP)
    return Panel(
        id="loss",
        title="Loss",
        about="Training loss since the point before, over all workers; validation loss of each epoch. "
        "A run too short for such points has its training loss of each epoch.",
        charts=[chart],
    )


def _validation(event: Line) -> Line:
    found: Line = event.get("validation") or {}
    return found


def _metrics(histories: Sequence[History]) -> Panel:
    names = dict.fromkeys(
        name for history in histories for event in history.of("epoch_done") for name in _validation(event)
    )
    names.pop("loss", None)
    charts = [
        Chart(
            id=f"metric-{position}",
            title=f"Validation {name.replace('_', ' ')}",
            y_title=name.replace("_", " "),
            series=event_lines(histories, "epoch_done", "validation", _metric(name), mode="points"),
        )
        for position, name in enumerate(names)
    ]
    why = "" if charts else f"{_NO_EPOCH} Or the task has no metric besides its loss."
    return Panel(
        id="accuracy", title="Accuracy", about="Exact over the whole validation set.", charts=charts, why_empty=why
    )


def _metric(name: str) -> Figure:
    return lambda event: _validation(event).get(name)


def _throughput(histories: Sequence[History]) -> Panel:
    units = {speed_of(event)[0] for history in histories for event in history.of(_densest(history)[0])[-1:]}
    is_shared = len(units) == 1  # runs that count images and tokens are compared by their samples
    unit = next(iter(units)) if is_shared else "samples"
    figure: Figure = (lambda event: speed_of(event)[1]) if is_shared else (lambda event: event.get("samples_per_s"))
    series = _step_lines(histories, "all workers", figure)
    everyone = _by_worker(histories, _share_per_s)
    drawn, note = uncrowded(everyone, "workers")
    return Panel(
        id="throughput",
        title="Throughput",
        about="A worker's own speed is its share of the samples over its own training time.",
        charts=[
            Chart(
                id="throughput", title="All workers together", y_title=f"{unit}/s", series=series, from_zero=True,
                why_empty=_NO_STEP,
            ),
            Chart(
                id="throughput-worker", title="Each worker", y_title="samples/s", series=drawn, all_series=everyone,
                from_zero=True, why_empty=_NO_WORKERS, note=note,
            ),
        ],
    )  # fmt: skip


def _share_per_s(worker: Line, epoch: Line) -> float | None:
    samples = float(epoch.get("samples_per_s") or 0.0) * float(epoch.get("epoch_time_s") or 0.0)
    time_s = worker.get("train_time_s")
    return samples / len(epoch["workers"]) / time_s if time_s and samples else None


def _by_worker(histories: Sequence[History], figure: Callable[[Line, Line], float | None]) -> list[Series]:
    """One line a worker: a figure of each epoch."""
    series: list[Series] = []
    for run, history in enumerate(histories):
        points: dict[int, list[tuple[Places, float | None]]] = {}
        for places, epoch in history.placed("epoch_done"):
            for worker in epoch.get("workers") or ():
                points.setdefault(int(worker["rank"]), []).append((places, figure(worker, epoch)))
        for rank in sorted(points):
            series += gathered(run, f"worker {rank}", points[rank], mode="points")
    return series


def _rate_and_batch(histories: Sequence[History]) -> Panel:
    rate = _step_lines(histories, "learning rate", lambda event: event.get("learning_rate"))
    batch = [
        line
        for run, history in enumerate(histories)
        for line in gathered(run, "global batch", _batches(history), mode="steps")
    ]
    return Panel(
        id="rate",
        title="Learning rate and batch",
        charts=[
            Chart(
                id="rate", title="Learning rate", y_title="learning rate", series=rate, from_zero=True,
                why_empty=_NO_STEP,
            ),
            Chart(
                id="batch", title="Global batch", y_title="samples a step", series=batch, from_zero=True,
                why_empty=_NO_STEP,
            ),
        ],
    )  # fmt: skip


def _batches(history: History) -> Iterator[tuple[Places, Any]]:
    of_run = history.started.get("global_batch_size")
    for places, event in history.placed("step_done"):
        yield places, event.get("global_batch_size") or of_run


def _waiting(histories: Sequence[History]) -> Panel:
    waits = event_lines(histories, "step_done", "input", lambda event: _percent(event.get("input_wait_fraction")))
    exposed = event_lines(histories, "epoch_done", "communication", _exposed_percent, mode="points")
    return Panel(
        id="waiting",
        title="Waiting",
        about="Share of the training time in which devices stood still: for input, or for the gradients of others.",
        charts=[
            Chart(
                id="wait-input", title="Input wait", y_title="% of training time", series=waits, from_zero=True,
                why_empty=_NO_STEP,
            ),
            Chart(
                id="wait-communication", title="Exposed communication", y_title="% of training time", series=exposed,
                from_zero=True,
                why_empty="Exposed communication was not measured: it needs two workers under ddp and a whole epoch.",
            ),
        ],
    )  # fmt: skip


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _exposed_percent(epoch: Line) -> float | None:
    """The mean over the workers whose exposed time was measured."""
    measured = [worker for worker in epoch.get("workers") or () if worker.get("exposed_s") is not None]
    total_s = sum(worker.get("train_time_s") or 0.0 for worker in measured)
    return 100 * sum(worker["exposed_s"] for worker in measured) / total_s if total_s else None


def _own_time_s(worker: Line) -> float:
    """The time a worker was busy itself: waiting for others makes all of them look alike."""
    return float(worker.get("train_time_s") or 0.0) - float(worker.get("exposed_s") or 0.0)


def _behind_percent(worker: Line, epoch: Line) -> float | None:
    fastest_s = min(_own_time_s(one) for one in epoch["workers"])
    return 100 * (_own_time_s(worker) / fastest_s - 1) if fastest_s > 0 and len(epoch["workers"]) > 1 else None


def _stragglers(histories: Sequence[History]) -> Panel:
    everyone = _by_worker(histories, _behind_percent)
    drawn, note = uncrowded(everyone, "workers")
    is_alone = all((history.started.get("world_size") or 1) == 1 for history in histories)
    why = "One worker has nobody to fall behind." if is_alone else _NO_WORKERS
    return Panel(
        id="stragglers",
        title="Stragglers",
        about="How much longer than the fastest worker each one was busy in an epoch; waiting for others, where "
        "measured, is left out.",
        charts=[
            Chart(
                id="stragglers", title="Behind the fastest worker", y_title="% more time", series=drawn,
                all_series=everyone, from_zero=True, why_empty=why, note=note,
            )
        ],
    )  # fmt: skip


def _noise(histories: Sequence[History]) -> Panel:
    series = event_lines(histories, "step_done", "noise scale", lambda event: event.get("noise_scale"))
    batch = [
        line
        for run, history in enumerate(histories)
        if any(event.get("noise_scale") is not None for event in history.of("step_done"))
        for line in gathered(run, "global batch", _batches(history), mode="steps")
    ]
    reasons = [str(history.summary.get("noise_scale_reason") or "") for history in histories]
    why = "; ".join(dict.fromkeys(reason for reason in reasons if reason)) or _NO_STEP
    advice = [
        str(history.summary["noise_scale_advice"]) for history in histories if history.summary.get("noise_scale_advice")
    ]
    return Panel(
        id="noise",
        title="Gradient noise scale",
        about="The batch beyond which steps hardly get better.",
        charts=[
            Chart(
                id="noise", title="Gradient noise scale", y_title="samples", series=[*series, *batch], from_zero=True,
                why_empty=f"It was not measured: {why}",
            )
        ],
        notes=list(dict.fromkeys(advice)),
    )  # fmt: skip


_MOST_BARS = 6000  # in a figure; more cannot be told apart
# What a worker does, in words, and its colour: a backward is whole, or the gradients of its inputs and of its weights.
_KINDS = {"F": ("forward", 0), "B": ("backward", 1), "I": ("gradients of inputs", 1), "W": ("gradients of weights", 2)}
_NO_STAGES = "The model was not cut into stages that follow one another (--strategy pipeline)."
_NOT_YET = "What the workers did in one pass is written down when the run ends."


@dataclass(frozen=True)
class _Pass:
    """One pass of a run, as its summary tells it."""

    label: str
    told: Mapping[str, Any]
    spans: Sequence[Span]

    @property
    def num_workers(self) -> int:
        return 1 + max(span.worker for span in self.spans)

    @property
    def first_s(self) -> float:
        return min(span.start for span in self.spans)

    @property
    def length_s(self) -> float:
        return max(span.stop for span in self.spans) - self.first_s


def pipeline_panel(histories: Sequence[History]) -> Panel:
    """One picture a run, the idle share that was measured beside what the schedule must have, and each worker's."""
    seen = [
        _Pass(history.label, told, [Span(*row) for row in told["spans"]])
        for history in histories
        if (told := history.summary.get("pipeline"))
    ]
    is_awaited = any(_is_piped(history) and not history.summary for history in histories)
    many = len(histories) > 1
    rows = [row for one in seen for row in _rows(one)]
    table = Table(
        id="pipeline",
        title="Workers of the pipeline",
        columns=["run", "worker", "stages", "forward", "backward", "idle"],
        rows=rows,
        first_figure=3,
    )
    return Panel(
        id="pipeline",
        title="Pipeline",
        about="What the workers of one copy of the model did in one early pass; where nothing is drawn they waited.",
        lanes=[_lanes(number, one, f"{one.label}: " if many else "") for number, one in enumerate(seen)],
        tables=[table] if rows else [],
        notes=[f"{one.label}: {_words(one)}" if many else _words(one) for one in seen],
        why_empty="" if seen else _NOT_YET if is_awaited else _NO_STAGES,
    )


def _is_piped(history: History) -> bool:
    lines = history.started.get("explanation") or ()
    return any(str(line).startswith("pipeline ") for line in lines)


def _words(one: _Pass) -> str:
    told = one.told
    sizes = f"{counted(told['num_stages'], 'stage')} on {counted(one.num_workers, 'worker')}"
    return (
        f"The workers were idle for {_as_percent(told['measured_bubble'])} of the pass. The schedule "
        f"{told['schedule']} ({sizes}, {counted(told['micro_batches'], 'micro-batch')}) leaves them "
        f"{_as_percent(told['predicted_bubble'])} where all stages take equally long and handing over takes no time."
    )


def _lanes(number: int, one: _Pass, prefix: str) -> Lanes:
    scale, unit = (1.0, "s") if one.length_s >= 10 else (1e3, "ms")
    drawn, note = _drawn(one.spans)
    return Lanes(
        id=f"pass-{number}",
        title=f"{prefix}One pass of {one.told['schedule']}",
        x_title=unit,
        rows=[f"worker {worker}" for worker in range(one.num_workers)],
        kinds=[
            (name, colour, [_bar(one, span, scale, unit) for span in drawn if span.kind == kind])
            for kind, (name, colour) in _KINDS.items()
            if any(span.kind == kind for span in drawn)
        ],
        records=_records(one.spans),
        note=note,
    )


def _records(spans: Sequence[Span]) -> list[list[str | float]]:
    rows: list[list[str | float]] = [["worker", "start_s", "stop_s", "what", "micro_batch", "stage"]]
    for span in spans:
        rows.append([span.worker, span.start, span.stop, _KINDS[span.kind][0], span.micro_batch, span.stage])
    return rows


def _drawn(spans: Sequence[Span]) -> tuple[Sequence[Span], str]:
    """All spans or, of too many, those of the first micro-batches, and a sentence that says so."""
    total = 1 + max(span.micro_batch for span in spans)
    most = max(1, _MOST_BARS * total // len(spans))
    if most >= total:
        return spans, ""
    kept = [span for span in spans if span.micro_batch < most]
    return kept, f"Drawn are the first {most} of {total} micro-batches; --csv of stormo report writes all."


def _bar(one: _Pass, span: Span, scale: float, unit: str) -> Bar:
    start, stop = ((moment - one.first_s) * scale for moment in (span.start, span.stop))
    name, _ = _KINDS[span.kind]
    return Bar(
        row=span.worker,
        start=round(start, 4),
        length=round(stop - start, 4),
        label=str(span.micro_batch),
        words=f"{name} of micro-batch {span.micro_batch}, stage {span.stage}: "
        f"{start:.4g} to {stop:.4g} {unit} ({stop - start:.3g} {unit})",
        shade=span.stage // one.num_workers,
    )


def _rows(one: _Pass) -> Iterator[list[str]]:
    for worker in range(one.num_workers):
        own = [span for span in one.spans if span.worker == worker]
        forward_s = sum(span.stop - span.start for span in own if span.kind == "F")
        backward_s = sum(span.stop - span.start for span in own if span.kind != "F")
        stages = ", ".join(str(stage) for stage in sorted({span.stage for span in own}))
        idle = 1.0 - (forward_s + backward_s) / one.length_s if one.length_s else 0.0
        times = [f"{1e3 * seconds:,.1f} ms" for seconds in (forward_s, backward_s)]
        yield [one.label, str(worker), stages, *times, _as_percent(idle)]


def _as_percent(share: float) -> str:
    return f"{100 * share:.1f} %"
