"""A task for stormo: sort points into classes. Train it with `stormo train`, see its options with `--help`.

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
from torch.nn.functional import cross_entropy

NUM_INPUTS, NUM_CLASSES = 16, 4


class Classification(stormo.Task):
    """Made-up points around four centres."""

    name = "classification"
    defaults: ClassVar = {"optimizer": "adamw", "base_lr": 0.01, "epochs": 5, "warmup_epochs": 1}  # flags win over them

    @dataclass(frozen=True, kw_only=True)
    class Options:
        """Each field is a flag, `--task.width 128`: an int, float, str, bool or Literal with a default."""

        width: int = option(64, "hidden units")
        dropout: float = option(0.1, "share of hidden units left out in a training pass")

    def model(self) -> nn.Module:
        """Any nn.Module with fresh weights; all workers build the same one."""
        width = self.options.width
        return nn.Sequential(
            nn.Linear(NUM_INPUTS, width), nn.ReLU(), nn.Dropout(self.options.dropout), nn.Linear(width, NUM_CLASSES)
        )

    def train_data(self) -> TensorData:
        """Tensors whose rows are the samples, or any torch Dataset; no sampler, no DataLoader."""
        return _made_up(4000, seed=0)

    def validation_data(self) -> TensorData:
        """Samples that are never trained on; each counts once, however many workers there are."""
        return _made_up(1000, seed=1)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The mean over the batch, which is on the device already."""
        inputs, classes = batch
        return cross_entropy(model(inputs), classes)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Sums over the batch by name; their share of all samples is shown. `accuracy` can end a run early."""
        inputs, classes = batch
        scores = model(inputs)
        return {
            "loss": cross_entropy(scores, classes, reduction="sum"),
            "accuracy": (scores.argmax(dim=1) == classes).sum(),
        }


def _made_up(num_samples: int, seed: int) -> TensorData:
    centres = torch.randn(NUM_CLASSES, NUM_INPUTS, generator=torch.Generator().manual_seed(42))
    random = torch.Generator().manual_seed(seed)
    classes = torch.randint(NUM_CLASSES, (num_samples,), generator=random)
    return TensorData(centres[classes] + torch.randn(num_samples, NUM_INPUTS, generator=random), classes)
