"""What every strategy does: forward and backward of one pass, the optimizer step, state given and taken.

The base class is the whole of it on one device: what `holder` holds goes through `passes` and is stepped here. A
strategy for several changes only how the model is wrapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from stormo.layers.sync_batch_norm import local_statistics
from stormo.optim.table import start_momentum
from stormo.parallel.low_rank import LowRank
from stormo.parallel.noise_scale import total_norm
from stormo.parallel.passes import PassRunner
from stormo.parallel.sparse import check_sparse, has_sparse


class Strategy(PassRunner):
    """One device. Subclasses spread the same work over several."""

    name = "single"
    steps_alone = False  # whether every worker has weights of its own, which are averaged now and then
    is_apart = False  # whether steps were done since the weights of all workers were the same
    staleness = 0  # steps that a worker may be ahead of the slowest
    _is_trying = False  # whether the step under way is one of `try_step`
    low_rank: LowRank | None = None  # what is kept back of gradients that travel as thin matrices

    def step(self, learning_rate: float) -> None:
        """Clip and apply the gradients at this rate of the first parameter group, then clear them."""
        self._set_rate(learning_rate)
        self._collect_gradients()
        self._divide_by_items(self._gradients())
        self._finish_gradients()
        start_momentum(self.optimizer, may_skip=self.scaler.is_enabled())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._spread_weights()
        self.clear_gradients()

    def _collect_gradients(self) -> None:
        """Hand the gradients of the passes to what the optimizer steps."""

    def _divide_by_items(self, gradients: Iterable[Tensor]) -> None:
        """Where losses have counts: make gradients of their mean."""
        if self.weighing.has_counts:
            self.weighing.divide(gradients, self._total_items())

    def _total_items(self) -> Tensor:
        """The items of all workers in this step."""
        own = self.weighing.own.clone()
        return own if self._is_trying else self.world.data.sum(own)

    def _finish_gradients(self) -> None:
        """Measure and clip the gradient of the whole batch, then add noise to it."""
        # Not noise before clipping: over d elements it is as long as its spread times the root of d, so that clipping
        # both would leave next to nothing of the gradient. Clipped first, each keeps the size that was asked for.
        clip_norm, adds_noise = self._settings.optimizer.clip_norm, self._settings.optimizer.gradient_noise is not None
        meter = self.noise_scale if self.noise_scale is not None and self.noise_scale.is_due else None
        is_unscaled, scale = clip_norm is not None or adds_noise, None
        if meter is not None and self.scaler.is_enabled():
            scale = self.scaler.scale(torch.ones((), device=self.world.device))  # without waiting for the device
        if is_unscaled:
            self.scaler.unscale_(self.optimizer)
        if meter is not None or clip_norm is not None:
            norm = self._gradient_norm()
            if clip_norm is not None:
                nn.utils.clip_grads_with_norm_(self.stepped(), clip_norm, norm, foreach=True)
            if meter is not None:
                meter.end(norm if is_unscaled or scale is None else norm / scale, scale)
        if adds_noise:
            self._add_noise()

    def _gradient_norm(self) -> Tensor:
        """The norm of the whole gradient."""
        return total_norm(self._gradients())

    def _add_noise(self) -> None:
        self._noise.add([parameter.grad for parameter in self.stepped()], self.clock.step)

    def _spread_weights(self) -> None:
        """Tell other workers what the optimizer has made of this one's weights."""

    def try_step(self, data: Any) -> None:
        """Take up the memory of a step and of two passes that add up after it; no collective, not compiled.

        Every trace of it is the caller's to undo, except of the loss scale.
        """
        scaler, self.scaler = self.scaler, torch.amp.GradScaler(self.world.device.type, enabled=False)
        self.module.train()
        self._is_trying = True
        try:
            with local_statistics(self.module):
                self._pass(self._alone(), data, 1.0)
                if has_sparse(self.module):
                    check_sparse(self._settings, has_own_optimizer=self.has_own_optimizer)
                self.step(0.0)  # the optimizer's state exists from here on
                for _ in range(2):
                    self._pass(self._alone(), data, 1.0)
        finally:
            self.scaler, self._is_trying = scaler, False

    def exchange_weights(self) -> None:
        """After a step: bring the weights of all workers together, where they step by themselves and it is time."""

    def mean_weights(self) -> Iterator[Tensor]:
        """The mean of each of `weights` over all workers, in turn, which leaves theirs alone. All workers take all."""
        return iter(self.weights())

    def outer_state(self) -> dict[str, Tensor]:
        """What a step with the mean of all workers keeps, by name; the same on all of them."""
        return {}

    def averaged(self) -> AbstractContextManager[Any]:
        """While it lasts, the weights are those of the run as a whole. All workers enter it."""
        return nullcontext()

    def running(self) -> AbstractContextManager[Any]:
        """While it lasts, steps are taken. All workers enter it, and leave it together unless something fails."""
        return nullcontext()

    def settle(self) -> None:
        """Come to the same weights on all workers, where they may be some steps apart. All workers call it."""

    @property
    def stale_gradients(self) -> dict[int, int] | None:
        """How many gradients were applied at which age, in updates; None where none can be old."""
        return None

    def take_stale_gradients(self, seen: Mapping[Any, int]) -> None:
        """Go on counting from what was seen before."""
