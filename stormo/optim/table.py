"""The optimizers by name, each with what it takes from the settings; a variant is a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from stormo import config


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: weights, which decay, and vectors (biases, norms), which do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = [parameter for parameter in trained if parameter.ndim > 1]
    vectors = [parameter for parameter in trained if parameter.ndim <= 1]
    groups = [{"params": weights, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _sgd(groups: list[dict[str, Any]], settings: config.Optimizer, fused: bool) -> Optimizer:
    return torch.optim.SGD(
        groups, lr=settings.base_lr, momentum=settings.momentum, nesterov=settings.nesterov, fused=fused
    )


def _adamw(groups: list[dict[str, Any]], settings: config.Optimizer, fused: bool) -> Optimizer:
    return torch.optim.AdamW(groups, lr=settings.base_lr, betas=(settings.momentum, 0.999), fused=fused)


OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]], config.Optimizer, bool], Optimizer]] = {
    "sgd": _sgd,
    "adamw": _adamw,
}


def make_optimizer(model: nn.Module, settings: config.Optimizer) -> Optimizer:
    """The optimizer the settings name, over all trained parameters of a model already on its device."""
    fused = all(parameter.is_floating_point() for parameter in model.parameters())  # one kernel for all, on CPU and GPU
    return OPTIMIZERS[settings.optimizer](parameter_groups(model, settings.weight_decay), settings, fused)
