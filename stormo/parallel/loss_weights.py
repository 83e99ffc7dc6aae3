"""The weight of a micro-batch's loss in its step.

A mean over samples is weighed by samples, which are known beforehand. A mean over other items (tokens, unmasked pixels)
is weighed by their count. Its total in a step is known only after the last micro-batch of all workers, so gradients of
loss × count add up, and the sum is divided by the total before clipping.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.tasks.returned import Count
from stormo.tasks.task import Task

REASON = "the loss is no mean over samples"
_HALVES = (torch.float16, torch.bfloat16)


class Guard:
    """Keeps a micro-batch without items out of the gradients: its mean is 0/0, and so is its gradient."""

    def __init__(self) -> None:
        self._outputs: list[Tensor] = []

    def watch(self, output: Any) -> None:
        """Note what the model has returned, until the number of items is known."""
        self._outputs += [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]

    def apply(self, has_items: Tensor | None) -> None:
        """Let no gradient back into the outputs if there are no items; None where it is known that there are some."""
        outputs, self._outputs = self._outputs, []
        if has_items is None:
            return
        for output in outputs:
            # A second tensor, as a hook must not change the gradient that it is given: others may hold it.
            output.register_hook(lambda gradient: torch.where(has_items, gradient, 0.0))


class LossWeights:
    """The weights of a task's losses, and the items of the step under way."""

    def __init__(self, task: Task, world: World) -> None:
        self._task = task
        self._world = world
        self.is_plain = task.loss_reduction == "mean"  # a mean over samples, as far as is known
        self.has_counts: bool | None = None  # whether loss() gives counts, once a pass has shown it
        # About the items of a step. Sums over items are divided by it at once, so that gradients are as large as those
        # of a mean, which formats of 16 bits need; by a power of two nothing is rounded.
        self._scale = 1.0
        self._own = torch.zeros((), dtype=torch.float64, device=world.device)  # items of this worker's passes
        self._total: Tensor | None = None  # items of the step just done

    def begin(self) -> None:
        """A step begins."""
        if self.has_counts is not False:
            self._own.zero_()

    @contextmanager
    def guarded(self, model: nn.Module) -> Iterator[Guard]:
        """While it holds, the model's outputs are watched by the guard."""
        guard = Guard()
        if self.has_counts is False:
            yield guard
            return
        hook = model.register_forward_hook(lambda module, inputs, output: guard.watch(output))
        try:
            yield guard
        finally:
            hook.remove()

    def weigh(self, loss: Tensor, count: Count | None, weight: float, guard: Guard) -> tuple[Tensor, float | Tensor]:
        """The loss, and its factor in the sum over the passes of all workers.

        Args:
            loss: as the task returned it.
            count: likewise.
            weight: this pass's share of the samples of its step; 0 for a stand-in.
            guard: of the outputs that the loss was made of.
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
        self._own.add_(count)
        has_items = count > 0
        guard.apply(None if is_known else has_items)
        wide = torch.promote_types(loss.dtype, torch.float32)
        return torch.where(has_items, loss, 0.0), (count / self._scale).to(wide)

    def require_alike(self, has_count: bool) -> None:
        """Refuse a task that gives counts in some passes only."""
        if self.has_counts is None:
            self.has_counts = has_count
            self.is_plain = self.is_plain and not has_count
        if self.has_counts != has_count:
            raise mixed(self._task)

    def take(self, own: Tensor) -> None:
        """Take over the items so far, as another worker of this copy of the model has counted them."""
        self._own.copy_(own)

    @property
    def own(self) -> Tensor:
        """The items of this worker's passes in the step so far."""
        return self._own

    def agree(self, num_passes: int) -> None:
        """After a first pass: see that all workers count or none, and how many items a step has. All call it."""
        said = torch.tensor([float(bool(self.has_counts)), 1.0, 0.0], dtype=torch.float64)
        said[2] = self._own.cpu()
        counting, all_of_them, items = self._world.data.sum(said.to(self._world.device)).tolist()
        if 0 < counting < all_of_them:
            raise mixed(self._task)
        if counting and items > 0:
            self._scale = 2.0 ** round(math.log2(items * num_passes))

    def divide(self, gradients: Iterable[Tensor], total: Tensor) -> None:
        """Make gradients of a mean of what the passes have added up; `total` is the number of all items."""
        self._total = total
        factor = torch.where(total > 0, self._scale / total, 0.0)
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for gradient in gradients:
            if gradient.layout is not torch.strided or gradient.dtype in _HALVES:
                # On a GPU a factor without dimensions takes the type of the gradient, and 16 bits would be too coarse.
                wide = torch.promote_types(gradient.dtype, torch.float32)
                product = gradient.to(wide) * factor.to(gradient.device, wide)
                gradient.copy_(product.to(gradient.dtype))
            else:
                alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        for (device, dtype), group in alike.items():
            torch._foreach_mul_(group, factor.to(device, dtype))

    def of_step(self, part: Tensor, num_samples: int) -> tuple[Tensor, Tensor, float | Tensor]:
        """What the passes of a step that is done come to on this worker.

        Its part of the mean loss of the step, its part of the loss summed over items, and of the number of items. Added
        up over the workers each is that of the step.
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
    """A task that gives counts and does not."""
    return SettingError(
        f"{type(task).__name__}.loss() returned a count with one loss and none with another",
        "losses are weighed by their counts, or all by samples",
        "return (loss, count) for every batch",
    )
