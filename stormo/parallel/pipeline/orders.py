"""What every worker of a pipeline does in which order, for each schedule by name; pure arithmetic.

`naive` and `gpipe` (Huang et al., arXiv 1811.06965) run all forwards, then all backwards; `1f1b` (Narayanan et al.,
arXiv 2104.04473) starts a backward as soon as it can and so holds fewer activations; `interleaved` (the same paper)
gives each worker several stages; `zero-bubble` (Qi et al., arXiv 2401.10241, ZB1P) computes the gradients of weights
later than those of inputs, where the worker would wait. torch's own schedules run these orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stormo.errors import SettingError, counted, unknown_name

# forward; whole backward; gradients of the inputs alone; gradients of the weights alone
FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"

# Each schedule in words, for help and explanations.
SCHEDULES: dict[str, str] = {
    "naive": "one batch through the layers of one worker after the other",
    "gpipe": "all micro-batches forward, then all backward",
    "1f1b": "one forward, one backward in turn, so that few activations are held",
    "interleaved": "several stages a worker, one forward and one backward in turn",
    "zero-bubble": "the gradients of the weights are computed where a worker would wait",
}
_SEVERAL_STAGES = ("interleaved", "zero-bubble")


class Action(NamedTuple):
    """One computation of one stage on one micro-batch."""

    kind: str
    stage: int
    micro_batch: int


def stages_of(worker: int, num_workers: int, num_stages: int) -> list[int]:
    """The stages of a worker: every `num_workers`-th."""
    return list(range(worker, num_stages, num_workers))


def orders(schedule: str, num_workers: int, num_stages: int, num_micro_batches: int) -> list[list[Action]]:
    """The actions of every worker, one after the other."""
    check(schedule, num_workers, num_stages, num_micro_batches)
    make = _alternating if schedule in _SEVERAL_STAGES else _one_stage
    return [make(schedule, worker, num_workers, num_stages, num_micro_batches) for worker in range(num_workers)]


def check(schedule: str, num_workers: int, num_stages: int, num_micro_batches: int) -> None:
    """Raise a sentence where a schedule cannot run with these numbers."""
    if schedule not in SCHEDULES:
        raise unknown_name("pipeline schedule", schedule, SCHEDULES)
    what = f"the pipeline schedule {schedule} was set"
    per_worker, left = divmod(num_stages, num_workers)
    if left or not per_worker:
        raise SettingError(
            what,
            f"{counted(num_stages, 'stage')} cannot be dealt evenly to {counted(num_workers, 'worker')}",
            f"set {num_workers}, {2 * num_workers} or another multiple of {num_workers} stages",
        )
    if per_worker > 1 and schedule not in _SEVERAL_STAGES:
        raise SettingError(
            what,
            f"it has one stage a worker and {num_stages} / {num_workers} = {per_worker}",
            f"set {num_workers} stages, or the schedule interleaved or zero-bubble",
        )
    if per_worker == 1 and schedule == "interleaved":
        raise SettingError(
            what,
            f"{num_stages} / {num_workers} = 1 stage a worker leaves nothing to interleave",
            f"set {2 * num_workers} stages, or the schedule 1f1b",
        )
    if schedule == "naive" and num_micro_batches != 1:
        raise SettingError(
            what, f"it knows no micro-batches and {num_micro_batches} were set", "set 1, or the schedule gpipe"
        )
    if not _is_possible(schedule, num_workers, num_micro_batches):
        rounds = max(1, num_micro_batches // num_workers)
        raise SettingError(
            what,
            f"{counted(num_micro_batches, 'micro-batch')} on {num_workers} workers make {rounds} rounds, "
            f"and {num_micro_batches} / {rounds} is not whole",
            f"set {num_micro_batches // num_workers * num_workers} micro-batches, or another multiple of {num_workers}",
        )


def fitting(schedule: str, num_workers: int, batch_size: int, wanted: int) -> int:
    """Micro-batches of a batch: the most up to `wanted` that cut it into equal parts and that the schedule can run."""
    largest = 1 if schedule == "naive" else min(wanted, batch_size)
    possible = (
        count
        for count in range(largest, 0, -1)
        if batch_size % count == 0 and _is_possible(schedule, num_workers, count)
    )
    return next(possible, 1)


def _is_possible(schedule: str, num_workers: int, num_micro_batches: int) -> bool:
    if num_micro_batches < 1:
        return False
    return schedule not in _SEVERAL_STAGES or num_micro_batches % max(1, num_micro_batches // num_workers) == 0


def _one_stage(schedule: str, worker: int, num_workers: int, _num_stages: int, num_micro_batches: int) -> list[Action]:
    forwards = [Action(FORWARD, worker, k) for k in range(num_micro_batches)]
    backwards = [Action(BACKWARD, worker, k) for k in range(num_micro_batches)]
    # So many forwards until the first micro-batch has been to the last worker and back.
    ahead = num_workers - 1 - worker if schedule == "1f1b" else num_micro_batches
    return _in_turn(forwards, backwards, ahead)


def _in_turn(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> list[Action]:
    """Some forwards first, then a forward and a backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    order = list(forwards[:ahead])
    for index, backward in enumerate(backwards):
        order += [*forwards[ahead + index : ahead + index + 1], backward]
    return order


def _alternating(schedule: str, worker: int, num_workers: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """Several stages a worker: a round of micro-batches through one stage after the other, then the next round."""
    splits = schedule == "zero-bubble"
    per_round = num_micro_batches // max(1, num_micro_batches // num_workers)
    own = stages_of(worker, num_workers, num_stages)
    rounds = [range(start, start + per_round) for start in range(0, num_micro_batches, per_round)]
    forwards = [Action(FORWARD, stage, k) for part in rounds for stage in own for k in part]
    kind = INPUTS if splits else BACKWARD
    backwards = [Action(kind, stage, k) for part in rounds for stage in reversed(own) for k in part]
    hops = num_workers - 1 - worker
    ahead = (len(own) - 1) * per_round + (hops if splits else 2 * hops)
    order = _in_turn(forwards, backwards, ahead)
    return _with_weights(order, backwards, worker) if splits else order


def _with_weights(order: Sequence[Action], backwards: Sequence[Action], delay: int) -> list[Action]:
    """The gradients of the weights, `delay` backwards after those of the inputs; the rest at the end."""
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
