"""The task of `benchmarks.fingerprint`: a small network on made-up points, which come as tensors, one by one or as a
stream. Each `loss` leaves a line with its samples and its value in a file for each rank, each validation an empty one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import stormo

FOLDER = "FINGERPRINT_FOLDER"  # variable with the folder where ranks write


def write_line(**values: Any) -> None:
    with Path(os.environ[FOLDER], f"rank-{os.environ.get('RANK', '0')}").open("a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")


@dataclass(frozen=True, kw_only=True)
class Options:
    train: int = 45
    validation: int = 40
    data: str = "tensors"
    norm: bool = False
    dropout: float = 0.0
    jitter: float = 0.0
    counts: bool = False
    own_optimizer: bool = False
    stages: int = 0  # of a pipeline; otherwise pieces are dealt by their times, which vary


class Block(nn.Module):
    def __init__(self, options: Options) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16) if options.norm else nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.down(gelu(self.up(self.norm(x)))))
        return out


class OneByOne(Dataset[Any]):
    def __init__(self, points: TensorDataset) -> None:
        self.points = points

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        x, label, number = self.points[index]
        return {"x": x + 0.01 * torch.randn(x.shape), "rest": [label, number]}


class Endless(IterableDataset[Any]):
    def __init__(self, points: TensorDataset) -> None:
        self.samples, self.number = OneByOne(points), 0

    def set_epoch(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self.samples), generator=torch.Generator().manual_seed(self.number))
        return (self.samples[index] for index in order.tolist())


class Stream(Endless):
    def __len__(self) -> int:
        return len(self.samples)


KINDS: dict[str, Any] = {"tensors": lambda points: points, "map": OneByOne, "stream": Stream, "endless": Endless}


class Points(stormo.Task):
    Options = Options
    num_draws = 1

    def model(self) -> nn.Module:
        blocks = [Block(self.options) for _ in range(4)]
        return nn.Sequential(nn.Linear(8, 16), *blocks, nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)))

    def _data(self, count: int, seed: int) -> Dataset[Any]:
        x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
        label = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0.5).long()
        data: Dataset[Any] = KINDS[self.options.data](TensorDataset(x, label, torch.arange(count)))
        return data

    def train_data(self) -> Dataset[Any]:
        return self._data(self.options.train, 0)

    def validation_data(self) -> Dataset[Any]:
        return self._data(self.options.validation, 1)

    def augment(self, batch: Any, draws: Tensor) -> Any:
        return (batch[0] + self.options.jitter * draws, *batch[1:]) if self.options.jitter else batch

    def _losses(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, (label, number) = (batch["x"], batch["rest"]) if isinstance(batch, dict) else (batch[0], batch[1:])
        scores = model(x.to(torch.get_default_dtype()))
        return cross_entropy(scores, label, reduction="none"), scores.argmax(dim=1) == label, number

    def reduced(self, losses: Tensor) -> Tensor:
        return losses.mean()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        losses, _, number = self._losses(model, batch)
        counted = number % 3 != 0 if self.options.counts else number >= 0
        loss = self.reduced(losses[counted])
        if torch.is_grad_enabled():
            write_line(samples=number.tolist(), loss=loss.item())
        return (loss, counted.sum()) if self.options.counts else loss

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        write_line()
        losses, right, number = self._losses(model, batch)
        even = number % 2 == 0
        return {"loss": losses.sum(), "accuracy": right.sum(), "even": (losses[even].mean(), even.sum())}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        groups = [{"params": layer.parameters(), "lr": 0.001 * rate} for rate, layer in enumerate(model.children(), 1)]
        return torch.optim.Adam(groups) if self.options.own_optimizer else None

    def tensor_plan(self, model: nn.Module) -> dict[str, str]:
        return {"*.up": "column", "*.down": "row", "5.0": "column", "5.2": "row"}

    def classifier(self, model: nn.Module) -> str:
        return "5"

    def pieces(self, model: nn.Module) -> list[Any]:
        layers, count = list(model.children()), self.options.stages
        cuts = [len(layers) * stage // count for stage in range(count + 1)] if count else []
        return [layers[start:stop] for start, stop in pairwise(cuts)] if count else layers


class Summed(Points):
    loss_reduction: ClassVar[Any] = "sum"

    def reduced(self, losses: Tensor) -> Tensor:
        return 0.05 * losses.sum()


class Whole(Points):
    loss_reduction: ClassVar[Any] = "local"

    def reduced(self, losses: Tensor) -> Tensor:
        return losses.logsumexp(dim=0)
