"""A task whose gradients are large beside its arithmetic: four square layers on made-up points."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stormo.data import TensorData
from stormo.tasks.task import Task


class Wide(Task):
    """Linear layers of one width."""

    name = "wide"

    def __init__(self, width: int) -> None:
        super().__init__(None)
        self._width = width

    def model(self) -> nn.Module:
        """Four layers with ReLUs between them."""
        layers = [layer for _ in range(4) for layer in (nn.Linear(self._width, self._width), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    def train_data(self) -> TensorData:
        """Random points, to be learnt by heart."""
        x = torch.randn(4096, self._width, generator=torch.Generator().manual_seed(0))
        return TensorData(x, x.roll(1, dims=1))

    def validation_data(self) -> TensorData:
        """The same."""
        return self.train_data()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean squared error."""
        x, y = batch
        return nn.functional.mse_loss(model(x), y)
