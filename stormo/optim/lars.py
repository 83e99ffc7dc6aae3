"""LARS (You, Gitman, Ginsburg, arXiv 1708.03888, Algorithm 1), and LARC, which clips its rates to the global one.

As in the paper the learning rate is inside the momentum: changing it does not rescale earlier steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from stormo.optim.layerwise import Layers, LayerwiseOptimizer, multiply


class LARS(LayerwiseOptimizer):
    """Momentum with a learning rate per layer: lr × trust_coefficient × |w| / (|g| + weight_decay × |w|)."""

    num_norms = 2

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        nesterov: bool = False,
        adapt: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            trust_coefficient=trust_coefficient,
            nesterov=nesterov,
            adapt=adapt,
        )

    def _begin(self, layers: Layers) -> tuple[list[Tensor], ...]:
        return layers.weights, layers.gradients

    def _end(self, layers: Layers, begun: tuple[list[Tensor], ...], norms: Sequence[Tensor]) -> None:
        group, rates = layers.group, layers.lr
        if layers.is_adapted:
            weights, gradients = norms
            below = gradients + layers.decay * weights
            local = group["trust_coefficient"] * weights / below
            rates = self._rates(local, (weights > 0) & (below > 0), layers.lr)
        updates = list(torch._foreach_add(layers.gradients, layers.weights, alpha=layers.decay))
        multiply(updates, rates)
        if momentum := group["momentum"]:
            buffers = layers.state_of("momentum_buffer")
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, updates)
            if group["nesterov"]:
                torch._foreach_add_(updates, buffers, alpha=momentum)
            else:
                updates = buffers
        torch._foreach_sub_(layers.weights, updates)

    def _rates(self, local: Tensor, is_defined: Tensor, rate: float | Tensor) -> Tensor:
        """The learning rate of each layer from its local one, which is undefined where a norm is 0."""
        return rate * torch.where(is_defined, local, 1.0)


class LARC(LARS):
    """Momentum with a learning rate per layer: trust_coefficient × |w| / (|g| + weight_decay × |w|), at most lr."""

    def _rates(self, local: Tensor, is_defined: Tensor, rate: float | Tensor) -> Tensor:
        whole = torch.ones_like(local) * rate
        return torch.where(is_defined, torch.minimum(local, whole), whole)
