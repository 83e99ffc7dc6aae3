"""A task for the real command: batch norm and dropout in a small network that can be slowed down or made to fail.

torch is imported only inside the workers, so that a start costs as little as it can.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stormo.config import option
from stormo.config.plan import Facts
from stormo.tasks.task import Task

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stormo.data import TensorData

NUM_TRAIN, NUM_VALIDATION, NUM_FEATURES = 1001, 301, 8  # no multiple of any batch or number of workers here


@dataclass(frozen=True, kw_only=True)
class Options:
    """What goes wrong, where and when."""

    fail_rank: int = option(-1, "rank that fails")
    how: str = option("raise", "raise, or kill")
    at: int = option(20, "pass in which it fails")
    pass_s: float = option(0.0, "seconds that a training pass takes at least")
    while_there: str = option("", "file without which it does not")


class Tiny(Task):
    """Which of three classes a point belongs to, by two of its coordinates."""

    name = "tiny"
    Options = Options
    _num_passes = 0

    def facts(self) -> Facts:
        return Facts(num_train=NUM_TRAIN, num_validation=NUM_VALIDATION, train_bytes=NUM_TRAIN * (4 * NUM_FEATURES + 8))

    def model(self) -> nn.Module:
        from torch import nn

        return nn.Sequential(
            nn.Linear(NUM_FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3)
        )

    def train_data(self) -> TensorData:
        return _points(NUM_TRAIN, seed=0)

    def validation_data(self) -> TensorData:
        return _points(NUM_VALIDATION, seed=1)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        from torch.nn.functional import cross_entropy

        inputs, labels = batch
        self._num_passes += 1
        if self._num_passes == self.options.at:
            self._fail_if_asked_to()
        if not self.options.while_there or Path(self.options.while_there).exists():
            time.sleep(self.options.pass_s)
        return cross_entropy(model(inputs), labels)

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        from torch.nn.functional import cross_entropy

        inputs, labels = batch
        outputs = model(inputs)
        return {
            "loss": cross_entropy(outputs, labels, reduction="sum"),
            "accuracy": (outputs.argmax(dim=1) == labels).sum(),
        }

    def _fail_if_asked_to(self) -> None:
        import torch.distributed as dist

        if not dist.is_initialized() or dist.get_rank() != self.options.fail_rank:
            return
        if self.options.how == "raise":
            raise ValueError("boom")
        os.kill(os.getpid(), signal.SIGKILL)


def _points(num_points: int, *, seed: int) -> TensorData:
    import torch

    from stormo.data import TensorData

    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(num_points, NUM_FEATURES, generator=generator)
    return TensorData(points, (points[:, 0] > 0).long() + (points[:, 1] > 1).long())
