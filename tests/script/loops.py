"""What the tests of `stormo.World` train: a small network with batch norm, data in double precision, plain loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stormo.distributed.world import World as Workers
from stormo.launch.failure_reporter import FailureReporter
from stormo.script.world import World

Weights = dict[str, Tensor]
Ranks = Callable[..., list[Any]]


def world_of(workers: Workers) -> World:
    """`stormo.World` on the ranks of the pool."""
    return World._of(workers, FailureReporter())


class Net(nn.Module):
    """Batch norm, so that shares of unequal size matter, and dropout where it is asked for."""

    def __init__(self, dropout: float = 0.0, *, has_norm: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8) if has_norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.dropout(torch.tanh(self.norm(self.first(x)))))
        return found


def make(dropout: float = 0.0, *, has_norm: bool = True, lr: float = 0.1) -> tuple[Net, torch.optim.SGD]:
    """A model and its optimizer, the same every time."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(5)
    model = Net(dropout, has_norm=has_norm)
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def data(num_samples: int = 38) -> TensorDataset:
    """Samples, the same every time; drawn from no global generator."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randn(num_samples, 2, generator=generator, dtype=torch.float64))


def weights(model: nn.Module) -> Weights:
    """A copy of everything in a model."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def plain_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Any,
    num_epochs: int = 2,
    *,
    scheduler: Any = None,
    max_norm: float | None = None,
) -> Weights:
    """What a script without stormo does."""
    for _ in range(num_epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return weights(model)


def world_loop(
    world: World,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Any,
    num_epochs: int = 2,
    *,
    scheduler: Any = None,
    max_norm: float | None = None,
) -> Weights:
    """The same with stormo."""
    for _ in range(num_epochs):
        for x, y in loader:
            optimizer.zero_grad()
            world.backward(F.mse_loss(model(x), y))
            if max_norm is not None:
                world.clip_grad_norm(model.parameters(), max_norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return weights(model)
