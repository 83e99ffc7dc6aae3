"""LAMB (You et al., arXiv 1904.00962, Algorithm 2): Adam's update, scaled to the norm of its layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from stormo.errors import SettingError
from stormo.optim.layerwise import Layers, LayerwiseOptimizer, host_numbers, multiply


class LAMB(LayerwiseOptimizer):
    """Adam with decoupled decay, whose update u moves a layer by lr × |w| / |u| × u.

    Args:
        params: parameters or groups.
        lr: a number or a 0-dim tensor.
        betas: of the first and the second moment.
        eps: added to the root of the second moment.
        weight_decay: times the weights, added to the update.
        norm_bounds: bounds of |w| in the ratio, the paper's φ; None for none.
        adapt: see `LayerwiseOptimizer`.
    """

    num_norms = 2

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        norm_bounds: tuple[float, float] | None = None,
        adapt: bool | None = None,
    ) -> None:
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, norm_bounds=norm_bounds, adapt=adapt
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group after checking its numbers."""
        bounds = {**self.defaults, **param_group}["norm_bounds"]
        if bounds is not None and not 0 <= bounds[0] <= bounds[1]:
            raise SettingError(
                f"LAMB was given norm_bounds {bounds}", "they are a lower and an upper bound", "give 0 ≤ low ≤ high"
            )
        super().add_param_group(param_group)

    def _begin(self, layers: Layers) -> tuple[list[Tensor], ...]:
        updates = adam_updates(layers)
        torch._foreach_add_(updates, layers.weights, alpha=layers.decay)
        return layers.weights, updates

    def _end(self, layers: Layers, begun: tuple[list[Tensor], ...], norms: Sequence[Tensor]) -> None:
        (_, updates), bounds, rates = begun, layers.group["norm_bounds"], layers.lr
        if layers.is_adapted:
            weights, lengths = norms
            if bounds is not None:
                weights = weights.clamp(*bounds)  # a low one gives layers of zeros a ratio too
            rates = rates * torch.where((weights > 0) & (lengths > 0), weights / lengths, 1.0)
        multiply(updates, rates)
        torch._foreach_sub_(layers.weights, updates)


def adam_updates(layers: Layers) -> list[Tensor]:
    """Adam's update of every layer with debiased moments, without decay and learning rate; new tensors."""
    beta1, beta2 = layers.group["betas"]
    means, squares = layers.state_of("exp_avg"), layers.state_of("exp_avg_sq")
    torch._foreach_lerp_(means, layers.gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, layers.gradients, layers.gradients, 1 - beta2)
    steps = _advance_steps(layers)
    below = torch._foreach_sqrt(squares)
    torch._foreach_div_(below, host_numbers((1 - beta2**steps).sqrt()))
    torch._foreach_add_(below, layers.group["eps"])
    updates = list(torch._foreach_div(means, below))
    torch._foreach_div_(updates, host_numbers(1 - beta1**steps))
    return updates


def _advance_steps(layers: Layers) -> Tensor:
    """The step count of each layer after this step: float64 in host memory."""
    for state in layers.states:
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)  # as torch's own optimizers keep it
    steps = [state["step"] for state in layers.states]
    torch._foreach_add_(steps, 1)
    return torch.stack(steps).double()
