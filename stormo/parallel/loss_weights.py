"""The weight of a micro-batch's loss in its step.

A mean over samples is weighted by samples, which are known beforehand. A mean over other items (tokens, unmasked
pixels) is weighted by their count. The total of a step is known only after the last micro-batch of all workers, so
gradients of loss × count are summed, and the sum is divided by the total before clipping.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.parallel.pytree import tree_tensors
from stormo.tasks.returned import Count
from stormo.tasks.task import Task

REASON = "the loss is no mean over samples"
_HALVES = (torch.float16, torch.bfloat16)


class EmptyBatchGuard:
    """Keeps a micro-batch without items out of the gradients: its mean and its gradient are 0/0."""

    def __init__(self) -> None:
        self._outputs: list[Tensor] = []

    def watch(self, output: Any) -> None:
        """Keep what the model has returned until the number of items is known."""
        self._outputs += [tensor for tensor in tree_tensors(output) if tensor.requires_grad]

    def apply(self, has_items: Tensor | None) -> None:
        """Set the gradients of the outputs to 0 if there are no items; None if there certainly are some."""
        outputs, self._outputs = self._outputs, []
        if has_items is None:
            return
        for output in outputs:
            # A new tensor: a hook must not change its gradient in place.
            output.register_hook(lambda gradient: torch.where(has_items, gradient, 0.0))


class LossWeights:
    """The weights of a task's losses, and the items of the current step."""

    def __init__(self, task: Task, world: World) -> None:
        self._task = task
        self._world = world
        self.is_plain = task.loss_reduction == "mean"  # a mean over samples, as far as known
        self.has_counts: bool | None = None  # whether loss() returns counts; known after a first micro-batch
        # About the items of a step. Sums over items are divided by it at once, so that gradients are as large as those
        # of a mean, which 16-bit formats need. It is a power of two, so nothing is rounded.
        self._scale = 1.0
        self.own = torch.zeros((), dtype=torch.float64, device=world.device)  # items of this worker in the step so far
        self._total: Tensor | None = None  # items of the last step

    def begin(self) -> None:
        """Start a step."""
        if self.has_counts is not False:
            self.own.zero_()

    @contextmanager
    def guarded(self, model: nn.Module) -> Iterator[EmptyBatchGuard]:
        """Inside it, the guard sees the model's outputs."""
        guard = EmptyBatchGuard()
        if self.has_counts is False:
            yield guard
            return
        hook = model.register_forward_hook(lambda module, inputs, output: guard.watch(output))
        try:
            yield guard
        finally:
            hook.remove()

    def weigh(
        self, loss: Tensor, count: Count | None, weight: float, guard: EmptyBatchGuard
    ) -> tuple[Tensor, float | Tensor]:
        """The loss, and its factor in the sum over the micro-batches of all workers.

        Args:
            loss: as the task returned it.
            count: likewise.
            weight: this micro-batch's share of the samples of its step; 0 for padding.
            guard: of the outputs behind the loss.
        """
        self.require_alike(count is not None)
        if count is None:
            guard.apply(None)
            return loss, float(weight > 0) if self._task.loss_reduction == "sum" else weight
        is_known = weight > 0 and not isinstance(count, Tensor) and count > 0
        if not isinstance(count, Tensor):
            count = torch.full((), float(count), dtype=torch.float64, device=loss.device)
        count = count.detach().to(loss.device, torch.float64)
        if not weight:
            count = torch.zeros_like(count)
        self.own.add_(count)
        has_items = count > 0
        guard.apply(None if is_known else has_items)
        wide = torch.promote_types(loss.dtype, torch.float32)
        return torch.where(has_items, loss, 0.0), (count / self._scale).to(wide)

    def require_alike(self, has_count: bool) -> None:
        """Refuse a task that returns counts for some micro-batches only."""
        if self.has_counts is None:
            self.has_counts = has_count
            self.is_plain = self.is_plain and not has_count
        if self.has_counts != has_count:
            raise mixed(self._task)

    def agree(self, num_micro_batches: int) -> None:
        """After a first micro-batch: check that all workers count or none, and set the scale. All workers call it."""
        own = torch.tensor([float(bool(self.has_counts)), 1.0, 0.0], dtype=torch.float64)
        own[2] = self.own.cpu()
        num_counting, num_workers, items = self._world.data.sum(own.to(self._world.device)).tolist()
        if 0 < num_counting < num_workers:
            raise mixed(self._task)
        if num_counting and items > 0:
            self._scale = 2.0 ** round(math.log2(items * num_micro_batches))

    def divide(self, gradients: Iterable[Tensor], total: Tensor) -> None:
        """Divide the summed gradients by `total`, the number of all items."""
        self._total = total
        factor = torch.where(total > 0, self._scale / total, 0.0)
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for gradient in gradients:
            if gradient.layout is not torch.strided or gradient.dtype in _HALVES:
                # On a GPU a 0-dim factor takes the dtype of the gradient, and 16 bits would be too coarse.
                wide = torch.promote_types(gradient.dtype, torch.float32)
                product = gradient.to(wide) * factor.to(gradient.device, wide)
                gradient.copy_(product.to(gradient.dtype))
            else:
                by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        for (device, dtype), group in by_kind.items():
            torch._foreach_mul_(group, factor.to(device, dtype))

    def of_step(self, part: Tensor, num_samples: int) -> tuple[Tensor, Tensor, float | Tensor]:
        """This worker's parts of the last step: of the mean loss, of the loss summed over items, and of the items.

        Summed over the workers, each is that of the step.
        """
        if self.has_counts:
            assert self._total is not None
            total = self._total.to(part.device)
            whole = part.double() * self._scale
            return torch.where(total > 0, whole / total, 0.0), whole, total / self._world.size
        items = float(num_samples) if self._world.is_main else 0.0
        if self._task.loss_reduction == "sum":
            return part / num_samples, part, items
        return part, part * num_samples, items


def mixed(task: Task) -> SettingError:
    """The error for a task that returns counts for some losses only."""
    return SettingError(
        f"{type(task).__name__}.loss() returned a count with one loss and none with another",
        "losses are weighted by their counts, or all by samples",
        "return (loss, count) for every batch",
    )
