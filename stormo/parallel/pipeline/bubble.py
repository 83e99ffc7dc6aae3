"""How long workers of a pipeline wait for each other: the order of a schedule played with the cost of every stage.

Pure arithmetic; handing over costs nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stormo.parallel.pipeline.orders import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action, orders


class Span(NamedTuple):
    """What a worker did from when to when."""

    worker: int
    start: float
    stop: float
    kind: str
    micro_batch: int
    stage: int


@dataclass(frozen=True, slots=True)
class Costs:
    """Time of every stage for one micro-batch, in any unit."""

    forward: Sequence[float]
    backward: Sequence[float]
    weights: Sequence[float]  # the part of the backward that gives the gradients of the weights

    @classmethod
    def even(cls, num_stages: int, *, forward: float = 1.0, backward: float = 2.0) -> Costs:
        """Equal stages, whose backward gives the gradients of inputs and of weights in equal times."""
        return cls([forward] * num_stages, [backward] * num_stages, [backward / 2] * num_stages)

    def of(self, action: Action) -> float:
        """The time of one action."""
        kind, stage, _ = action
        if kind == FORWARD:
            return self.forward[stage]
        # Nobody wants the gradients of the first stage's inputs: its backward is not split.
        weights = self.weights[stage] if stage else self.backward[stage]
        return {BACKWARD: self.backward[stage], INPUTS: self.backward[stage] - weights, WEIGHTS: weights}[kind]


def simulate(order: Sequence[Sequence[Action]], costs: Costs) -> list[Span]:
    """Start and stop of every action, each as early as its inputs and its worker allow, in the order of starts."""
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
                free[worker] = done[action] = start + costs.of(action)
                spans.append(Span(worker, start, free[worker], action.kind, action.micro_batch, action.stage))
        assert len(spans) > num_before, "an order in which workers wait for each other for ever"
    return sorted(spans, key=lambda span: (span.start, span.worker))


def _needed(action: Action, last_stage: int, done: dict[Action, float]) -> list[float] | None:
    """When what an action needs was done; None where it is not yet."""
    kind, stage, k = action
    needs: list[tuple[Action, ...]] = []  # of each one
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
    """The share of all workers' time, from the first start to the last stop, in which they did nothing."""
    listed = list(spans)
    length = max(span.stop for span in listed) - min(span.start for span in listed)
    busy = sum(span.stop - span.start for span in listed)
    return 1.0 - busy / (num_workers * length) if length > 0 else 0.0


def predicted_bubble(
    schedule: str, num_workers: int, num_stages: int, num_micro_batches: int, costs: Costs | None = None
) -> float:
    """The idle share that a schedule must have; equal stages unless their costs are known."""
    order = orders(schedule, num_workers, num_stages, num_micro_batches)
    return idle_share(simulate(order, costs or Costs.even(num_stages)), num_workers)
