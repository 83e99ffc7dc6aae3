"""Sparse gradients, which only a pass can show: what was set that cannot be had with them."""

from __future__ import annotations

import torch
from torch import nn

from stormo.config.schema import TrainConfig
from stormo.errors import SettingError

REASON = "the model has sparse gradients"
NOT_MEASURED = f"The gradient noise scale is not measured, as {REASON}."
# What was set, and what it does with a gradient; whatever is left out of the settings is none.
_NEED_DENSE = (
    ("noise_scale", "which are compared by their norms"),
    ("gradient_noise", "and noise is added to every element"),
    ("clip_norm", "whose norm is taken with that of all others"),
)


def has_sparse(module: nn.Module) -> bool:
    """Whether the pass that is done has given a parameter a sparse gradient."""
    return any(p.grad is not None and p.grad.layout is not torch.strided for p in module.parameters())


def check_sparse(settings: TrainConfig, *, has_own_optimizer: bool) -> None:
    """Refuse what was set and needs gradients that are dense."""
    if not has_own_optimizer:
        raise SettingError(
            f"--optimizer {settings.optimizer.optimizer} is in force",
            f"{REASON}, which it does not take",
            "make the embeddings with sparse=False, or give the task an optimizer() that does (torch.optim.SparseAdam)",
        )
    if settings.workers.compress != "none":
        raise SettingError(
            f"--compress {settings.workers.compress} was set",
            f"{REASON}, which travel as they are",
            "make the embeddings with sparse=False, or leave out --compress",
        )
    for name, why in _NEED_DENSE:
        value, flag = getattr(settings.optimizer, name), f"--{name.replace('_', '-')}"
        if value:
            raise SettingError(
                f"{flag}{'' if value is True else f' {value:g}'} was set",
                f"{REASON}, {why}",
                f"make the embeddings with sparse=False, or leave out {flag}",
            )
