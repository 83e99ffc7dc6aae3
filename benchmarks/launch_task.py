"""The training of `launch_script` as a task, for `stormo train`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import register_optimizer_step_post_hook

import stormo
from benchmarks.launch_script import BATCH_SIZE, make_model, make_tensors, write_now
from stormo.config import option
from stormo.data import TensorData


class OneStep(stormo.Task):
    """One step of a small network on made-up data."""

    name = "one-step"
    defaults: ClassVar = {"batch_size": BATCH_SIZE}

    @dataclass(frozen=True, kw_only=True)
    class Options:
        """Where to leave the time."""

        file: str = option("", "file for the time at which the last optimizer step ended on rank 0")

    def model(self) -> nn.Module:
        """The same network, whose optimizer is watched: the steps that stormo takes back come before the true one."""
        if os.environ["RANK"] == "0":
            path = Path(self.options.file)
            self.watch = register_optimizer_step_post_hook(lambda *_: write_now(path))
        return make_model()

    def train_data(self) -> TensorData:
        """One global batch."""
        return TensorData(*make_tensors())

    def validation_data(self) -> TensorData:
        """The same samples."""
        return TensorData(*make_tensors())

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy."""
        inputs, classes = batch
        return cross_entropy(model(inputs), classes)
