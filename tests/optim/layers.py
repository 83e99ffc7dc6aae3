"""What the tests of the layer-wise optimizers step: a few layers, the optimizers, gradients from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stormo.optim import LAMB, LARC, LARS, Muon, NovoGrad

KINDS: dict[str, Any] = {"lars": LARS, "larc": LARC, "lamb": LAMB, "novograd": NovoGrad, "muon": Muon}
SHAPES = ((6, 4), (2, 3, 3, 3), (5,), ())


def make_layers(dtype: torch.dtype = torch.float64, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes]


def set_gradients(layers: Sequence[Tensor], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for layer in layers:
        layer.grad = (torch.randn(layer.shape, generator=generator, dtype=torch.float64) * scale).to(layer.dtype)


def take_steps(optimizer: torch.optim.Optimizer, layers: Sequence[Tensor], seeds: Sequence[int]) -> None:
    for seed in seeds:
        set_gradients(layers, seed)
        optimizer.step()


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]
