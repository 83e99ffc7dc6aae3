"""What the workers of a pipeline did in one pass: one row a worker, and the time they stood idle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stormo.errors import counted
from stormo.parallel.pipeline.bubble import Span
from stormo.report.history import History
from stormo.report.panel import Bar, Lanes, Panel, Table

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
        f"The workers were idle for {_percent(told['measured_bubble'])} of the pass. The schedule {told['schedule']} "
        f"({sizes}, {counted(told['micro_batches'], 'micro-batch')}) leaves them "
        f"{_percent(told['predicted_bubble'])} where all stages take equally long and handing over takes no time."
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
        yield [one.label, str(worker), stages, *times, _percent(idle)]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
