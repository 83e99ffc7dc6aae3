"""The learning rate of every step: linear warm-up (Goyal et al., arXiv 1706.02677), then a decay. Pure arithmetic.

`one-cycle` has no warm-up: it rises and falls by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from stormo.config.plan import Plan
from stormo.config.schema import CYCLE_END, CYCLE_START, DECAY_SHARES, TrainConfig


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
    decay_share: float | None = None  # of all steps, in which `wsd` and `one-cycle` fall; None for their defaults

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


def _wsd(schedule: Schedule, step: float) -> float:
    """Warm-up, stable, decay (Hu et al., arXiv 2404.06395): the share of the last phase that is left."""
    begin = max(schedule.warmup_steps, schedule.total_steps * (1 - (schedule.decay_share or DECAY_SHARES["wsd"])))
    return 1 - min(1.0, max(0.0, step - begin) / max(1.0, schedule.total_steps - begin))


def _one_cycle(schedule: Schedule, step: float) -> float:
    """Smith, Topin, arXiv 1708.07120: as torch.optim.lr_scheduler.OneCycleLR by default, with a constant momentum."""
    last = max(1, schedule.total_steps - 1)
    top = schedule.total_steps * (1 - (schedule.decay_share or DECAY_SHARES["one-cycle"])) - 1
    if step <= top:
        return _between(CYCLE_START, 1.0, step / max(top, 1e-9))
    return _between(1.0, CYCLE_END, min(1.0, (step - top) / (last - top)))


def _between(start: float, end: float, progress: float) -> float:
    """Along half a cosine."""
    return end + (start - end) / 2 * (1 + math.cos(math.pi * progress))


DECAYS: dict[str, Callable[[Schedule, float], float]] = {
    "none": lambda schedule, step: 1.0,
    "cosine": _cosine,
    "linear": _linear,
    "step": _step,
    "wsd": _wsd,
    "wsd-sqrt": lambda schedule, step: 1 - math.sqrt(1 - _wsd(schedule, step)),  # Hägele et al., arXiv 2405.18392
    "one-cycle": _one_cycle,
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
        decay_share=config.optimizer.decay_share,
    )
    return replace(made, warmup_steps=0, decay="none") if is_constant else made
