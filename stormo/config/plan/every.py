"""How often something is done: after so many steps, or after so many epochs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stormo.config.plan.stages import Stage, stage_of
from stormo.errors import SettingError


@dataclass(frozen=True, slots=True)
class Every:
    """A pure function of the step, so that a run that goes on does it where one that never stopped does."""

    steps: int
    epochs: float | None = None  # where it was set so: a batch that grows makes other steps of them

    def is_due(self, stages: Sequence[Stage], epoch: int, step: int, position: int) -> bool:
        """Whether it is to be done after a step, which ends at a position of an epoch."""
        if self.epochs is None:
            return step % self.steps == 0
        # Counted back from the end of the epoch: before, the batch may have been another.
        stage = stage_of(stages, epoch)
        to_go = math.ceil((stage.num_train - position) / stage.global_batch_size)
        done = (epoch + 1 - stage.first_epoch) * stage.steps_per_epoch - to_go
        return done % max(1, round(self.epochs * stage.steps_per_epoch)) == 0


def read_every(flag: str, text: str, steps_per_epoch: int, instead: str) -> Every | None:
    """What `500`, `1ep` or `0.25ep` says; None for 0."""
    number, is_epochs = (text[:-2], True) if text.endswith("ep") else (text, False)
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if value < 0 or not math.isfinite(value) or (not is_epochs and value != int(value)):
        raise SettingError(
            f"{flag} {text} was set", "it is neither a number of steps (500) nor of epochs (1ep, 0.25ep)", instead
        )
    if value == 0:
        return None
    return Every(max(1, round(value * steps_per_epoch)), value) if is_epochs else Every(int(value))
