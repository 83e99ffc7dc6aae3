"""A task for stormo: predict a number from others. Train it with `stormo train`, see its options with `--help`.

It runs as it is. Put your own model and data in; nothing here needs to know of devices, workers or processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import stormo
import torch
from stormo.config import option
from stormo.data import TensorData
from torch import Tensor, nn
from torch.nn.functional import mse_loss

NUM_INPUTS = 4


class Regression(stormo.Task):
    """A made-up curve with noise on it."""

    name = "regression"
    defaults: ClassVar = {"optimizer": "adamw", "base_lr": 0.01, "epochs": 5, "warmup_epochs": 1}  # flags win over them

    @dataclass(frozen=True, kw_only=True)
    class Options:
        """Each field is a flag, `--task.width 128`: an int, float, str, bool or Literal with a default."""

        width: int = option(64, "hidden units")
        noise: float = option(0.1, "standard deviation of the noise on the targets")

    def model(self) -> nn.Module:
        """Any nn.Module with fresh weights; all workers build the same one."""
        width = self.options.width
        return nn.Sequential(
            nn.Linear(NUM_INPUTS, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)
        )

    def train_data(self) -> TensorData:
        """Tensors whose rows are the samples, or any torch Dataset; no sampler, no DataLoader."""
        return _made_up(4000, self.options.noise, seed=0)

    def validation_data(self) -> TensorData:
        """Samples that are never trained on; each counts once, however many workers there are."""
        return _made_up(1000, self.options.noise, seed=1)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The mean over the batch, which is on the device already."""
        inputs, targets = batch
        # Both [n, 1]: a model's [n, 1] against targets [n] would be spread to [n, n] without an error.
        return mse_loss(model(inputs), targets)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Sums over the batch by name; their share of all samples is shown. The epoch of least `loss` is kept."""
        inputs, targets = batch
        errors = model(inputs) - targets
        return {"loss": errors.square().sum(), "mean_absolute_error": errors.abs().sum()}


def _made_up(num_samples: int, noise: float, seed: int) -> TensorData:
    random = torch.Generator().manual_seed(seed)
    inputs = torch.rand(num_samples, NUM_INPUTS, generator=random) * 2 - 1
    targets = torch.sin(3 * inputs[:, :1]) + inputs[:, 1:2] * inputs[:, 2:3]
    return TensorData(inputs, targets + noise * torch.randn(num_samples, 1, generator=random))
