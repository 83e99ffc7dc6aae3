"""Pipeline schedules: the stages of a worker, the micro-batches that fit, and the idle share.

`naive` and `gpipe` (Huang et al., arXiv 1811.06965) run all forwards, then all backwards. `1f1b` (Narayanan et al.,
arXiv 2104.04473) starts a backward as soon as it can and holds fewer activations. `interleaved` (the same paper) gives
each worker several stages. `zero-bubble` (Qi et al., arXiv 2401.10241, ZB1P) delays the gradients of weights to where
a worker would wait. torch's own schedules run them. Pure arithmetic without torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"  # a backward is whole, or of inputs and of weights
_SEVERAL_STAGES = ("interleaved", "zero-bubble")


def worker_stages(worker: int, num_workers: int, num_stages: int) -> list[int]:
    """The stages of a worker: every `num_workers`-th."""
    return list(range(worker, num_stages, num_workers))


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


class Span(NamedTuple):
    """An action of a worker, with its start and stop."""

    worker: int
    start: float
    stop: float
    kind: str
    micro_batch: int
    stage: int


def idle_share(spans: Iterable[Span], num_workers: int) -> float:
    """The idle share of the workers' time, from the first start to the last stop."""
    listed = list(spans)
    length = max(span.stop for span in listed) - min(span.start for span in listed)
    busy = sum(span.stop - span.start for span in listed)
    return 1.0 - busy / (num_workers * length) if length > 0 else 0.0
