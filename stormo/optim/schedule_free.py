"""Schedule-free AdamW (Defazio et al., arXiv 2405.15682) by its authors' package: its counters and its two weights.

The model is trained at the weights y; their average x is validated and saved. A group's key `train_mode` says which of
them the parameters are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from stormo.errors import MissingPackageError

_COUNTERS = ("k", "weight_sum", "lr_max")  # of a group: steps, the sum of their weights, the highest learning rate


@functools.cache
def schedule_free_adamw() -> type[Any]:
    """The class, which may step shards."""
    try:
        from schedulefree import AdamWScheduleFree
    except ImportError as error:
        needed_for = "--optimizer schedule-free-adamw"
        raise MissingPackageError("schedulefree", needed_for, "schedule-free") from error
    return type("AdamWScheduleFree", (AdamWScheduleFree,), {"elementwise": True})


def is_schedule_free(optimizer: Optimizer) -> bool:
    """Whether it is one of the package's, also a task's own."""
    return "train_mode" in optimizer.param_groups[0]


def begin_training(optimizer: Any) -> None:
    """Let its parameters be the weights that are trained, not their averages."""
    optimizer.train()


@contextmanager
def averaged(optimizer: Any) -> Iterator[None]:
    """Inside it the parameters are the averages. Each change rounds them."""
    optimizer.eval()
    try:
        yield
    finally:
        begin_training(optimizer)


def counters(optimizer: Optimizer) -> list[dict[str, float]]:
    """What a checkpoint needs of each group."""
    return [{name: group[name] for name in _COUNTERS if name in group} for group in optimizer.param_groups]


def resume(optimizer: Any, groups: Sequence[Mapping[str, float]]) -> None:
    """Train on from averages and state that were saved with these counters."""
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({**saved, "train_mode": False})
    begin_training(optimizer)
