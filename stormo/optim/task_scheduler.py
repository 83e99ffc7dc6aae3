"""A learning-rate scheduler of torch that a task makes: stepped by the loop, saved and resumed.

It works on a twin of the optimizer without parameters, so that its learning rates stay its own: the optimizer's are
those times the factor of the global batch and of rollbacks.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from stormo.distributed.values import decode, encode
from stormo.errors import SettingError, StormoError

_OTHERS = ("momentum", "betas")
_KEPT = ("lr", "initial_lr", "max_lr", "min_lr", *_OTHERS)  # what a scheduler sets in a parameter group


class TaskScheduler:
    """The task's scheduler, and the learning rates that it has set last."""

    def __init__(self, make: Callable[[Optimizer], Any], optimizer: Optimizer, interval: str) -> None:
        self._twin = copy.copy(optimizer)
        self._twin.param_groups = [{**g, "params": [], "lr": float(g["lr"])} for g in optimizer.param_groups]
        self._scheduler = make(self._twin)
        self._optimizer, self.interval = optimizer, interval
        said = f"scheduler() returned a {type(self._scheduler).__name__}"
        if not isinstance(self._scheduler, LRScheduler) or self._scheduler.optimizer is not self._twin:
            raise SettingError(
                said,
                "it must be one of torch.optim.lr_scheduler for the optimizer that is given",
                "make one from that optimizer",
            )
        if isinstance(self._scheduler, ReduceLROnPlateau) and interval == "step":
            raise SettingError(
                said, "it follows the validation loss, which an epoch has", 'set scheduler_interval = "epoch"'
            )
        self.state_dict()  # refuses what cannot be saved
        self._set_others()

    @property
    def rates(self) -> list[float]:
        """The learning rate of every parameter group."""
        return [float(group["lr"]) for group in self._twin.param_groups]

    @property
    def name(self) -> str:
        """Its class."""
        return type(self._scheduler).__name__

    def step(self, metrics: Mapping[str, float] | None = None) -> None:
        """After a step or an epoch, which has metrics."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the twin itself is never stepped
            if isinstance(self._scheduler, ReduceLROnPlateau):
                if metrics is None or "loss" not in metrics:
                    raise SettingError(
                        f"scheduler() returned a {self.name}",
                        "it follows the validation loss, and metrics() has none",
                        "return loss among the metrics, or another scheduler",
                    )
                self._scheduler.step(metrics["loss"])
            else:
                self._scheduler.step()
        self._set_others()

    def _set_others(self) -> None:
        """Give the optimizer what else a scheduler may set: momentum, betas."""
        for group, twin in zip(self._optimizer.param_groups, self._twin.param_groups, strict=True):
            group.update({key: twin[key] for key in _OTHERS if key in twin})

    def state_dict(self) -> dict[str, Any]:
        """Its state and that of the twin's groups, as JSON."""
        groups = [{key: group[key] for key in _KEPT if key in group} for group in self._twin.param_groups]
        tensors: dict[str, Tensor] = {}  # of NumPy's numbers
        plain = encode([self._scheduler.state_dict(), groups], tensors, "the scheduler")
        return {"plain": plain, "tensors": {name: tensor.tolist() for name, tensor in tensors.items()}}

    def load_state_dict(self, state: Any) -> None:
        """Restore what `state_dict` gave."""
        try:
            tensors = {name: torch.from_numpy(numpy.array(values)) for name, values in state["tensors"].items()}
            stored, groups = decode(state["plain"], tensors)
            self._scheduler.load_state_dict(stored)
            for group, kept in zip(self._twin.param_groups, groups, strict=True):
                group.update(kept)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise StormoError(f"The checkpoint's state of the scheduler does not fit {self.name} ({error}).") from error
        self._set_others()
