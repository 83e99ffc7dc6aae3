"""Local SGD (Stich, arXiv 1805.09767): workers step independently and average their weights every few steps.

An outer optimizer may use their mean change as a gradient, with Nesterov momentum (DiLoCo: Douillard et al., arXiv
2311.08105). Each worker keeps its own optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from stormo.config import schema
from stormo.config.plan import Plan
from stormo.distributed.world import World
from stormo.parallel.base import Strategy
from stormo.parallel.coalesced import copy, means
from stormo.profiling.ranges import range_of
from stormo.tasks.task import Task

_MOST_AHEAD = 4  # steps: hides a slow round trip, and leaves time to save after a stop signal


class Local(Strategy):
    """A worker with local updates."""

    def __init__(self, world: World, plan: Plan, task: Task, settings: schema.TrainConfig) -> None:
        super().__init__(world, plan, task, settings)
        rate, momentum = settings.optimizer.outer_lr, settings.optimizer.outer_momentum
        assert plan.averaging is not None
        # An averaging waits for all workers anyway.
        self.staleness = min(plan.averaging.steps, _MOST_AHEAD) if world.size > 1 else 0
        # Without these two, the mean itself is used, to the last bit.
        self.outer = OuterOptimizer(self.weights(), rate, momentum) if (rate, momentum) != (1, 0) else None

    def _total_items(self) -> Tensor:
        """As if all had as many items as this worker: each steps with the mean over its own items."""
        return self.loss_weights.own * self.world.data.size

    def exchange_weights(self) -> None:
        """Average the weights, if that is due."""
        clock = self.clock
        self.replicas_differ = not self._plan.is_averaging_due(clock.epoch, clock.step, clock.position)
        if self.replicas_differ:
            return
        weights = self.weights()
        with range_of("averaging"):
            if self.world.size > 1:
                with self.exposed.waiting():
                    copy(weights, means(self.world, weights))
            if self.outer is not None:
                self.outer.step(weights)

    def mean_weights(self) -> Iterator[Tensor]:
        """The mean of each, if they differ."""
        weights = self.weights()
        return means(self.world, weights) if self.replicas_differ else iter(weights)

    def outer_state(self) -> dict[str, Tensor]:
        """Anchors and velocities of the outer optimizer."""
        if self.outer is None:
            return {}
        names = [shard.name for shard in self.shards() if shard.local.requires_grad]
        kept = {"anchor": self.outer.anchors, "velocity": self.outer.velocities}
        return {f"{key}/{name}": t for key, each in kept.items() for name, t in zip(names, each, strict=bool(each))}

    @contextmanager
    def swap_in_mean_weights(self) -> Iterator[None]:
        """Replace this worker's weights by the mean."""
        if not self.replicas_differ or self.world.size == 1:
            yield
            return
        weights = self.weights()
        own = [weight.detach().clone() for weight in weights]
        copy(weights, means(self.world, weights))
        try:
            yield
        finally:
            copy(weights, own)

    def shards_changed(self) -> None:
        """All workers have the same weights now."""
        self.replicas_differ = False
        if self.outer is not None:
            self.outer.reset(self.weights())


class OuterOptimizer:
    """Steps from the last averaged weights along the mean change of the workers since then."""

    def __init__(self, weights: Sequence[Tensor], rate: float, momentum: float) -> None:
        self._rate = rate
        self._momentum = momentum
        self.anchors = [weight.detach().clone() for weight in weights]  # the weights when they were equal last
        self.velocities = [torch.zeros_like(anchor) for anchor in self.anchors] if momentum else []

    @torch.no_grad()
    def reset(self, weights: Sequence[Tensor]) -> None:
        """Start from these weights, without momentum."""
        torch._foreach_copy_(self.anchors, list(weights))
        for velocity in self.velocities:
            velocity.zero_()

    @torch.no_grad()
    def step(self, weights: Sequence[Tensor]) -> None:
        """Step, given the mean weights of all workers, which are replaced."""
        if not self.anchors:
            return
        changes = torch._foreach_sub(self.anchors, list(weights))
        if self.velocities:
            torch._foreach_mul_(self.velocities, self._momentum)
            torch._foreach_add_(self.velocities, changes)
            torch._foreach_add_(changes, self.velocities, alpha=self._momentum)
        torch._foreach_sub_(self.anchors, changes, alpha=self._rate)
        torch._foreach_copy_(list(weights), self.anchors)
