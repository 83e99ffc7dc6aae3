"""Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon): momentum, orthogonalised matrix by matrix.

The arithmetic is that of torch.optim.Muon, which takes whole matrices of two dimensions, in bfloat16. This one also
takes convolutions and shards of matrices, computes in float64 for float64 weights, and steps other weights with AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from stormo.errors import SettingError
from stormo.optim.lamb import adam_updates
from stormo.optim.layerwise import Begun, Layers, LayerwiseOptimizer, multiply

_COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of Jordan's quintic iteration
_SMALLEST_NORM = 1e-7
# Factors of the learning rate, by rows and columns.
ADJUSTMENTS: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),  # Liu et al., arXiv 2502.16982
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}


class Exchange(Protocol):
    """How workers that hold shards of matrices compute with whole ones. All of them call it once a step."""

    def whole_shape(self, parameter: Tensor) -> tuple[int, ...]:
        """The shape of the whole parameter of a shard."""

    def __call__(self, shards: Mapping[Tensor, Tensor], compute: Callable[[Tensor], Tensor]) -> dict[Tensor, Tensor]:
        """Shards of `compute` of whole matrices, by parameter."""


class Muon(LayerwiseOptimizer):
    """Muon for the adapted layers, which are matrices or flattened to such, and AdamW for the others.

    Args:
        params: parameters or groups; embeddings and the output layer belong into a group with `adapt=False`.
        lr: a number or a 0-dim tensor.
        momentum: of the adapted layers, as is nesterov.
        nesterov: Nesterov momentum.
        ns_steps: Newton–Schulz iterations.
        adjust_lr: `match_rms_adamw` makes a step as long as AdamW's, so that one learning rate suits all layers.
            `original` multiplies lr by √max(1, rows / columns).
        weight_decay: decoupled.
        betas: of AdamW.
        eps: of AdamW.
        adapt: see `LayerwiseOptimizer`.
    """

    num_norms = 0
    exchange: Exchange | None = None  # set where the parameters are shards
    _orthogonal: dict[Tensor, Tensor] | None = None  # of this step, by parameter, where they were exchanged

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr: str = "match_rms_adamw",
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adapt: bool | None = None,
    ) -> None:
        self._num_steps = ns_steps
        options = {"momentum": momentum, "nesterov": nesterov, "adjust_lr": adjust_lr}
        super().__init__(params, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps, adapt=adapt, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group after checking its settings."""
        group = {**self.defaults, **param_group}
        if group["adjust_lr"] not in ADJUSTMENTS:
            raise SettingError(
                f"Muon was given adjust_lr {group['adjust_lr']!r}", "it is unknown", f"give {' or '.join(ADJUSTMENTS)}"
            )
        super().add_param_group(param_group)
        if group["adapt"] and any(parameter.ndim < 2 for parameter in self.param_groups[-1]["params"]):
            self.param_groups.pop()
            raise SettingError(
                "Muon was given a vector in a group with adapt=True",
                "only matrices can be orthogonalised",
                "put it into a group with adapt=False",
            )

    def _begin(self, layers: Layers) -> tuple[list[Tensor], ...]:
        if not layers.is_adapted:
            return (adam_updates(layers),)
        torch._foreach_lerp_(layers.state_of("momentum_buffer"), layers.gradients, 1 - layers.group["momentum"])
        return ()

    def _finish(self, ready: Sequence[Begun]) -> None:
        if self.exchange is not None:
            adapted = [layers for layers, _, _ in ready if layers.is_adapted]
            shards = {p: one for a in adapted for p, one in zip(a.parameters, _momenta(a), strict=True)}
            self._orthogonal = self.exchange(shards, lambda matrix: orthogonalise(matrix, self._num_steps))
        super()._finish(ready)
        self._orthogonal = None

    def _end(self, layers: Layers, begun: tuple[list[Tensor], ...], norms: Sequence[Tensor]) -> None:
        multiply(layers.weights, 1 - layers.lr * layers.decay)
        if not layers.is_adapted:
            (updates,) = begun
            multiply(updates, layers.lr)
            torch._foreach_sub_(layers.weights, updates)
            return
        factor_of = ADJUSTMENTS[layers.group["adjust_lr"]]
        for parameter, weight, update in zip(layers.parameters, layers.weights, self._updates(layers), strict=True):
            shape = parameter.shape if self.exchange is None else self.exchange.whole_shape(parameter)
            factor = factor_of(shape[0], math.prod(shape[1:]))
            weight.sub_(update.to(weight) * (layers.lr * factor))

    def _updates(self, layers: Layers) -> Iterator[Tensor]:
        """The orthogonalised momentum of each layer, one at a time to save memory."""
        if self._orthogonal is not None:
            yield from (self._orthogonal[parameter] for parameter in layers.parameters)
            return
        for momentum in _momenta(layers):
            yield orthogonalise(momentum.flatten(1), self._num_steps).view_as(momentum)


def _momenta(layers: Layers) -> Iterator[Tensor]:
    """What is orthogonalised for each layer, in the dtype of that computation."""
    momentum, nesterov, weights = layers.group["momentum"], layers.group["nesterov"], layers.weights
    dtype = torch.float64 if weights[0].dtype == torch.float64 else torch.bfloat16  # as in torch.optim.Muon
    for gradient, buffer in zip(layers.gradients, layers.state_of("momentum_buffer"), strict=True):
        yield (gradient.lerp(buffer, momentum) if nesterov else buffer).to(dtype)


def orthogonalise(matrix: Tensor, num_steps: int) -> Tensor:
    """About U V^T of the matrix U S V^T, with singular values near 1, by Newton–Schulz iterations in its dtype."""
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=_SMALLEST_NORM)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
