"""The steps of a run: facts of the data, stages of a growing batch, intervals, and the steps that --profile records."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from stormo.errors import SettingError, pluralize


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What the plan needs to know of a task."""

    num_train: int  # 0 for a stream of unknown length
    num_validation: int | None  # None for a stream of unknown length, which is counted while it is read
    is_stream: bool = False  # the training set can only be read in its own order
    flops_per_sample: float | None = None  # forward and backward
    compile_saves: float | None = None  # share of a step's time that torch.compile is known to save
    train_bytes: int | None = None  # of the training set, where it can be kept on a device
    unit: str = "samples"  # of the speed: images, tokens, ...
    units_per_sample: int = 1
    has_accuracy: bool | None = None  # whether metrics() reports an `accuracy`; None: not known yet
    has_convolutions: bool | None = None  # whether the model has any; None: not known yet
    has_batch_norms: bool | None = None
    data: str = ""  # description of the training set
    data_sha256: str | None = None  # of all data, where it is known; must be the same on every node


_ENTRY = re.compile(r"([0-9]+):([0-9]+(?:\.[0-9]+)?)[xX]")


@dataclass(frozen=True, slots=True)
class Stage:
    """Epochs with one global batch."""

    first_epoch: int  # counted from 1
    global_batch_size: int
    accumulate: int
    num_train: int
    first_step: int = 0  # steps of all stages before it

    def share(self, num_workers: int) -> int:
        """The samples of a step over the number of workers, rounded up."""
        return math.ceil(min(self.global_batch_size, self.num_train) / num_workers)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in each of its epochs."""
        return math.ceil(self.num_train / self.global_batch_size)


def parse_growth(text: str | None) -> tuple[tuple[int, float], ...]:
    """Parse `30:2x,60:2x`: after how many epochs the batch grows, and by which factor."""
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
        if factor <= 1 or after <= (growth[-1][0] if growth else 0):
            raise SettingError(
                f"--grow-batch {text} was set",
                "factors must be above 1, and epochs rise from 1",
                "set something like --grow-batch 30:2x,60:2x",
            )
        growth.append((after, factor))
    return tuple(growth)


def make_stages(
    first: Stage, growth: Sequence[tuple[int, float]], num_workers: int, max_micro_batch: int
) -> tuple[Stage, ...]:
    """All stages.

    Args:
        first: the first batch.
        growth: after how many epochs the batch grows, and by which factor.
        num_workers: the data-parallel size.
        max_micro_batch: samples of one worker in a micro-batch; that of the first stage is allowed as well.
    """
    stages, size = [first], float(first.global_batch_size)
    for after, factor in growth:
        last = stages[-1]
        size *= factor
        grown = replace(
            first,
            first_epoch=after + 1,
            global_batch_size=max(last.global_batch_size, round(min(size, first.num_train))),
            first_step=last.first_step + (after + 1 - last.first_epoch) * last.steps_per_epoch,
        )
        accumulate = max(first.accumulate, math.ceil(grown.share(num_workers) / max_micro_batch))
        stages.append(replace(grown, accumulate=accumulate))
    return tuple(stages)


def recut(stages: Sequence[Stage], accumulate: int, num_workers: int) -> tuple[Stage, ...]:
    """The same stages with other micro-batches in the first, and micro-batches of that size in the others."""
    most = math.ceil(stages[0].share(num_workers) / accumulate)
    return tuple(
        replace(stage, accumulate=max(accumulate, math.ceil(stage.share(num_workers) / most))) for stage in stages
    )


def num_steps(stages: Sequence[Stage], epochs: int) -> int:
    """Steps of the first epochs."""
    last = stage_of(stages, epochs)
    return last.first_step + (epochs + 1 - last.first_epoch) * last.steps_per_epoch


def stage_of(stages: Sequence[Stage], epoch: int) -> Stage:
    """The stage of an epoch."""
    return next(stage for stage in reversed(stages) if stage.first_epoch <= max(epoch, 1))


def remaining_step_sizes(stages: Sequence[Stage], epochs: int, epoch: int, position: int) -> Iterator[tuple[int, int]]:
    """The distinct (samples, micro-batches) of all steps from a position in an epoch to the end of the last one."""
    first_epochs = {epoch, epoch + 1, *(stage.first_epoch for stage in stages)}
    for each in sorted(first for first in first_epochs if epoch <= first <= epochs):
        stage = stage_of(stages, each)
        remaining = stage.num_train - (position if each == epoch else 0)
        sizes = (min(stage.global_batch_size, remaining), remaining % stage.global_batch_size)
        yield from ((size, stage.accumulate) for size in sizes if size)


def describe(stages: Sequence[Stage], num_workers: int, epochs: int) -> str:
    """How the batch grows."""
    texts = []
    for stage in stages[1:]:
        after = stage.first_epoch - 1
        most = math.ceil(stage.share(num_workers) / stage.accumulate)
        parts = f"{pluralize(stage.accumulate, 'micro-batch')} of up to {most} × {pluralize(num_workers, 'worker')}"
        if stage.global_batch_size == stage.num_train:
            parts += ", which are all samples"
        never = " (never, as training ends before)" if after >= epochs else ""
        texts.append(f"{stage.global_batch_size} after {pluralize(after, 'epoch')} = {parts}{never}")
    return f"{stages[0].global_batch_size}, then {', then '.join(texts)}; the learning rate does not change"


@dataclass(frozen=True, slots=True)
class Interval:
    """How often something is done; a pure function of the step, so that a resumed run does it at the same steps."""

    steps: int
    epochs: float | None = None  # where it was set in epochs, which have fewer steps once the batch has grown

    def is_due(self, stages: Sequence[Stage], epoch: int, step: int, position: int) -> bool:
        """Whether it is due after a step, which ends at a position in an epoch."""
        if self.epochs is None:
            return step % self.steps == 0
        # Counted back from the end of the epoch: the run may have begun it with another batch size.
        stage = stage_of(stages, epoch)
        remaining = math.ceil((stage.num_train - position) / stage.global_batch_size)
        done = (epoch + 1 - stage.first_epoch) * stage.steps_per_epoch - remaining
        return done % max(1, round(self.epochs * stage.steps_per_epoch)) == 0


def parse_interval(flag: str, text: str, steps_per_epoch: int, instead: str) -> Interval | None:
    """Parse `500`, `1ep` or `0.25ep`; None for 0."""
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
    if not math.isfinite(value * steps_per_epoch):
        raise SettingError(
            f"{flag} {text} was set", "so many steps cannot be counted", "set a smaller number of epochs"
        )
    return Interval(max(1, round(value * steps_per_epoch)), value) if is_epochs else Interval(int(value))


WARM_UP_STEPS = 5  # after the first step, which allocates memory and tunes kernels
_MOST_STEPS = 1000  # a step is thousands of events, which are held in memory
_FORMS = "set START:STOP (10:20 records the steps 10 to 19), a number of steps (10), or nvtx"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileSpec:
    """The value of `--profile`."""

    first: int | None = None  # step, counted from 1; None: the first after a warm-up
    num_steps: int = 0
    nvtx: bool = False  # only ranges for Nsight

    def window(self, start: int) -> range:
        """The steps to record in a run that starts or resumes with this step."""
        first = start + 1 + WARM_UP_STEPS if self.first is None else self.first
        return range(first, first + self.num_steps)


def parse_profile(text: str) -> ProfileSpec:
    """Parse the value of `--profile`."""
    if text == "nvtx":
        return ProfileSpec(nvtx=True)
    found = re.fullmatch(r"(?:(\d{1,15}):)?(\d{1,15})", text, re.ASCII)
    if found is None:
        raise _refusal(text, "that names no steps", _FORMS)
    first, last = found.groups()
    if first is None:
        spec = ProfileSpec(num_steps=int(last))
    else:
        if int(first) < 1:
            raise _refusal(text, "steps are counted from 1", f"set --profile 1:{max(2, int(last))}")
        spec = ProfileSpec(first=int(first), num_steps=max(0, int(last) - int(first)))
    if not spec.num_steps:
        raise _refusal(text, "no step would be recorded", _FORMS)
    if spec.num_steps > _MOST_STEPS:
        why = f"that is {spec.num_steps} steps and at most {_MOST_STEPS} can be held in memory"
        raise _refusal(text, why, "set fewer, such as 10")
    return spec


def check_profile(text: str, num_steps: int) -> ProfileSpec:
    """Parse the value of `--profile` for a run of so many steps, and refuse steps after its end."""
    spec = parse_profile(text)
    if not spec.nvtx and spec.window(1).start > num_steps:
        first = spec.window(1).start
        why = f"it begins with step {first}" + f", after a warm-up of {WARM_UP_STEPS}" * (spec.first is None)
        why += f", and the run has {pluralize(num_steps, 'step')}"
        raise _refusal(text, why, f"set --profile 1:{num_steps + 1} or earlier steps, or train longer")
    return spec


def _refusal(text: str, why: str, instead: str) -> SettingError:
    return SettingError(f"--profile {text} was set", why, instead)
