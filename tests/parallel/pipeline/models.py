"""Small models for the tests of the pipeline, and what one process makes of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stormo.tasks.gpt import Gpt, embed, score
from stormo.tasks.language_model import Size

VOCABULARY, LENGTH = 11, 6


class Skipping(nn.Module):
    """An MLP whose first hidden layer skips two others, and whose second input, whole numbers, waits for the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.scale = nn.Parameter(torch.full((8,), 1.5))
        self.table = nn.Embedding(5, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, kinds: Tensor, *, bias: float = 0.0) -> Tensor:
        early = torch.tanh(self.layers[0](x))
        hidden = F.relu(self.layers[1](early))
        hidden = self.layers[2](hidden) * self.scale
        hidden = self.layers[3](hidden + early) + bias
        return self.head(hidden + self.table(kinds) + early.mean(1, keepdim=True))


class Twice(nn.Module):
    """One linear layer used twice, so that its weight hangs on the graph at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(F.gelu(self.inner(x)) + self.bias)


def gpt() -> tuple[nn.Module, list[Any]]:
    """A GPT of four blocks, and its pieces as the task gives them."""
    model = Gpt(Size(4, 16, 2, LENGTH), block=LENGTH, vocabulary=VOCABULARY)
    return model, [
        partial(embed, model.tokens, model.positions, model.dropout),
        *model.blocks,
        partial(score, model.norm, model.head),
    ]


def skipping() -> tuple[nn.Module, None]:
    """Has no pieces of its own: it is traced."""
    return Skipping(), None


def sequential() -> tuple[nn.Module, None]:
    """Begins stages with an operation in place, and has a layer that is used twice, batch norm and frozen weights."""
    model = nn.Sequential(
        nn.Linear(8, 8),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.BatchNorm1d(8), Twice(), nn.ReLU(inplace=True)),
        nn.Linear(8, 8),
        nn.Dropout(0.0),
        nn.Tanh(),
        Twice(),
        nn.Linear(8, 3),
    )
    model[0].requires_grad_(False)
    return model, None


def inputs(name: str, num_samples: int) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
    """Arguments of the model, and targets."""
    generator = torch.Generator().manual_seed(7)
    if name == "gpt":
        tokens = torch.randint(VOCABULARY, (num_samples, LENGTH + 1), generator=generator)
        return (tokens[:, :-1],), {}, tokens[:, 1:]
    x = torch.randn(num_samples, 8, generator=generator, dtype=torch.float64)
    targets = torch.randint(3, (num_samples,), generator=generator)
    if name == "sequential":
        return (x,), {}, targets
    return (x,), {"kinds": torch.randint(5, (num_samples,), generator=generator), "bias": 0.25}, targets


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {"gpt": gpt, "skipping": skipping, "sequential": sequential}


def make(name: str) -> tuple[nn.Module, Any]:
    """A model in float64 with the same weights everywhere."""
    torch.manual_seed(3)
    model, given = MODELS[name]()
    return model.double(), given


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy."""
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def alone(name: str, num_samples: int, count: int) -> tuple[nn.Module, list[Tensor]]:
    """One process: gradients of a batch in `count` micro-batches, and their weighted losses."""
    model, _ = make(name)
    args, kwargs, targets = inputs(name, num_samples)
    size = num_samples // count
    losses = []
    for k in range(count):
        rows = slice(k * size, (k + 1) * size)
        cut = {key: value[rows] if isinstance(value, Tensor) else value for key, value in kwargs.items()}
        loss = loss_of(model(*(arg[rows] for arg in args), **cut), targets[rows]) / count
        loss.backward()
        losses.append(loss.detach())
    return model, losses
