"""The loss of every global batch, read off the device without waiting for it, and judged by its `Trend`.

On a GPU a step's loss is copied to the host in the background and read a fixed number of steps later, so that every
worker reads that of the same step; the sum over workers travels with the vote that a step casts anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from stormo.distributed.world import World
from stormo.training.divergence import Diverged, Trend

# Enough that the host never waits for a device that still has work; the host need not be further ahead.
_LAG_STEPS = {"cuda": 4, "cpu": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A step that was done."""

    epoch: int
    step: int
    position: int  # where its batch begins in the epoch
    learning_rate: float
    num_samples: int = 1


class LossWatch:
    """Sees the loss of every step, a few steps late, and says when the run is lost; never where `is_on` is False."""

    def __init__(
        self, world: World, trend: Trend, *, is_on: bool, batch_size: int, patience: int, vote_lag: int = 0
    ) -> None:
        self._world = world
        self._trend = trend
        self._is_on = is_on
        self._batch_size = batch_size
        self._patience = patience
        self.wait_steps = patience  # of a checkpoint that is due, for a calm loss; the loop knows its epochs
        self._lag = _LAG_STEPS[world.device.type]
        self._part: Tensor | None = None  # of the step under way: this worker's part of the global mean
        self._pending: deque[tuple[Moment, int]] = deque()  # and the slot of its loss
        self._vote_lag = vote_lag
        self._casts: deque[bool] = deque()  # whether a loss was cast with each vote that is not read yet
        self._num_noted = 0
        on_gpu = world.device.type == "cuda"
        # One that was cast is kept until its sum is read, as `settle` may come before.
        self._slots = torch.zeros(self._lag + vote_lag, dtype=torch.float64, pin_memory=on_gpu)
        self._copied = [torch.cuda.Event() for _ in self._slots] if on_gpu else []
        self._untold_loss, self._untold_samples = 0.0, 0  # of the steps since `tell` was called, summed over samples
        self.owes_checkpoint = False  # one was due while the loss was not calm

    @property
    def is_calm(self) -> bool:
        """Whether a checkpoint of now would be a good one, as far as is known."""
        return not self._is_on or self._trend.is_calm(self.wait_steps)

    def add(self, part: Tensor) -> None:
        """Take a pass's part of the step's loss."""
        self._part = part if self._part is None else self._part + part

    def note(self, moment: Moment, mean_of: Callable[[Tensor, int], Tensor] | None = None) -> None:
        """The step of the parts so far is done: `mean_of` makes a part of its mean loss of their sum and samples."""
        assert self._part is not None
        if mean_of is not None:
            self._part = mean_of(self._part, moment.num_samples)
        slot = self._num_noted % len(self._slots)
        self._slots[slot].copy_(self._part, non_blocking=True)
        if self._copied:
            self._copied[slot].record()
        self._pending.append((moment, slot))
        self._num_noted += 1
        self._part = None

    def share(self) -> float:
        """This worker's part of the oldest loss not told yet, once that is due: to be cast with the vote."""
        num_cast = sum(self._casts)
        self._casts.append(len(self._pending) - num_cast == self._lag)
        return self._read(self._pending[num_cast][1]) if self._casts[-1] else 0.0

    def hear(self, total: float) -> Diverged | None:
        """Judge the sum of what all workers have cast, with the vote that is read now."""
        if len(self._casts) <= self._vote_lag or not self._casts.popleft():
            return None
        return self._judge(self._pending.popleft()[0], total)

    def settle(self, weights: Iterable[Tensor]) -> Diverged | None:
        """Wait for all losses up to now and judge them and this worker's weights. All workers call it."""
        self._casts.clear()  # their votes are not read any more
        if not self._pending:
            return None
        parts = [self._read(slot) for _, slot in self._pending]
        losses = self._world.sum(torch.tensor(parts, dtype=torch.float64)).tolist()
        moments = [moment for moment, _ in self._pending]
        self._pending.clear()
        for moment, loss in zip(moments, losses, strict=True):
            if diverged := self._judge(moment, loss):
                return diverged
        if not self._is_on:
            return None
        # A loss can be finite and its gradient not: the weights are broken then before any loss tells.
        finite = [weight.isfinite().all() for weight in weights]
        is_broken = torch.tensor([float(bool(finite) and not bool(torch.stack(finite).all()))])
        return self.verdict("weights", moments[-1], losses[-1]) if self._world.max(is_broken).item() else None

    def verdict(self, kind: str, moment: Moment, loss: float) -> Diverged:
        """A divergence at this step."""
        return Diverged(
            kind=kind,
            epoch=moment.epoch,
            step=moment.step,
            onset_step=moment.step + 1 - self._trend.num_leading(kind, self.wait_steps),
            position=moment.position,
            loss=loss,
            first_loss=self._trend.first[0] if self._trend.first else None,
            best_loss=self._trend.best_loss,
            learning_rate=moment.learning_rate,
        )

    @property
    def has_news(self) -> bool:
        """Whether there is a loss to tell."""
        return self._untold_samples > 0

    def tell(self) -> float:
        """The mean loss of the steps that all workers have told of since the last call, over their samples."""
        loss = self._untold_loss / self._untold_samples
        self._untold_loss, self._untold_samples = 0.0, 0
        return loss

    def _judge(self, moment: Moment, loss: float) -> Diverged | None:
        self._untold_loss += loss * moment.num_samples
        self._untold_samples += moment.num_samples
        if not self._is_on:
            return None
        kind = self._trend.see(loss, batch_size=self._batch_size, patience=self._patience)
        return self.verdict(kind, moment, loss) if kind else None

    def _read(self, slot: int) -> float:
        if self._copied:
            self._copied[slot].synchronize()
        return float(self._slots[slot])
