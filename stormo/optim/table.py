"""The optimizers by name, each with what it takes from the settings; a variant is a row.

torch loads its compiler, which takes seconds, when an optimizer is made and again looks for it in every step. A run
that does not compile has no use for it: `_light` and `spare_compiler` take the plain functions underneath.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from stormo.config import schema
from stormo.errors import SettingError
from stormo.optim.lamb import LAMB
from stormo.optim.lars import LARC, LARS
from stormo.optim.layerwise import LayerwiseOptimizer
from stormo.optim.novograd import NovoGrad

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)  # whatever their shape


def parameter_groups(model: nn.Module, weight_decay: float, *, layerwise: bool = False) -> list[dict[str, Any]]:
    """Two groups: weights, which decay, and biases and norms, which do not; `layerwise` adapts the weights alone."""
    norms = {id(p) for layer in model.modules() if isinstance(layer, _NORMS) for p in layer.parameters(recurse=False)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = [p for p in trained if p.ndim > 1 and id(p) not in norms]
    others = [p for p in trained if p.ndim <= 1 or id(p) in norms]
    groups: list[dict[str, Any]] = [
        {"params": weights, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    if layerwise:
        groups[0]["adapt"], groups[1]["adapt"] = True, False
    return [group for group in groups if group["params"]]


@functools.cache
def _light(base: type[Optimizer]) -> type[Any]:
    """The same optimizer with its undecorated step; the decorator only serves `differentiable`, which is off here."""
    return type(base.__name__, (base,), {"step": torch.no_grad()(inspect.unwrap(base.step))})


def lighten(optimizer: Optimizer) -> None:
    """Give an optimizer that is made already the light step too; a step that goes on to torch's loads the compiler now.

    It would do so in the first step, whose time counts as training.
    """
    kind: type = type(optimizer)
    heirs_of = [base for base in kind.__mro__ if base.__module__.startswith("torch.optim.") and base is not Optimizer]
    if "torch._dynamo" in sys.modules or not heirs_of:
        return
    is_wrapped = "step" in vars(optimizer) or optimizer.defaults.get("differentiable")
    if kind is heirs_of[0] and not is_wrapped:
        optimizer.__class__ = _light(kind)
        optimizer._patch_step_function()  # hooks and profiles, as its own step has them
    else:
        importlib.import_module("torch._dynamo")


def spare_compiler(owner: type = Optimizer) -> None:
    """Mark the methods that torch shields from its compiler as shielded already; elsewhere there is nothing to do."""
    for method in vars(owner).values():
        wrapper = method
        while isinstance(wrapper, FunctionType):
            if wrapper.__code__.co_filename.endswith("_compile.py"):
                plain = inspect.unwrap(wrapper)
                plain.__dict__.setdefault("__dynamo_disable", plain)
            wrapper = getattr(wrapper, "__wrapped__", None)


def start_momentum(optimizer: Optimizer, *, may_skip: bool = False) -> None:
    """Start the momentum of torch's fused SGD where it would not, before a step; the step remains what it would be.

    The fused step starts it for all parameters at once or for none: it fails where some have their first gradient
    later than others.

    Args:
        optimizer: of any kind, with its gradients.
        may_skip: a step that overflows may be left out, after which a momentum that has just begun is not set.
    """
    num_parameters = sum(len(group["params"]) for group in optimizer.param_groups)
    if not isinstance(optimizer, torch.optim.SGD) or len(optimizer.state) == num_parameters:
        return
    for group in optimizer.param_groups:
        if not (group["fused"] and group["momentum"]):
            continue
        graded = [parameter for parameter in group["params"] if parameter.grad is not None]
        fresh = [p for p in graded if optimizer.state.get(p, {}).get("momentum_buffer") is None]
        if not may_skip and len(fresh) in (0, len(graded)):
            continue
        before = group["dampening"] / group["momentum"]
        if before and fresh and may_skip:
            raise SettingError(
                "optimizer() returned an SGD with fused=True and dampening for --precision fp16",
                "its momentum would start from a gradient that still has the loss scale",
                "leave out fused=True or dampening",
            )
        for parameter in fresh:
            # The first momentum is the gradient, without dampening.
            start = parameter.grad * before if before else torch.zeros_like(parameter)
            optimizer.state[parameter]["momentum_buffer"] = start


def _sgd(groups: list[dict[str, Any]], settings: schema.Optimizer, fused: bool) -> Optimizer:
    kind: type[torch.optim.SGD] = _light(torch.optim.SGD)
    return kind(groups, lr=settings.base_lr, momentum=settings.momentum, nesterov=settings.nesterov, fused=fused)


def _adamw(groups: list[dict[str, Any]], settings: schema.Optimizer, fused: bool) -> Optimizer:
    kind: type[torch.optim.AdamW] = _light(torch.optim.AdamW)
    return kind(groups, lr=settings.base_lr, **_betas_and_eps(settings), fused=fused)


def _lars(
    kind: type[LARS], groups: list[dict[str, Any]], settings: schema.Optimizer, fused: bool
) -> LayerwiseOptimizer:
    trust = settings.of_its_own()["trust_coefficient"]
    return kind(
        groups,
        lr=settings.base_lr,
        momentum=settings.momentum,
        trust_coefficient=trust,
        nesterov=settings.nesterov,
    )


def _lamb(groups: list[dict[str, Any]], settings: schema.Optimizer, fused: bool) -> LayerwiseOptimizer:
    return LAMB(groups, lr=settings.base_lr, **_betas_and_eps(settings))


def _novograd(groups: list[dict[str, Any]], settings: schema.Optimizer, fused: bool) -> LayerwiseOptimizer:
    return NovoGrad(groups, lr=settings.base_lr, **_betas_and_eps(settings), grad_averaging=settings.grad_averaging)


def _betas_and_eps(settings: schema.Optimizer) -> dict[str, Any]:
    own = settings.of_its_own()
    return {"betas": (settings.momentum, own["beta2"]), "eps": own["eps"]}


OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]], schema.Optimizer, bool], Optimizer]] = {
    "sgd": _sgd,
    "adamw": _adamw,
    "lars": functools.partial(_lars, LARS),
    "larc": functools.partial(_lars, LARC),
    "lamb": _lamb,
    "novograd": _novograd,
}
LAYERWISE = frozenset({"lars", "larc", "lamb", "novograd"})  # rows whose groups know `adapt`


def make_optimizer(model: nn.Module, settings: schema.Optimizer) -> Optimizer:
    """The optimizer the settings name, over all trained parameters of a model already on its device."""
    if "torch._dynamo" not in sys.modules:
        spare_compiler()
    fused = all(parameter.is_floating_point() for parameter in model.parameters())  # one kernel for all, on CPU and GPU
    groups = parameter_groups(model, settings.weight_decay, layerwise=settings.optimizer in LAYERWISE)
    return OPTIMIZERS[settings.optimizer](groups, settings, fused)
