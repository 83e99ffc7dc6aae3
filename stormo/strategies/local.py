"""Workers that step by themselves and average their weights now and then (local SGD: Stich, arXiv 1805.09767).

Their mean change since the last averaging may be taken as a gradient for a step of its own, with Nesterov's momentum
(DiLoCo: Douillard et al., arXiv 2311.08105). The state of a worker's optimizer stays its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import torch
from torch import Tensor, nn

from stormo import config
from stormo.plan import Plan
from stormo.profiling.ranges import range_of
from stormo.strategies.strategy import Strategy
from stormo.tasks.task import Task
from stormo.world.world import World

_BUCKET_BYTES = 25 * 2**20  # that travel together
_MOST_AHEAD = 16  # steps: enough for a slow link's round trip, and a stop signal is heard within as many


class Local(Strategy):
    """One worker of several that step by themselves."""

    name = "local"
    saves_apart = True
    exposed_reason = "workers that step by themselves exchange no gradients"

    def __init__(self, world: World, plan: Plan, task: Task, settings: config.TrainConfig) -> None:
        super().__init__(world, plan, task, settings)
        rate, momentum = settings.optimizer.outer_lr, settings.optimizer.outer_momentum
        assert plan.averaging is not None
        self.staleness = min(plan.averaging.steps, _MOST_AHEAD)  # an averaging waits for all anyway
        self.is_apart = False  # whether steps were done since the weights of all workers were the same
        # Without these two the mean itself is taken, to the last bit.
        self.outer = OuterStep(self.weights(), rate, momentum) if (rate, momentum) != (1, 0) else None

    def _wrap(self, model: nn.Module) -> nn.Module:
        _share(self.world, [*model.parameters(), *model.buffers()])
        return model

    def exchange_weights(self) -> None:
        """Average the weights, where that is due."""
        clock = self.clock
        self.is_apart = not self._plan.is_averaging_due(clock.epoch, clock.step, clock.position)
        if self.is_apart:
            return
        weights = self.weights()
        with range_of("averaging"):
            if self.world.size > 1:
                _copy(weights, means(self.world, weights))
            if self.outer is not None:
                self.outer.step(weights)

    def mean_weights(self) -> Iterator[Tensor]:
        """The mean of each of `weights` over all workers, in turn, which leaves theirs alone. All workers take all."""
        weights = self.weights()
        return means(self.world, weights) if self.is_apart else iter(weights)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the mean weights in the place of this worker's own."""
        if not self.is_apart or self.world.size == 1:
            yield
            return
        weights = self.weights()
        own = [weight.detach().clone() for weight in weights]
        _copy(weights, means(self.world, weights))
        try:
            yield
        finally:
            _copy(weights, own)

    def parts_changed(self) -> None:
        """All workers have been given the same weights."""
        self.is_apart = False
        if self.outer is not None:
            self.outer.begin(self.weights())


class OuterStep:
    """Steps from where the workers were equal last, by their mean change since then."""

    def __init__(self, weights: Sequence[Tensor], rate: float, momentum: float) -> None:
        self._rate = rate
        self._momentum = momentum
        self.anchors = [weight.detach().clone() for weight in weights]  # the weights when they were equal last
        self.velocities = [torch.zeros_like(anchor) for anchor in self.anchors] if momentum else []

    @torch.no_grad()
    def begin(self, weights: Sequence[Tensor]) -> None:
        """Take these weights for equal, without any momentum."""
        torch._foreach_copy_(self.anchors, list(weights))
        for velocity in self.velocities:
            velocity.zero_()

    @torch.no_grad()
    def step(self, weights: Sequence[Tensor]) -> None:
        """Take one, from weights that are the mean of all workers to those that all of them go on with."""
        if not self.anchors:
            return
        changes = torch._foreach_sub(self.anchors, list(weights))
        if self.velocities:
            torch._foreach_mul_(self.velocities, self._momentum)
            torch._foreach_add_(self.velocities, changes)
            torch._foreach_add_(changes, self.velocities, alpha=self._momentum)
        torch._foreach_sub_(self.anchors, changes, alpha=self._rate)
        torch._foreach_copy_(list(weights), self.anchors)


@torch.no_grad()
def means(world: World, tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Iterator[Tensor]:
    """The mean of each tensor over all workers, in turn; all of them take all.

    Args:
        world: of the workers.
        tensors: of the same shapes on all of them.
        dtype: in which they are summed and given, if not their own.
    """
    for bucket in _buckets(tensors, dtype):
        flat = torch.cat([_flat(tensor).to(world.device, dtype or tensor.dtype) for tensor in bucket])
        world.sum(torch.view_as_real(flat) if flat.is_complex() else flat)
        flat.div_(world.size)
        for tensor, mean in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            yield mean.view(tensor.shape)


@torch.no_grad()
def _share(world: World, tensors: Sequence[Tensor]) -> None:
    """Give all workers the main one's values: what a task's model() draws may differ."""
    for bucket in _buckets(tensors) if world.size > 1 else ():
        flat = torch.cat([_flat(tensor) for tensor in bucket])
        world.broadcast(flat.view(torch.uint8))  # whatever the type
        for tensor, values in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(values.view(tensor.shape))


@torch.no_grad()
def _copy(tensors: Sequence[Tensor], values: Iterable[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)


def _buckets(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Iterator[list[Tensor]]:
    """Neighbours of one type that travel together."""
    for common, group in groupby(tensors, lambda tensor: dtype or tensor.dtype):
        bucket, num_bytes = list[Tensor](), 0
        for tensor in group:
            size_bytes = tensor.numel() * common.itemsize
            if bucket and num_bytes + size_bytes > _BUCKET_BYTES:
                yield bucket
                bucket, num_bytes = [], 0
            bucket.append(tensor)
            num_bytes += size_bytes
        yield bucket
