"""Mistakes in what a script hands to its world, each with its mend."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from stormo.errors import SettingError, counted
from stormo.parallel.compression import HALVES
from stormo.script.agreement import Agreement, call_site

if TYPE_CHECKING:
    from stormo.script.stepping import Group


_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")


def late_group(parts: tuple[Any, ...], groups: list[Group]) -> Group | None:
    """Where optimizers, schedulers and loss scalers belong that come without a model; None where it cannot be told."""
    made = [part for part in parts if isinstance(part, Optimizer)]
    moved = [part.optimizer for part in parts if hasattr(part, "optimizer")]
    owners = [
        group
        for group in groups
        if all(any(each is own for own in (*group.optimizers, *made)) for each in moved)
        and all(_is_of(optimizer, group.model) for optimizer in made)
    ]
    return owners[0] if parts and len(owners) == 1 else None


def _is_of(optimizer: Optimizer, model: nn.Module) -> bool:
    return not _strangers(optimizer, {id(parameter) for parameter in model.parameters()})


def _strangers(optimizer: Optimizer, known: set[int]) -> list[Tensor]:
    return [p for settings in optimizer.param_groups for p in settings["params"] if id(p) not in known]


def check_parts(parts: tuple[Any, ...], models: list[nn.Module], group: Group | None) -> None:
    """Refuse what cannot be wrapped."""
    if not models and group is None:
        raise SettingError(
            "world.wrap() was called without a model",
            f"it was given {', '.join(type(part).__name__ for part in parts) or 'nothing'}",
            "pass the model first: world.wrap(model, optimizer)",
        )
    for part in parts:
        wrapper = next((kind.__name__ for kind in type(part).__mro__ if kind.__name__ in _WRAPPERS), None)
        if wrapper is not None:
            raise SettingError(
                f"world.wrap() was given a {wrapper}",
                "that spreads the model and its gradients over devices itself, and they would be summed twice",
                "pass the model without it",
            )
        if not isinstance(part, nn.Module | Optimizer) and not (hasattr(part, "step") and hasattr(part, "state_dict")):
            raise SettingError(
                f"world.wrap() was given a {type(part).__name__}",
                "it is no model, optimizer, scheduler or loss scaler",
                "pass data to world.loader() and leave other objects out",
            )


def check_compress(compress: str, models: list[nn.Module]) -> None:
    """Refuse ways to send gradients that there are not, or where there are none."""
    told = f"world.wrap(…, compress={compress!r}) was called"
    if compress not in ("none", *HALVES):
        why = "a script's gradients travel as they are, or as bf16 or fp16"
        if compress == "powersgd":
            why = "what that keeps back belongs to a checkpoint that stormo train writes and a script does not"
        raise SettingError(told, why, 'set compress="bf16", or leave it out')
    if compress != "none" and not models:
        raise SettingError(told, "gradients are those of a model", "set it where the model is wrapped")


def check_new(model: nn.Module, parts: tuple[Any, ...], groups: list[Group]) -> None:
    """Refuse what was wrapped before: its gradients would be summed twice."""
    known = {id(parameter) for group in groups for parameter in group.model.parameters()}
    num_shared = sum(id(parameter) in known for parameter in model.parameters())
    wrapped = [each for group in groups for each in (*group.optimizers, *group.others)]
    again = next((part for part in parts if any(part is each for each in wrapped)), None)
    if num_shared or again is not None:
        what = counted(num_shared, "parameter") if num_shared else f"a {type(again).__name__}"
        raise SettingError(
            f"world.wrap() was given {what} for the second time",
            "gradients are summed over the workers once",
            "pass models that share parameters, and all that goes with them, in one call",
        )


def check_optimizers(parts: tuple[Any, ...], model: nn.Module) -> None:
    """Refuse an optimizer that moves what was not wrapped with it."""
    known = {id(parameter) for parameter in model.parameters()}
    for optimizer in (part for part in parts if isinstance(part, Optimizer)):
        strangers = _strangers(optimizer, known)
        if strangers:
            raise SettingError(
                f"world.wrap() was given an optimizer with {counted(len(strangers), 'tensor')} not of the model",
                "their gradients would stay different on every worker",
                "make the optimizer from model.parameters(), and pass all models it moves in one call",
            )


def check_loss(loss: Any) -> None:
    """Refuse what is no loss."""
    if not isinstance(loss, Tensor):
        raise SettingError(
            f"world.backward() was given a {type(loss).__name__}", "it needs the loss itself", "pass the loss tensor"
        )
    if loss.numel() != 1:
        raise SettingError(
            f"world.backward() was given a loss of shape {list(loss.shape)}",
            "it must be one number, the mean over this worker's samples",
            "pass loss.mean()",
        )
    if not loss.requires_grad:
        raise SettingError(
            "world.backward() was given a loss without a gradient",
            "it was detached, made under no_grad, or depends on no parameter",
            "compute it from the wrapped model",
        )


def check_reduction(reduction: str | None, count: float | None) -> None:
    """Refuse ways to weigh a loss that there are not, or that exclude each other."""
    if reduction not in (None, "mean", "sum"):
        raise SettingError(
            f"world.backward(reduction={reduction!r}) was called",
            "a loss is the mean or the sum over the samples",
            'set reduction="sum", or leave it out for a mean',
        )
    if reduction == "sum" and count is not None:
        raise SettingError(
            'world.backward(reduction="sum", count=...) was called',
            "a sum is divided by nothing, and count= is what a mean is over",
            "set one of them",
        )


def check_metric(agreement: Agreement, metric: Any) -> None:
    """Refuse, on all workers, a metric for a scheduler that is not the same on all of them."""
    here = math.nan if math.isnan(metric) else float(metric)  # there are many of them, and all say the same
    what = f"scheduler.step in {call_site()}"
    bits = agreement.exchange(what, number=struct.unpack("<q", struct.pack("<d", here))[0]).numbers
    rank = next((rank for rank, number in enumerate(bits) if number != bits[0]), None)
    if rank is not None:
        first, other = (struct.unpack("<d", struct.pack("<q", bits[each]))[0] for each in (0, rank))
        raise SettingError(
            f"the metric passed to {what} is {first:g} on rank 0",
            f"it is {other:g} on rank {rank}, and their rates would part",
            "pass one of all workers' samples, made of what world.sum() gives",
        )
