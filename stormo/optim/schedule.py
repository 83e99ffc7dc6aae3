"""The learning rate of every step: linear warm-up (Goyal et al., arXiv 1706.02677), then a decay. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Steps are counted from 0; warm-up reaches the peak at step `warmup_steps`."""

    peak: float
    start: float  # learning rate of step 0 when there is warm-up
    warmup_steps: int
    total_steps: int
    decay: str
    steps_per_epoch: int
    decay_every: float  # epochs, for `step`
    decay_factor: float

    def __call__(self, step: int) -> float:
        """The learning rate of a step."""
        if step < self.warmup_steps:
            return self.start + (self.peak - self.start) * step / self.warmup_steps
        return self.peak * DECAYS[self.decay](self, step)


def _progress(schedule: Schedule, step: int) -> float:
    """0 at the end of warm-up, 1 one step after the last."""
    return min(1.0, (step - schedule.warmup_steps) / max(1, schedule.total_steps - schedule.warmup_steps))


def _cosine(schedule: Schedule, step: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * _progress(schedule, step)))


def _linear(schedule: Schedule, step: int) -> float:
    return 1 - _progress(schedule, step)


def _step(schedule: Schedule, step: int) -> float:
    epochs = (step - schedule.warmup_steps) / schedule.steps_per_epoch
    return float(schedule.decay_factor ** math.floor(epochs / schedule.decay_every))


DECAYS: dict[str, Callable[[Schedule, int], float]] = {
    "none": lambda schedule, step: 1.0,
    "cosine": _cosine,
    "linear": _linear,
    "step": _step,
}
