"""Pipeline schedules: the actions of every worker in order, the bubble that follows, and a picture as text.

`naive` and `gpipe` (Huang et al., arXiv 1811.06965) run all forwards, then all backwards. `1f1b` (Narayanan et al.,
arXiv 2104.04473) starts a backward as soon as it can and holds fewer activations. `interleaved` (the same paper) gives
each worker several stages. `zero-bubble` (Qi et al., arXiv 2401.10241, ZB1P) delays the gradients of weights to where
a worker would wait. torch's own schedules run these orders. Pure arithmetic without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"  # a backward is whole, or of inputs and of weights
_SEVERAL_STAGES = ("interleaved", "zero-bubble")


class Action(NamedTuple):
    """One computation of one stage on one micro-batch."""

    kind: str
    stage: int
    micro_batch: int


def worker_stages(worker: int, num_workers: int, num_stages: int) -> list[int]:
    """The stages of a worker: every `num_workers`-th."""
    return list(range(worker, num_stages, num_workers))


def pipeline_order(schedule: str, num_workers: int, num_stages: int, num_micro_batches: int) -> list[list[Action]]:
    """The actions of every worker, in order."""
    make = _interleaved if schedule in _SEVERAL_STAGES else _one_stage
    return [make(schedule, worker, num_workers, num_stages, num_micro_batches) for worker in range(num_workers)]


def most_micro_batches(schedule: str, num_workers: int, num_samples: int, limit: int) -> int:
    """The most micro-batches, up to a limit, that are equally large and that the schedule can run."""
    largest = 1 if schedule == "naive" else min(limit, num_samples)
    possible = (
        count
        for count in range(largest, 0, -1)
        if num_samples % count == 0
        and (schedule not in _SEVERAL_STAGES or count % max(1, count // num_workers) == 0)  # equal rounds
    )
    return next(possible, 1)


def _one_stage(schedule: str, worker: int, num_workers: int, _num_stages: int, num_micro_batches: int) -> list[Action]:
    forwards = [Action(FORWARD, worker, k) for k in range(num_micro_batches)]
    backwards = [Action(BACKWARD, worker, k) for k in range(num_micro_batches)]
    # Forwards until the first micro-batch has been to the last worker and back.
    ahead = num_workers - 1 - worker if schedule == "1f1b" else num_micro_batches
    return _alternate(forwards, backwards, ahead)


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then a forward and a backward in turn, then the remaining backwards."""
    ahead = min(ahead, len(forwards))
    order = list(forwards[:ahead])
    for index, backward in enumerate(backwards):
        order += [*forwards[ahead + index : ahead + index + 1], backward]
    return order


def _interleaved(schedule: str, worker: int, num_workers: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """Several stages a worker: a round of micro-batches runs through all of them, then the next round."""
    splits = schedule == "zero-bubble"
    per_round = num_micro_batches // max(1, num_micro_batches // num_workers)
    own = worker_stages(worker, num_workers, num_stages)
    rounds = [range(start, start + per_round) for start in range(0, num_micro_batches, per_round)]
    forwards = [Action(FORWARD, stage, k) for one in rounds for stage in own for k in one]
    kind = INPUTS if splits else BACKWARD
    backwards = [Action(kind, stage, k) for one in rounds for stage in reversed(own) for k in one]
    hops = num_workers - 1 - worker
    ahead = (len(own) - 1) * per_round + (hops if splits else 2 * hops)
    order = _alternate(forwards, backwards, ahead)
    return _with_weights(order, backwards, worker) if splits else order


def _with_weights(order: Sequence[Action], backwards: Sequence[Action], delay: int) -> list[Action]:
    """Add the gradients of weights, `delay` backwards after those of inputs, and the rest at the end."""
    weights = [Action(WEIGHTS, stage, k) for _, stage, k in backwards]
    found: list[Action] = []
    num_backwards = 0
    for action in order:
        found.append(action)
        if action.kind == INPUTS:
            num_backwards += 1
            if num_backwards > delay:
                found.append(weights[num_backwards - 1 - delay])
    return found + weights[max(0, num_backwards - delay) :]


class Span(NamedTuple):
    """An action of a worker, with its start and stop."""

    worker: int
    start: float
    stop: float
    kind: str
    micro_batch: int
    stage: int


def _cost(action: Action) -> float:
    """The time of an action, if all stages are equal; sending costs nothing."""
    if action.kind in (INPUTS, WEIGHTS) and action.stage == 0:  # its inputs need no gradients
        return 0.0 if action.kind == INPUTS else 2.0
    return 2.0 if action.kind == BACKWARD else 1.0


def simulate(order: Sequence[Sequence[Action]]) -> list[Span]:
    """All actions of equal stages by their start; each starts as soon as its inputs and its worker are ready."""
    done: dict[Action, float] = {}
    free = [0.0] * len(order)
    waiting = [list(reversed(actions)) for actions in order]
    last_stage = max(action.stage for actions in order for action in actions)
    spans: list[Span] = []
    while any(waiting):
        num_before = len(spans)
        for worker, actions in enumerate(waiting):
            while actions and (needed := _needed(actions[-1], last_stage, done)) is not None:
                action = actions.pop()
                start = max([free[worker], *needed])
                free[worker] = done[action] = start + _cost(action)
                spans.append(Span(worker, start, free[worker], action.kind, action.micro_batch, action.stage))
        assert len(spans) > num_before, "the order is a deadlock"
    return sorted(spans, key=lambda span: (span.start, span.worker))


def _needed(action: Action, last_stage: int, done: dict[Action, float]) -> list[float] | None:
    """When the inputs of an action were done; None if one is not done yet."""
    kind, stage, k = action
    needs: list[tuple[Action, ...]] = []  # one of each tuple
    if kind == FORWARD and stage > 0:
        needs.append((Action(FORWARD, stage - 1, k),))
    elif kind == WEIGHTS:
        needs.append((Action(INPUTS, stage, k),))
    elif kind != FORWARD:
        needs.append((Action(FORWARD, stage, k),))
        if stage < last_stage:
            needs.append((Action(BACKWARD, stage + 1, k), Action(INPUTS, stage + 1, k)))
    times = [next((done[need] for need in either if need in done), None) for either in needs]
    return None if None in times else [time for time in times if time is not None]


def idle_share(spans: Iterable[Span], num_workers: int) -> float:
    """The idle share of the workers' time, from the first start to the last stop."""
    listed = list(spans)
    length = max(span.stop for span in listed) - min(span.start for span in listed)
    busy = sum(span.stop - span.start for span in listed)
    return 1.0 - busy / (num_workers * length) if length > 0 else 0.0


def predicted_bubble(schedule: str, num_workers: int, num_stages: int, num_micro_batches: int) -> float:
    """The idle share of a schedule, for equal stages."""
    return idle_share(simulate(pipeline_order(schedule, num_workers, num_stages, num_micro_batches)), num_workers)
