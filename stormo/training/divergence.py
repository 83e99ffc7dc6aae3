"""Detects divergence from the trend of the loss.

The loss of a global batch is the same on every rank, so all ranks decide alike, at the same step. On a GPU a step's
loss is copied to the host in the background and read a fixed number of steps later. The sum over ranks travels with the
vote that every step casts.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from stormo.config.plan import Plan
from stormo.config.plan.steps import stage_of
from stormo.data.batches import tensors_in
from stormo.data.loaders import Loader
from stormo.distributed.world import World

# Enough steps that the host never waits for a device that still has work.
_LAG_STEPS = {"cuda": 4, "cpu": 1}
NUM_FIRST_STEPS = 5  # make up the level at which the loss starts
NUM_HIGH_STEPS = 20  # in a row far above the start: no ordinary spike lasts as long
_SMOOTHING_STEPS = 20
_HIGH_FACTOR = 9.0  # above the start by this many times its own size
_FIRST_FACTOR = 100.0  # of the first loss, while there are too few to know how much they change
_MIN_GAIN = 0.1  # of the starting loss; before that there is nothing to lose
_NOISE_FACTOR = 4.0  # a gain must stand out from how much the loss changes from batch to batch
_MIN_ANCHOR_SAMPLES = 8  # the first loss of a smaller batch says little of where the loss starts
_NOT_LEARNING = 0.05  # a loss that has fallen by less than this share has not fallen
_MIN_STEPS_TO_LEARN = 100
_MIN_PATIENCE_STEPS, _MAX_PATIENCE_STEPS = 100, 1000
_GRACE_EPOCHS = 2  # after warm-up, before a warning that the loss does not fall


@dataclass(frozen=True, kw_only=True, slots=True)
class Diverged:
    """Where a run has diverged, and how that shows."""

    kind: str  # loss, weights, validation, exploded or lost
    epoch: int
    step: int  # the first bad one, or the one at which it is certain
    onset_step: int  # the first step with a high loss that led to it; else `step` itself
    position: int  # of that step's batch in the epoch
    loss: float
    first_loss: float | None
    best_loss: float | None  # smoothed
    learning_rate: float
    has_bad_inputs: bool = False  # the batch itself holds values that are not finite


def patience_steps(steps_per_epoch: int) -> int:
    """How long a loss may stay near its start again: an epoch, within limits."""
    return min(max(steps_per_epoch, _MIN_PATIENCE_STEPS), _MAX_PATIENCE_STEPS)


def wait_steps(plan: Plan, epoch: int) -> int:
    """How long a checkpoint may wait for a stable loss: an epoch of the current batch size, within the patience."""
    return min(stage_of(plan.stages, epoch).steps_per_epoch, patience_steps(plan.steps_per_epoch))


def find_bad_inputs(diverged: Diverged, loader: Loader, world: World, *, is_stream: bool) -> Diverged:
    """Read the batch whose loss is not finite again, and check its inputs. All ranks call it."""
    if diverged.kind != "loss" or is_stream:  # a stream would be read from its beginning
        return diverged
    is_bad = False
    for batch in loader.epoch(diverged.epoch, diverged.position):
        is_bad = is_bad or has_bad_inputs(batch.data)
        if batch.span.is_last:
            break
    return replace(diverged, has_bad_inputs=world.any(is_bad))


def has_bad_inputs(data: Any) -> bool:
    """Whether a batch holds values that are not finite."""
    floats = [tensor for tensor in tensors_in(data) if tensor.is_floating_point()]
    return not all(bool(tensor.isfinite().all()) for tensor in floats)


@dataclass(kw_only=True)
class Trend:
    """The trend of the training loss: plain numbers, saved in every checkpoint."""

    first: list[float] = field(default_factory=list)  # losses of the first steps
    start: float = 0.0
    spread: float = 0.0  # of the first losses
    smoothed: float = 0.0
    best: float = 0.0  # lowest smoothed
    noise: float = 0.0  # smoothed distance of a loss from the smoothed one
    num_steps: int = 0
    num_zero: int = 0  # steps before the first loss that is not exactly 0
    num_high: int = 0  # steps in a row far above the start
    num_lost: int = 0  # steps in a row in which half of the gain was lost
    num_uneasy: int = 0  # steps in a row that are not stable: far above the start, or a quarter of the gain lost
    was_warned: bool = False  # that the loss does not fall

    def update(self, loss: float, *, batch_size: int, patience: int) -> str | None:
        """Add the loss of the next step; return the kind of divergence, or None."""
        self.num_steps += 1
        if not math.isfinite(loss):
            self.num_uneasy += 1
            return "loss"
        if loss == 0 and not self.first:
            self.num_zero += 1  # a margin or a mask: the loss has no scale yet
            self.num_uneasy = 0
            return None
        if len(self.first) < NUM_FIRST_STEPS:
            self.first.append(loss)
            is_high = self._has_anchor(batch_size) and loss > _FIRST_FACTOR * abs(self.first[0])
            self.num_uneasy = self.num_uneasy + 1 if is_high else 0
            if len(self.first) == NUM_FIRST_STEPS:
                self._begin(batch_size)
            return None
        if self.num_zero and self.num_steps <= self.num_zero + patience:
            # It rises from 0 to its level, which only time shows.
            self.spread = max(self.spread, abs(loss - self.start))
        scale = max(abs(self.start), self._gain, self.spread)
        if scale > 0 and loss > self.start + _HIGH_FACTOR * scale:
            # Not smoothed in: a single wild batch must not count.
            self.num_high += 1
            self.num_uneasy += 1
            return "exploded" if self.num_high >= NUM_HIGH_STEPS else None
        self.num_high = 0
        self.noise += (abs(loss - self.smoothed) - self.noise) / _SMOOTHING_STEPS
        self.smoothed += (loss - self.smoothed) / _SMOOTHING_STEPS
        self.best = min(self.best, self.smoothed)
        gain, lost = self._gain, self.smoothed - self.best
        has_gained = gain > 0 and gain >= max(_MIN_GAIN * abs(self.start), _NOISE_FACTOR * self.noise)
        self.num_lost = self.num_lost + 1 if has_gained and lost > gain / 2 else 0
        self.num_uneasy = self.num_uneasy + 1 if has_gained and lost > gain / 4 else 0
        return "lost" if self.num_lost >= patience else None

    def _begin(self, batch_size: int) -> None:
        self.start, self.spread = statistics.median(self.first), max(self.first) - min(self.first)
        if self._has_anchor(batch_size):
            # With an absurd learning rate only the first loss is still sound.
            size = abs(self.first[0])
            self.start, self.spread = min(self.start, 3 * size), min(self.spread, 10 * size)
        self.smoothed = self.best = self.start

    def _has_anchor(self, batch_size: int) -> bool:
        return batch_size >= _MIN_ANCHOR_SAMPLES and not self.num_zero

    @property
    def _gain(self) -> float:
        return max(0.0, self.start - self.best)

    def is_stable(self, wait_steps: int) -> bool:
        """Whether a checkpoint would be good now; after `wait_steps` unstable steps it counts as good."""
        return not 0 < self.num_uneasy <= wait_steps

    def num_leading(self, kind: str, wait_steps: int) -> int:
        """How many of the last steps, the newest included, led to a divergence of this kind."""
        is_usual = kind not in ("exploded", "lost") and self.num_uneasy > wait_steps
        return 1 if is_usual else self.num_uneasy

    @property
    def best_loss(self) -> float | None:
        """The lowest smoothed loss, or the lowest of the first few."""
        known = [self.best] if len(self.first) == NUM_FIRST_STEPS else []
        return min(known + self.first, default=None)

    def not_learning(self, epochs_done: int, warmup_epochs: float) -> str | None:
        """A warning, given once, that the loss has not fallen although it had the time."""
        is_early = epochs_done < warmup_epochs + _GRACE_EPOCHS or self.num_steps < _MIN_STEPS_TO_LEARN
        if self.was_warned or is_early:
            return None
        if not self.first:
            self.was_warned = True
            return (
                "the model is not learning: the loss is 0 from the first step on; look whether a mask or a margin of "
                "the task's loss() leaves out every sample"
            )
        # A loss that begins at 0 cannot fall.
        if self.num_zero or self.best < self.first[0] - _NOT_LEARNING * abs(self.first[0]):
            return None
        self.was_warned = True
        return (
            f"the model is not learning: the training loss began at {self.first[0]:.4g} and is {self.smoothed:.4g} "
            f"after {self.num_steps} steps; try another --base-lr (a tenth, or ten times as much), and look whether "
            "the inputs are scaled and belong to their labels"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInfo:
    """A finished step."""

    epoch: int
    step: int
    position: int  # where its batch begins in the epoch
    learning_rate: float
    num_samples: int = 1


class LossMonitor:
    """Reads the loss of every step, a few steps late, and says when the run diverges; never where `is_on` is False."""

    def __init__(
        self, world: World, trend: Trend, *, is_on: bool, batch_size: int, patience: int, vote_lag: int = 0
    ) -> None:
        self._world = world
        self._trend = trend
        self._is_on = is_on
        self._batch_size = batch_size
        self._patience = patience
        self.wait_steps = patience  # of a checkpoint that is due, for a stable loss; the loop sets it each epoch
        self._lag = _LAG_STEPS[world.device.type]
        self._part: Tensor | None = None  # this rank's part of the current step's mean loss
        self._pending: deque[tuple[StepInfo, int]] = deque()  # steps not checked yet, with the slot of their loss
        self._vote_lag = vote_lag
        self._posted: deque[bool] = deque()  # for each vote not read yet: whether a loss travels with it
        self._num_updates = 0
        on_gpu = world.device.type == "cuda"
        # A loss that was posted is kept until its sum is read, as `check_all` may come before.
        self._slots = torch.zeros(self._lag + vote_lag, dtype=torch.float64, pin_memory=on_gpu)
        self._copied = [torch.cuda.Event() for _ in self._slots] if on_gpu else []
        self._loss_since_log, self._samples_since_log = 0.0, 0  # summed over samples
        self.checkpoint_is_due = False  # one was due while the loss was not stable

    @property
    def is_stable(self) -> bool:
        """Whether a checkpoint would be good now, as far as is known."""
        return not self._is_on or self._trend.is_stable(self.wait_steps)

    def add(self, part: Tensor) -> None:
        """Add a micro-batch's part of the step's loss."""
        self._part = part if self._part is None else self._part + part

    def update(self, step: StepInfo, mean_of: Callable[[Tensor, int], Tensor] | None = None) -> None:
        """The step is done; `mean_of` turns the sum of its parts and its samples into this rank's part of the mean."""
        assert self._part is not None
        if mean_of is not None:
            self._part = mean_of(self._part, step.num_samples)
        slot = self._num_updates % len(self._slots)
        self._slots[slot].copy_(self._part, non_blocking=True)
        if self._copied:
            self._copied[slot].record()
        self._pending.append((step, slot))
        self._num_updates += 1
        self._part = None

    def share(self) -> float:
        """This rank's part of the oldest loss not posted yet, once that is due: it travels with the vote."""
        num_posted = sum(self._posted)
        self._posted.append(len(self._pending) - num_posted == self._lag)
        return self._read(self._pending[num_posted][1]) if self._posted[-1] else 0.0

    def check(self, total: float) -> Diverged | None:
        """Check the loss that came with the vote that is read now, summed over ranks."""
        if len(self._posted) <= self._vote_lag or not self._posted.popleft():
            return None
        return self._update_trend(self._pending.popleft()[0], total)

    def check_all(self, weights: Iterable[Tensor]) -> Diverged | None:
        """Wait for all losses so far, and check them and this rank's weights. All ranks call it."""
        self._posted.clear()  # their votes are no longer read
        if not self._pending:
            return None
        parts = [self._read(slot) for _, slot in self._pending]
        losses = self._world.sum(torch.tensor(parts, dtype=torch.float64)).tolist()
        steps = [step for step, _ in self._pending]
        self._pending.clear()
        for step, loss in zip(steps, losses, strict=True):
            if diverged := self._update_trend(step, loss):
                return diverged
        if not self._is_on:
            return None
        # A loss can be finite and its gradient not: then the weights break before any loss shows it.
        finite = [weight.isfinite().all() for weight in weights]
        is_broken = torch.tensor([float(bool(finite) and not bool(torch.stack(finite).all()))])
        return self.divergence_at("weights", steps[-1], losses[-1]) if self._world.max(is_broken).item() else None

    def divergence_at(self, kind: str, step: StepInfo, loss: float) -> Diverged:
        """A divergence at this step."""
        return Diverged(
            kind=kind,
            epoch=step.epoch,
            step=step.step,
            onset_step=step.step + 1 - self._trend.num_leading(kind, self.wait_steps),
            position=step.position,
            loss=loss,
            first_loss=self._trend.first[0] if self._trend.first else None,
            best_loss=self._trend.best_loss,
            learning_rate=step.learning_rate,
        )

    @property
    def has_loss_to_log(self) -> bool:
        """Whether there is a loss to log."""
        return self._samples_since_log > 0

    def loss_since_last_log(self) -> float:
        """The mean loss of the steps since the last call, over their samples."""
        loss = self._loss_since_log / self._samples_since_log
        self._loss_since_log, self._samples_since_log = 0.0, 0
        return loss

    def _update_trend(self, step: StepInfo, loss: float) -> Diverged | None:
        self._loss_since_log += loss * step.num_samples
        self._samples_since_log += step.num_samples
        if not self._is_on:
            return None
        kind = self._trend.update(loss, batch_size=self._batch_size, patience=self._patience)
        return self.divergence_at(kind, step, loss) if kind else None

    def _read(self, slot: int) -> float:
        if self._copied:
            self._world.wait_for_event(self._copied[slot])
        return float(self._slots[slot])
