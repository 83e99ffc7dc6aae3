"""A batch that grows while the rate stays, instead of a rate that falls (Smith et al., arXiv 1711.00489).

A stage is a stretch of epochs with one global batch. Pure arithmetic: the order of samples does not depend on it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stormo.errors import SettingError, counted

_ENTRY = re.compile(r"(\d+):(\d+(?:\.\d+)?)x")


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of epochs with one global batch."""

    first_epoch: int  # epochs are counted from 1
    global_batch_size: int
    accumulate: int
    num_train: int
    first_step: int = 0  # steps of all stages before it

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in each of its epochs."""
        return math.ceil(self.num_train / self.global_batch_size)


def read_growth(text: str | None) -> tuple[tuple[int, float], ...]:
    """What `30:2x,60:2x` says: after how many epochs the batch grows, and by which factor."""
    if text is None:
        return ()
    growth: list[tuple[int, float]] = []
    for entry in text.split(","):
        found = _ENTRY.fullmatch(entry.strip())
        if found is None:
            raise SettingError(
                f"--grow-batch {text} was set",
                f"{entry.strip() or 'an empty entry'} is not of the form EPOCHS:FACTORx",
                "set something like --grow-batch 30:2x,60:2x",
            )
        after, factor = int(found[1]), float(found[2])
        if factor <= 1:
            raise SettingError(
                f"--grow-batch {text} was set",
                f"a factor of {factor:g} does not make the batch grow",
                "set factors above 1, as in 30:2x",
            )
        if after < 1 or (growth and after <= growth[-1][0]):
            raise SettingError(
                f"--grow-batch {text} was set",
                f"{after} epochs do not follow on {growth[-1][0]}"
                if growth
                else "before the first epoch there is nothing to grow from",
                "name the epochs in rising order, from 1",
            )
        growth.append((after, factor))
    return tuple(growth)


def make_stages(
    first: Stage, growth: Sequence[tuple[int, float]], num_workers: int, most_per_pass: int
) -> tuple[Stage, ...]:
    """All stages, each cut into passes of at most so many samples of one worker.

    Args:
        first: the batch that training begins with, as the user has cut it.
        growth: after how many epochs the batch grows, and by which factor.
        num_workers: that share a batch.
        most_per_pass: samples of one worker in one pass; what the first stage takes is allowed as well.
    """
    stages, size = [first], float(first.global_batch_size)
    for after, factor in growth:
        last = stages[-1]
        size *= factor
        total = round(size)
        share = math.ceil(min(total, first.num_train) / num_workers)
        stages.append(
            Stage(
                first_epoch=after + 1,
                global_batch_size=total,
                accumulate=max(first.accumulate, math.ceil(share / most_per_pass)),
                num_train=first.num_train,
                first_step=last.first_step + (after + 1 - last.first_epoch) * last.steps_per_epoch,
            )
        )
    return tuple(stages)


def recut(stages: Sequence[Stage], accumulate: int, num_workers: int) -> tuple[Stage, ...]:
    """The same stages where the first is cut into other passes, and the others into passes of that size."""
    first = stages[0]
    share = math.ceil(min(first.global_batch_size, first.num_train) / num_workers)
    most = math.ceil(share / accumulate)
    shares = [math.ceil(min(stage.global_batch_size, stage.num_train) / num_workers) for stage in stages]
    return tuple(
        replace(stage, accumulate=accumulate if stage is first else max(accumulate, math.ceil(share / most)))
        for stage, share in zip(stages, shares, strict=True)
    )


def num_steps(stages: Sequence[Stage], epochs: int) -> int:
    """Steps of so many epochs."""
    last = stage_of(stages, epochs)
    return last.first_step + (epochs + 1 - last.first_epoch) * last.steps_per_epoch


def stage_of(stages: Sequence[Stage], epoch: int) -> Stage:
    """The stage that an epoch belongs to."""
    return next(stage for stage in reversed(stages) if stage.first_epoch <= max(epoch, 1))


def describe(stages: Sequence[Stage], num_workers: int, epochs: int) -> str:
    """How the batch grows, in words."""
    texts = []
    for stage in stages[1:]:
        after = stage.first_epoch - 1
        share = math.ceil(min(stage.global_batch_size, stage.num_train) / num_workers)
        most = math.ceil(share / stage.accumulate)
        cut = f"{counted(stage.accumulate, 'pass')} of up to {most} × {counted(num_workers, 'worker')}"
        never = " (never, as training ends before)" if after >= epochs else ""
        texts.append(f"{stage.global_batch_size} after {counted(after, 'epoch')} = {cut}{never}")
    return f"{stages[0].global_batch_size}, then {', then '.join(texts)}; the rate stays as it is"
