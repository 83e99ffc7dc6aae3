"""A batch that grows while the rate stays, instead of a rate that falls (Smith et al., arXiv 1711.00489).

A stage is a stretch of epochs with one global batch. Pure arithmetic: the order of samples does not depend on it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from stormo.errors import SettingError, counted

_ENTRY = re.compile(r"([0-9]+):([0-9]+(?:\.[0-9]+)?)[xX]")


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of epochs with one global batch."""

    first_epoch: int  # epochs are counted from 1
    global_batch_size: int
    accumulate: int
    num_train: int
    first_step: int = 0  # steps of all stages before it

    def share(self, num_workers: int) -> int:
        """The most samples of one worker in one step."""
        return math.ceil(min(self.global_batch_size, self.num_train) / num_workers)

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
                f"--grow-batch {text or 'without a plan'} was set",
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
                f"{after} does not follow on {growth[-1][0]}"
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
        grown = replace(
            first,
            first_epoch=after + 1,
            global_batch_size=max(last.global_batch_size, min(round(size), first.num_train)),  # no more than there are
            first_step=last.first_step + (after + 1 - last.first_epoch) * last.steps_per_epoch,
        )
        passes = max(first.accumulate, math.ceil(grown.share(num_workers) / most_per_pass))
        stages.append(replace(grown, accumulate=passes))
    return tuple(stages)


def recut(stages: Sequence[Stage], accumulate: int, num_workers: int) -> tuple[Stage, ...]:
    """The same stages where the first is cut into other passes, and the others into passes of that size."""
    most = math.ceil(stages[0].share(num_workers) / accumulate)
    passes = [max(accumulate, math.ceil(stage.share(num_workers) / most)) for stage in stages]
    return tuple(replace(stage, accumulate=count) for stage, count in zip(stages, passes, strict=True))


def num_steps(stages: Sequence[Stage], epochs: int) -> int:
    """Steps of so many epochs."""
    last = stage_of(stages, epochs)
    return last.first_step + (epochs + 1 - last.first_epoch) * last.steps_per_epoch


def stage_of(stages: Sequence[Stage], epoch: int) -> Stage:
    """The stage that an epoch belongs to."""
    return next(stage for stage in reversed(stages) if stage.first_epoch <= max(epoch, 1))


def steps_to_come(stages: Sequence[Stage], epochs: int, epoch: int, position: int) -> Iterator[tuple[int, int]]:
    """Samples and passes of every kind of step from a position of an epoch to the end of the last one."""
    first_ones = {epoch, epoch + 1, *(stage.first_epoch for stage in stages)}
    for each in sorted(one for one in first_ones if epoch <= one <= epochs):
        stage = stage_of(stages, each)
        to_go = stage.num_train - (position if each == epoch else 0)
        sizes = (min(stage.global_batch_size, to_go), to_go % stage.global_batch_size)
        yield from ((size, stage.accumulate) for size in sizes if size)


def describe(stages: Sequence[Stage], num_workers: int, epochs: int) -> str:
    """How the batch grows, in words."""
    texts = []
    for stage in stages[1:]:
        after = stage.first_epoch - 1
        most = math.ceil(stage.share(num_workers) / stage.accumulate)
        cut = f"{counted(stage.accumulate, 'pass')} of up to {most} × {counted(num_workers, 'worker')}"
        if stage.global_batch_size == stage.num_train:
            cut += ", which are all samples"
        never = " (never, as training ends before)" if after >= epochs else ""
        texts.append(f"{stage.global_batch_size} after {counted(after, 'epoch')} = {cut}{never}")
    return f"{stages[0].global_batch_size}, then {', then '.join(texts)}; the rate stays as it is"
