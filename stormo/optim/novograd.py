"""NovoGrad (Ginsburg et al., arXiv 1905.11286, Algorithm 1): gradients over the norm of their layer, then momentum.

Its second moment is one number a layer, so that its state is half of Adam's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from stormo.optim.layerwise import Layers, LayerwiseOptimizer


class NovoGrad(LayerwiseOptimizer):
    """Momentum of g / (√v + eps) + weight_decay × w, where v is the running mean of a layer's |g|².

    Args:
        params: parameters or groups.
        lr: a number or a 0-dim tensor.
        betas: of the momentum and of v.
        eps: added to the root of v.
        weight_decay: times the weights, added to the update.
        grad_averaging: takes a mean, with (1 - beta1), where the momentum is a sum.
        adapt: see `LayerwiseOptimizer`; a layer that is not adapted moves by the momentum of its gradient.
    """

    num_norms = 1

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        *,
        betas: tuple[float, float] = (0.95, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_averaging: bool = False,
        adapt: bool | None = None,
    ) -> None:
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, grad_averaging=grad_averaging, adapt=adapt
        )

    def _begin(self, layers: Layers) -> tuple[list[Tensor], ...]:
        return (layers.gradients,)

    def _end(self, layers: Layers, begun: tuple[list[Tensor], ...], norms: Sequence[Tensor]) -> None:
        group = layers.group
        beta1, beta2 = group["betas"]
        updates: list[Tensor]
        if layers.is_adapted:
            length = _root_mean_square(layers, norms[0], beta2)
            # A layer whose gradients were all zeros stays unchanged, whatever eps is.
            factors = torch.where(length > 0, 1 / (length + group["eps"]), 1.0)
            updates = list(torch._foreach_mul(layers.gradients, list(factors.unbind())))
            torch._foreach_add_(updates, layers.weights, alpha=layers.decay)
        else:
            updates = list(torch._foreach_add(layers.gradients, layers.weights, alpha=layers.decay))
        means = layers.state_of("exp_avg")
        torch._foreach_mul_(means, beta1)
        torch._foreach_add_(means, updates, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        if isinstance(layers.lr, Tensor):  # a tensor as `alpha` would be read from the device
            torch._foreach_sub_(layers.weights, torch._foreach_mul(means, layers.lr))
        else:
            torch._foreach_sub_(layers.weights, means, alpha=layers.lr)


def _root_mean_square(layers: Layers, lengths: Tensor, beta2: float) -> Tensor:
    """√v of each layer as a vector; v starts as the first |g|²."""
    squares = list((lengths * lengths).unbind())
    for state, square in zip(layers.states, squares, strict=True):
        if "exp_avg_sq" not in state:
            state["exp_avg_sq"] = square.clone()
    means = [state["exp_avg_sq"] for state in layers.states]
    torch._foreach_mul_(means, beta2)
    torch._foreach_add_(means, squares, alpha=1 - beta2)
    return torch.stack(means).sqrt()
