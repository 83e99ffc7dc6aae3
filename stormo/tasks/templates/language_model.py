"""A task for stormo: predict the next byte of a text. Train it with `stormo train`, see its options with `--help`.

It runs as it is. Put your own model and text in; nothing here needs to know of devices, workers or processes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

import stormo
import torch
from stormo.config import option
from stormo.data import TensorData
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

WINDOW = 64  # bytes that a sample predicts
WORDS = ("the sea", "a storm", "the old pilot", "a gull", "follows", "watches", "meets", "leaves", "slowly", "at dawn")


class Model(nn.Module):
    """Reads bytes [n, length], gives scores for the byte after each [n, length, 256]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.scores = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        """Scores of the next byte at every place."""
        states, _ = self.memory(self.embedding(text))
        return self.scores(states)  # type: ignore[no-any-return]


class LanguageModel(stormo.Task):
    """Made-up sentences, byte by byte."""

    name = "my-language-model"
    defaults: ClassVar = {"optimizer": "adamw", "base_lr": 0.01, "epochs": 4, "warmup_epochs": 1}  # flags win over them

    @dataclass(frozen=True, kw_only=True)
    class Options:
        """Each field is a flag, `--task.width 128`: an int, float, str, bool or Literal with a default."""

        width: int = option(64, "units of the memory")

    def model(self) -> nn.Module:
        """Any nn.Module with fresh weights; all workers build the same one."""
        return Model(self.options.width)

    def train_data(self) -> TensorData:
        """Tensors whose rows are the samples, or any torch Dataset; no sampler, no DataLoader."""
        return _made_up(50_000, seed=0)

    def validation_data(self) -> TensorData:
        """Text that is never trained on; each sample counts once, however many workers there are."""
        return _made_up(10_000, seed=1)

    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        """Nats a byte, the mean over the batch, which is on the device already."""
        text = batch[0].long()
        return cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    def metrics(self, model: nn.Module, batch: tuple[Tensor]) -> dict[str, Tensor]:
        """Sums over the batch by name; their share of all samples is shown. The epoch of least `loss` is kept."""
        return {"loss": self.loss(model, batch) * len(batch[0])}


def _made_up(num_bytes: int, seed: int) -> TensorData:
    choose = random.Random(seed).choice
    text = " ".join(choose(WORDS) for _ in range(num_bytes)).encode()[:num_bytes]
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    # Each window begins with the last byte of the one before, so that every byte but the first is predicted.
    return TensorData(data.unfold(0, WINDOW + 1, WINDOW).contiguous())
