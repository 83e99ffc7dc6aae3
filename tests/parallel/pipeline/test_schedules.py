"""All schedules against torch's; the bubble against its closed forms; the picture as text."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from stormo.parallel.pipeline.schedules import (
    Action,
    Span,
    idle_share,
    most_micro_batches,
    pipeline_order,
    predicted_bubble,
    simulate,
    worker_stages,
)


def torch_order(name: str, num_workers: int, per_worker: int, num_micro_batches: int) -> list[list[Action]]:
    from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

    kinds: dict[str, Any] = {"interleaved": ScheduleInterleaved1F1B, "zero-bubble": ScheduleInterleavedZeroBubble}
    fakes = [
        SimpleNamespace(group_size=num_workers, group_rank=0, num_stages=per_worker * num_workers, submod=None)
        for _ in range(per_worker)
    ]
    table = kinds[name](fakes, num_micro_batches).pipeline_order
    return [
        [Action(a.computation_type.value, a.stage_index, a.microbatch_index) for a in table[worker] if a is not None]
        for worker in range(num_workers)
    ]


def as_text(spans: Sequence[Span], num_columns: int | None = None) -> str:
    """One row a worker, time to the right. Without a number of columns, one column is the shortest action.

    `F0` is the forward of micro-batch 0, `B0` its backward, `I0` and `W0` its gradients of inputs and of weights. A
    letter distinguishes the stages of one worker.
    """
    first = min(span.start for span in spans)
    length = max(span.stop for span in spans) - first
    num_workers = 1 + max(span.worker for span in spans)
    has_letters = max(span.stage for span in spans) >= num_workers
    shortest = min((span.stop - span.start for span in spans if span.stop > span.start), default=1.0)
    column_s = shortest if num_columns is None else length / num_columns
    columns = max(1, round(length / column_s))
    labels = {span: _label(span, num_workers if has_letters else None) for span in spans}
    width = max(map(len, labels.values()))
    rows = []
    for worker in range(num_workers):
        own = [span for span in spans if span.worker == worker]
        cells, before = [], None
        for column in range(columns):
            shown = _longest(own, first + column * column_s, first + (column + 1) * column_s)
            text = "." if shown is None else "-" * width if shown is before else labels[shown]
            cells.append(text.ljust(width))
            before = shown
        rows.append(f"worker {worker:<{len(str(num_workers - 1))}} | {' '.join(cells)}".rstrip())
    return "\n".join(rows)


def _label(span: Span, num_workers: int | None) -> str:
    letter = "" if num_workers is None else chr(ord("a") + span.stage // num_workers % 26)
    return f"{span.kind}{span.micro_batch}{letter}"


def _longest(spans: Sequence[Span], start: float, stop: float) -> Span | None:
    """The action that fills most of an interval; None if the worker mostly waits."""
    shares = [(min(span.stop, stop) - max(span.start, start), span) for span in spans]
    share, found = max(shares, key=lambda pair: pair[0])
    busy = sum(max(0.0, part) for part, _ in shares)
    return found if share > 0 and busy >= (stop - start) / 2 else None


def test_schedules_with_several_stages_are_those_of_torch() -> None:
    cases = [
        (name, num_workers, per_worker, num_micro_batches)
        for name in ("interleaved", "zero-bubble")
        for num_workers in (2, 3, 4)
        for per_worker in (1, 2, 3)
        for num_micro_batches in (1, 2, num_workers, 2 * num_workers, 4 * num_workers + 4)
        if (name, per_worker) != ("interleaved", 1)
        and num_micro_batches % max(1, num_micro_batches // num_workers) == 0
    ]
    assert len(cases) > 60
    for name, num_workers, per_worker, num_micro_batches in cases:
        ours = pipeline_order(name, num_workers, per_worker * num_workers, num_micro_batches)
        assert ours == torch_order(name, num_workers, per_worker, num_micro_batches), (name, num_workers, per_worker)


def test_order_of_one_forward_one_backward() -> None:
    shown = ["".join(f"{kind}{k}" for kind, _, k in actions) for actions in pipeline_order("1f1b", 3, 3, 4)]
    assert shown == ["F0F1F2B0F3B1B2B3", "F0F1B0F2B1F3B2B3", "F0B0F1B1F2B2F3B3"]


@pytest.mark.parametrize(("num_workers", "num_micro_batches"), [(2, 4), (4, 4), (4, 12), (8, 32)])
def test_bubble_is_that_of_the_closed_forms(num_workers: int, num_micro_batches: int) -> None:
    p, m = num_workers, num_micro_batches
    for name in ("gpipe", "1f1b"):
        assert predicted_bubble(name, p, p, m) == pytest.approx((p - 1) / (m + p - 1))
    for v in (2, 3):
        assert predicted_bubble("interleaved", p, v * p, m) == pytest.approx((p - 1) / (v * m + p - 1))
    assert predicted_bubble("naive", p, p, 1) == pytest.approx((p - 1) / p)
    # With equal times of forward and of both halves a third of the gap is left.
    assert predicted_bubble("zero-bubble", p, p, m) == pytest.approx((p - 1) / (3 * m + p - 1))


def test_nothing_starts_before_its_input_is_there() -> None:
    for name, num_stages in (("1f1b", 3), ("interleaved", 6), ("zero-bubble", 6)):
        spans = simulate(pipeline_order(name, 3, num_stages, 6))
        stop = {(span.kind, span.stage, span.micro_batch): span.stop for span in spans}
        for span in spans:
            if span.kind == "F" and span.stage:
                assert span.start >= stop["F", span.stage - 1, span.micro_batch]
            if span.kind in "BI" and span.stage < num_stages - 1:
                assert span.start >= stop[span.kind, span.stage + 1, span.micro_batch]
            if span.kind == "W":
                assert span.start >= stop["I", span.stage, span.micro_batch]


def test_text_shows_every_action() -> None:
    assert as_text(simulate(pipeline_order("gpipe", 2, 2, 2))) == (
        "worker 0 | F0 F1 .  .  .  B0 -- B1 --\nworker 1 | .  F0 F1 B0 -- B1 -- .  ."
    )
    shown = as_text(simulate(pipeline_order("interleaved", 2, 4, 2)))
    assert shown.splitlines()[1].startswith("worker 1 | .   F0a F1a F0b B0b ---")


def test_text_of_measured_times_has_the_wanted_width() -> None:
    spans = [Span(0, 0.0, 0.031, "F", 0, 0), Span(1, 0.04, 0.1, "F", 0, 1), Span(0, 0.07, 0.1, "B", 0, 0)]
    assert as_text(spans, 10) == ("worker 0 | F0 -- -- .  .  .  .  B0 -- --\nworker 1 | .  .  .  .  F0 -- -- -- -- --")
    assert idle_share(spans, 2) == pytest.approx(1 - (0.031 + 0.06 + 0.03) / 0.2)


def test_micro_batches_fit_the_batch() -> None:
    assert [most_micro_batches("gpipe", 2, size, 4) for size in (8, 6, 5, 3, 1)] == [4, 3, 1, 3, 1]
    assert most_micro_batches("naive", 2, 8, 4) == 1
    assert most_micro_batches("interleaved", 4, 18, 9) == 6  # 9 on 4 workers cannot be interleaved
    assert worker_stages(1, 3, 9) == [1, 4, 7]


def test_arithmetic_needs_no_torch() -> None:
    program = "import sys, stormo.parallel.pipeline.schedules; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
