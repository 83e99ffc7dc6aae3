"""The learning rate of every step: linear warm-up (Goyal et al., arXiv 1706.02677), then a decay. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from stormo.config.plan import Plan
from stormo.config.schema import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Steps are counted from 0; warm-up reaches the peak at step `warmup_steps`.

    Where the batch grows, steps are counted in those of the first batch.
    """

    peak: float
    start: float  # learning rate of step 0 when there is warm-up
    warmup_steps: int
    total_steps: int
    decay: str
    steps_per_epoch: int
    decay_every: float  # epochs, for `step`
    decay_factor: float

    def __call__(self, step: float) -> float:
        """The learning rate of a step."""
        if step < self.warmup_steps:
            return self.start + (self.peak - self.start) * step / self.warmup_steps
        return self.peak * DECAYS[self.decay](self, step)


def _progress(schedule: Schedule, step: float) -> float:
    """0 at the end of warm-up, 1 one step after the last."""
    return min(1.0, (step - schedule.warmup_steps) / max(1, schedule.total_steps - schedule.warmup_steps))


def _cosine(schedule: Schedule, step: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * _progress(schedule, step)))


def _linear(schedule: Schedule, step: float) -> float:
    return 1 - _progress(schedule, step)


def _step(schedule: Schedule, step: float) -> float:
    epochs = (step - schedule.warmup_steps) / schedule.steps_per_epoch
    return float(schedule.decay_factor ** math.floor(epochs / schedule.decay_every))


DECAYS: dict[str, Callable[[Schedule, float], float]] = {
    "none": lambda schedule, step: 1.0,
    "cosine": _cosine,
    "linear": _linear,
    "step": _step,
}


def make_schedule(config: TrainConfig, plan: Plan, factor: float = 1.0, *, is_constant: bool = False) -> Schedule:
    """The schedule of a run, times a factor; constant where the task has a scheduler."""
    made = Schedule(
        peak=plan.learning_rate * factor,
        start=plan.warmup_start * factor,
        warmup_steps=plan.warmup_steps,
        total_steps=plan.steps_per_epoch * plan.epochs,
        decay=config.optimizer.decay,
        steps_per_epoch=plan.steps_per_epoch,
        decay_every=config.optimizer.decay_every,
        decay_factor=config.optimizer.decay_factor,
    )
    return replace(made, warmup_steps=0, decay="none") if is_constant else made
