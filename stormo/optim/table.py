"""The optimizers by name, made from the settings, and parameters by patterns of their names.

torch imports its compiler, which takes seconds, when an optimizer is made or stepped. A run that does not compile does
not need it: `_without_compiler` and `skip_compiler_import` use the functions below torch's decorators.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from stormo.config import schema
from stormo.errors import SettingError, pluralize
from stormo.optim.lamb import LAMB
from stormo.optim.lars import LARC, LARS
from stormo.optim.layerwise import LayerwiseOptimizer
from stormo.optim.muon import Muon
from stormo.optim.novograd import NovoGrad
from stormo.optim.schedule_free import begin_training, schedule_free_adamw

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)  # whatever their shape


def matching(model: nn.Module, pattern: str, said: str) -> list[nn.Parameter]:
    """The parameters with a name that fits; `said` begins the sentence where there are none."""
    named = dict(model.named_parameters(remove_duplicate=False))
    found = {id(parameter): parameter for name, parameter in named.items() if fnmatchcase(name, pattern)}
    if not found:
        parents = {f"{name[:dot]}.*": None for name in named for dot in range(len(name)) if name[dot] == "."}
        near = difflib.get_close_matches(pattern, [*named, *parents], n=3, cutoff=0.0)
        shown = pattern or "an empty pattern"
        raise SettingError(said, f"no parameter of the model fits {shown}", f"set something like {' or '.join(near)}")
    return list(found.values())


def freeze(model: nn.Module, patterns: str) -> str:
    """Take the gradients of the parameters whose names fit; say how many there are."""
    for pattern in patterns.split(","):
        for parameter in matching(model, pattern.strip(), f"--freeze {patterns} was set"):
            parameter.requires_grad_(False)
    every = list(model.parameters())
    frozen = [parameter for parameter in every if not parameter.requires_grad]
    count = pluralize(len(every), "parameter")
    if len(frozen) == len(every):
        why = f"all {count} of the model are frozen then"
        raise SettingError(f"--freeze {patterns} was set", why, "leave some to be trained")
    values = [sum(parameter.numel() for parameter in some) for some in (frozen, every)]
    return f"{len(frozen)} of the model's {count} are frozen: {values[0]:,} of {values[1]:,} values."


def lr_factor_of(model: nn.Module, factors: Mapping[str, float]) -> dict[int, float]:
    """The factor of each parameter by its id: that of the first pattern that fits one of its names."""
    found: dict[int, float] = {}
    for pattern, factor in factors.items():
        said = f"lr_factors of the task has {pattern!r}"
        if not isinstance(factor, int | float) or isinstance(factor, bool) or not 0 < factor < math.inf:
            raise SettingError(
                f"{said}: {factor!r}", "it multiplies a learning rate", "set a number above 0, or freeze these"
            )
        for parameter in matching(model, str(pattern), said):
            found.setdefault(id(parameter), float(factor))
    return found


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    *,
    layerwise: bool = False,
    lr: float = 0.0,
    factors: Mapping[str, float] = {},
) -> list[dict[str, Any]]:
    """Two groups: weights, which decay, and biases and norms, which do not; `layerwise` adapts only the weights.

    Where a task has `lr_factors`, each is divided by the factors of its parameters' learning rates.
    """
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
    if factors:
        of = lr_factor_of(model, factors)
        groups = [
            {**group, "params": [p for p in group["params"] if of.get(id(p), 1.0) == factor], "lr": lr * factor}
            for group in groups
            for factor in dict.fromkeys((1.0, *factors.values()))
        ]
    return [group for group in groups if group["params"]]


def muon_groups(
    model: nn.Module, weight_decay: float, *, lr: float, adamw_lr: float, factors: Mapping[str, float] = {}
) -> list[dict[str, Any]]:
    """Muon for hidden matrices and convolutions; AdamW for embeddings, the output layer, biases, norms and all others.

    The output layer is the last one with a matrix, in the order of the model's modules.
    """
    with_matrix = [layer for layer in model.modules() if any(p.ndim == 2 for p in layer.parameters(recurse=False))]
    outer = [layer for layer in with_matrix if isinstance(layer, nn.Embedding | nn.EmbeddingBag)] + with_matrix[-1:]
    apart = {id(parameter) for layer in outer for parameter in layer.parameters(recurse=False)}
    kernels = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)}
    groups: list[dict[str, Any]] = []
    for group in parameter_groups(model, weight_decay, layerwise=True, lr=lr, factors=factors):
        if group["adapt"]:
            hidden = {id(p) for p in group["params"] if id(p) in kernels or (p.ndim == 2 and id(p) not in apart)}
            groups.append({**group, "params": [p for p in group["params"] if id(p) in hidden]})
            group["params"] = [p for p in group["params"] if id(p) not in hidden]
        groups.append({**group, "adapt": False, "lr": adamw_lr * (group.get("lr", lr) / lr)})
    return [group for group in groups if group["params"]]


def muon_notice(model: nn.Module, optimizer: Optimizer) -> str:
    """Which weights Muon takes, and which larger ones it leaves to AdamW."""
    adapted = {id(p) for group in optimizer.param_groups if group["adapt"] for p in group["params"]}
    wide = [name for name, p in model.named_parameters() if p.requires_grad and p.ndim > 1 and id(p) not in adapted]
    rest = f"all others, among them {', '.join(wide)}" if wide else "all others"
    choice = "A task's optimizer() may return a stormo.optim.Muon with another choice."
    return f"Muon steps {pluralize(len(adapted), 'weight')}, and AdamW {rest}. {choice}"


@functools.cache
def _without_compiler(base: type[Optimizer]) -> type[Any]:
    """The same optimizer with its undecorated step; the decorator is for `differentiable`, which is off here."""
    return type(base.__name__, (base,), {"step": torch.no_grad()(inspect.unwrap(base.step))})


def skip_compiler_in_step(optimizer: Optimizer) -> None:
    """Give a made optimizer the undecorated step too; import the compiler now where a subclass calls torch's step.

    It would be imported in the first step, whose time counts as training.
    """
    kind: type = type(optimizer)
    bases = [base for base in kind.__mro__ if base.__module__.startswith("torch.optim.") and base is not Optimizer]
    if "torch._dynamo" in sys.modules or not bases:
        return
    is_wrapped = "step" in vars(optimizer) or optimizer.defaults.get("differentiable")
    if kind is bases[0] and not is_wrapped:
        optimizer.__class__ = _without_compiler(kind)
        optimizer._patch_step_function()  # adds hooks and profiling to the new step
    else:
        importlib.import_module("torch._dynamo")


def skip_compiler_import(owner: type = Optimizer) -> None:
    """Mark the methods that torch excludes from its compiler as excluded, so that they do not import it."""
    for method in () if "torch._dynamo" in sys.modules else vars(owner).values():
        wrapper = method
        while isinstance(wrapper, FunctionType):
            if wrapper.__code__.co_filename.endswith("_compile.py"):
                plain = inspect.unwrap(wrapper)
                plain.__dict__.setdefault("__dynamo_disable", plain)
            wrapper = getattr(wrapper, "__wrapped__", None)


def start_momentum(optimizer: Optimizer, *, may_skip: bool = False) -> None:
    """Initialise the momentum of torch's fused SGD before a step, without changing the step.

    The fused step initialises it for all parameters or for none: it fails where some get their first gradient later.

    Args:
        optimizer: of any kind, with its gradients.
        may_skip: whether the step may be skipped on overflow, which leaves a new momentum unset.
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
                "its momentum would start from a scaled gradient",
                "leave out fused=True or dampening",
            )
        for parameter in fresh:
            # The first momentum is the gradient, without dampening.
            start = parameter.grad * before if before else torch.zeros_like(parameter)
            optimizer.state[parameter]["momentum_buffer"] = start


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
    "lars": LARS,
    "larc": LARC,
    "lamb": LAMB,
    "novograd": NovoGrad,
    "muon": Muon,
    "schedule-free-adamw": schedule_free_adamw,
}


def make_optimizer(model: nn.Module, settings: schema.Optimizer, factors: Mapping[str, float] = {}) -> Optimizer:
    """The optimizer of the settings, over all trained parameters of a model already on its device.

    `factors` of learning rates are by patterns of parameter names.
    """
    skip_compiler_import()
    base: Any = OPTIMIZERS[settings.optimizer]
    is_free = base is schedule_free_adamw
    base = schedule_free_adamw() if is_free else base
    layerwise = issubclass(base, LayerwiseOptimizer)
    options: dict[str, Any] = {"lr": settings.base_lr, **settings.specific_options()}
    if base is Muon:
        options["betas"] = 0.9, options.pop("beta2")
        lr, adamw_lr = settings.base_lr, options.pop("adamw_lr") or settings.base_lr
        return Muon(muon_groups(model, settings.weight_decay, lr=lr, adamw_lr=adamw_lr, factors=factors), **options)
    if "beta2" in options:
        options["betas"] = options.pop("momentum"), options.pop("beta2")
    if not (layerwise or is_free):
        options["fused"] = all(parameter.is_floating_point() for parameter in model.parameters())
    kind: type[Any] = base if layerwise or is_free else _without_compiler(base)
    groups = parameter_groups(model, settings.weight_decay, layerwise=layerwise, lr=settings.base_lr, factors=factors)
    made: Optimizer = kind(groups, **options)
    if is_free:
        begin_training(made)
    return made
