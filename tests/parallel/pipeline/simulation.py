"""What the workers of a pipeline do in each schedule, when, and a picture of it as text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest
from types import SimpleNamespace
from typing import Any, NamedTuple

from stormo.parallel.pipeline.schedules import BACKWARD, FORWARD, INPUTS, WEIGHTS, Span, worker_stages


class Action(NamedTuple):
    """One computation of one stage on one micro-batch."""

    kind: str
    stage: int
    micro_batch: int


def pipeline_order(schedule: str, num_workers: int, num_stages: int, num_micro_batches: int) -> list[list[Action]]:
    """The actions of every worker in order; those of several stages a worker are torch's."""
    if schedule in ("interleaved", "zero-bubble"):
        return _torch_order(schedule, num_workers, num_stages, num_micro_batches)
    orders = []
    for worker in range(num_workers):
        forwards, backwards = ([Action(kind, worker, k) for k in range(num_micro_batches)] for kind in "FB")
        # The first micro-batch goes to the last worker and comes back.
        ahead = num_workers - worker if schedule == "1f1b" else num_micro_batches
        in_turn = chain.from_iterable(zip_longest(backwards, forwards[ahead:]))
        orders.append(forwards[:ahead] + [action for action in in_turn if action])
    return orders


def _torch_order(schedule: str, num_workers: int, num_stages: int, num_micro_batches: int) -> list[list[Action]]:
    from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

    fake = SimpleNamespace(group_size=num_workers, group_rank=0, num_stages=num_stages, submod=None)
    make: Any = ScheduleInterleaved1F1B if schedule == "interleaved" else ScheduleInterleavedZeroBubble
    table = make([fake for _ in worker_stages(0, num_workers, num_stages)], num_micro_batches).pipeline_order
    return [
        [Action(a.computation_type.value, a.stage_index, a.microbatch_index) for a in table[worker] if a is not None]
        for worker in range(num_workers)
    ]


def simulate(order: Sequence[Sequence[Action]]) -> list[Span]:
    """All actions by their start, for equal stages; each starts as soon as its inputs and its worker are ready."""
    last = max(action.stage for actions in order for action in actions)
    done: dict[Action, float] = {}
    free, waiting, spans = [0.0] * len(order), [list(actions) for actions in order], list[Span]()
    while any(waiting):
        num_before = len(spans)
        for worker, actions in enumerate(waiting):
            while actions and done.keys() >= (needed := _needed(actions[0], last)):
                action = actions.pop(0)
                start = max([free[worker], *(done[one] for one in needed)])
                free[worker] = done[action] = start + _cost(action)
                spans.append(Span(worker, start, free[worker], action.kind, action.micro_batch, action.stage))
        assert len(spans) > num_before, "the order is a deadlock"
    return sorted(spans, key=lambda span: (span.start, span.worker))


def _needed(action: Action, last: int) -> set[Action]:
    kind, stage, k = action
    if kind == FORWARD:
        return {Action(FORWARD, stage - 1, k)} if stage else set()
    if kind == WEIGHTS:
        return {Action(INPUTS, stage, k)}
    return {Action(FORWARD, stage, k)} | ({Action(kind, stage + 1, k)} if stage < last else set())


def _cost(action: Action) -> float:
    if action.kind in (INPUTS, WEIGHTS) and action.stage == 0:  # its inputs need no gradients
        return 0.0 if action.kind == INPUTS else 2.0
    return 2.0 if action.kind == BACKWARD else 1.0


def as_text(spans: Sequence[Span]) -> str:
    """One row a worker, time to the right, a column as long as a forward: `F0` is the forward of micro-batch 0."""
    length = int(max(span.stop for span in spans))
    rows = [[". "] * length for _ in range(1 + max(span.worker for span in spans))]
    for span in spans:
        label = f"{span.kind}{span.micro_batch}"
        rows[span.worker][int(span.start) : int(span.stop)] = [label, "--"][: int(span.stop - span.start)]
    return "\n".join(f"worker {worker} | {' '.join(cells)}".rstrip() for worker, cells in enumerate(rows))
