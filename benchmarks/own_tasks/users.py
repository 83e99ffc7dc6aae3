"""Tasks as users write them: each trains in a second, and most have a trap that only several workers step into."""

# ruff: noqa: D102

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.data import IterableDataset, TensorDataset

import stormo

WORDS, LENGTH, SAMPLES = 11, 7, 41  # two batches of 20 and one of a single sample


def _drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class _Sentences(stormo.Task):
    """Sentences of different lengths, padded with 0."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(WORDS, 12), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, WORDS))

    def train_data(self) -> TensorDataset:
        return _sentences(SAMPLES, 0)

    def validation_data(self) -> TensorDataset:
        return _sentences(13, 1)

    def words(self, model: nn.Module, batch: Any, reduction: str = "mean") -> Tensor:
        (words,) = batch
        logits, targets = model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()
        return cross_entropy(logits, targets, ignore_index=0, reduction=reduction)


def _sentences(num_samples: int, seed: int) -> TensorDataset:
    generator = _drawn(seed)
    words = torch.randint(1, WORDS, (num_samples, LENGTH + 1), generator=generator)
    lengths = torch.randint(2, LENGTH + 2, (num_samples, 1), generator=generator)
    return TensorDataset(torch.where(torch.arange(LENGTH + 1) < lengths, words, 0))


class TokenMean(_Sentences):
    """The mean over the words of a batch, as users usually write it."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.words(model, batch)


class TokenCount(_Sentences):
    """The same with the number of words."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return self.words(model, batch), (batch[0][:, 1:] != 0).sum()


class TiedWeights(TokenCount):
    """The embedding is the output layer too."""

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Embedding(WORDS, 12), nn.Tanh(), nn.Linear(12, WORDS, bias=False))
        model[2].weight = model[0].weight
        return model


class _Pictures(stormo.Task):
    """Small pictures with a mask of the pixels that are known; of some pictures none is."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1))

    def train_data(self) -> TensorDataset:
        return _pictures(SAMPLES, 0)

    def validation_data(self) -> TensorDataset:
        return _pictures(13, 1)


def _pictures(num_samples: int, seed: int) -> TensorDataset:
    generator = _drawn(seed)
    pictures = torch.randn(num_samples, 1, 6, 6, generator=generator, dtype=torch.float64)
    known = torch.rand(num_samples, 1, 1, 1, generator=generator) - 0.2
    mask = (torch.rand(pictures.shape, generator=generator) < known).double()
    return TensorDataset(pictures, (pictures > 0.3).double(), mask)


class MaskedMean(_Pictures):
    """The mean over the known pixels of a batch."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y, mask = batch
        each = binary_cross_entropy_with_logits(model(x), y, reduction="none") * mask
        mean: Tensor = each.sum() / mask.sum().clamp(min=1)
        return mean


class MaskedCount(_Pictures):
    """The same with the number of pixels, and no care for a batch without any."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y, mask = batch
        each = binary_cross_entropy_with_logits(model(x), y, reduction="none")
        return (each * mask).sum() / mask.sum(), mask.sum()


class BatchDice(_Pictures):
    """One overlap of all pictures of a batch."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y, _ = batch
        found: Tensor = model(x).sigmoid()
        loss: Tensor = 1 - 2 * (found * y).sum() / (found + y).sum()
        return loss


class LocalDice(BatchDice):
    """The same, and the user knows."""

    loss_reduction = "local"


class BatchNorm(_Pictures):
    """Batch norm; the last batch has one sample."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y, _ = batch
        return binary_cross_entropy_with_logits(model(x), y)


class _Points(stormo.Task):
    """Points of three classes."""

    def model(self) -> Any:
        return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))

    def train_data(self) -> Any:
        return _points(SAMPLES, 0)

    def validation_data(self) -> Any:
        return _points(13, 1)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return cross_entropy(model(x), y)


def _points(num_samples: int, seed: int) -> TensorDataset:
    x = torch.randn(num_samples, 5, generator=_drawn(seed), dtype=torch.float64)
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long())


class SumLoss(_Points):
    """The sum over a batch."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return cross_entropy(model(x), y, reduction="sum")


class SaidSum(SumLoss):
    """The same, said."""

    loss_reduction = "sum"
    defaults = {"base_lr": 0.0005}  # noqa: RUF012


class _Expert(nn.Module):
    """A layer that only points of the third class go through."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 16)
        self.head = nn.Linear(16, 3)
        self.expert = nn.Linear(16, 3)

    def forward(self, x: Tensor, is_third: Tensor) -> Tensor:
        inner = self.body(x).tanh()
        found: Tensor = self.head(inner)
        if is_third.any():
            found = found + torch.where(is_third[:, None], self.expert(inner), 0.0)
        return found


class Unused(_Points):
    """Some batches leave a layer out."""

    find_unused = True

    def model(self) -> nn.Module:
        return _Expert()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return cross_entropy(model(x, y == 2), y)


class Frozen(_Points):
    """The first layer is not trained."""

    def model(self) -> Any:
        model = super().model()
        model[0].requires_grad_(False)
        return model


class OwnOptimizer(_Points):
    """Two groups with different learning rates."""

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        groups = [{"params": model[0].parameters(), "lr": 0.002}, {"params": model[2:].parameters(), "lr": 0.01}]
        return torch.optim.AdamW(groups)


class OwnScheduler(_Points):
    """A schedule attached to the optimizer, which nobody would step."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        self.decay = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
        return optimizer


class _Stream(IterableDataset[Any]):
    def __init__(self, data: TensorDataset, start: int = 0, step: int = 1) -> None:
        self.data, self.numbers = data, range(start, len(data), step)

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Any]:
        return (self.data[number] for number in self.numbers)


class Stream(_Points):
    """The points one after the other."""

    def train_data(self) -> Any:
        return _Stream(super().train_data())


class ShardedStream(_Points):
    """Every worker reads its own part, as torch's own examples do."""

    def train_data(self) -> Any:
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        data = super().train_data()
        return _Stream(TensorDataset(*(tensor[:36] for tensor in data.tensors)), rank, size)
