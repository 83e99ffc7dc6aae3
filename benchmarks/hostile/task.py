"""What is trained while attackers do what they can: a small model, slowly, that notes every step in a file."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stormo.config import option
from stormo.data import TensorData
from stormo.tasks.task import Task

PROGRESS = "HOSTILE_PROGRESS"  # the file that grows with every step


@dataclass(frozen=True, kw_only=True)
class PatientOptions:
    """Options of the task."""

    data_folder: str | None = option(None, "a folder that is there to be staged")


class Patient(Task):
    """One layer on random points."""

    name = "patient"
    Options = PatientOptions

    def model(self) -> nn.Module:
        """One layer."""
        return nn.Linear(4, 2)

    def train_data(self) -> TensorData:
        """Random points and classes."""
        points = torch.randn(4096, 4, generator=torch.Generator().manual_seed(0))
        return TensorData(points, (points[:, 0] > 0).long())

    def validation_data(self) -> TensorData:
        """The same."""
        return self.train_data()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross entropy, after a nap."""
        points, classes = batch
        if model.training:
            time.sleep(0.02)
            if os.environ.get("RANK", "0") == "0":
                with Path(os.environ[PROGRESS]).open("a") as file:
                    file.write(".")
        return nn.functional.cross_entropy(model(points), classes)
