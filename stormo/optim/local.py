"""An optimizer made for whole layers, moved onto the parts of them that this worker holds.

That is exact where the step of an element depends on this element alone, or goes by norms of whole layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stormo.errors import SettingError
from stormo.optim.layerwise import LayerwiseOptimizer

_ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.ASGD,
    torch.optim.Rprop,
)


def check_elementwise(
    optimizer: Optimizer,
    shares: str = "workers would each step a part of a layer",
    units: str = "element",
    instead: str = "set --strategy ddp",
) -> None:
    """Refuse an optimizer whose step on parts of layers may be another than on whole ones.

    Known are the steps of torch.optim that take every element by itself, and stormo's layer-wise ones, without hooks.
    Whose class has an attribute `elementwise`, True or False, is taken at its word.

    Args:
        optimizer: to be looked at.
        shares: how the step is shared out, in words.
        units: what must be stepped by itself, in a word.
        instead: what to set instead.
    """
    said, name = getattr(optimizer, "elementwise", None), type(optimizer).__name__
    known = any(_is_own(optimizer, kind, ("step", "_init_group")) for kind in _ELEMENTWISE) or _is_own(
        optimizer, LayerwiseOptimizer, ("step",)
    )
    hooks = [
        f"{method}({getattr(hook, '__name__', type(hook).__name__)})"
        for method, table in (
            ("register_step_pre_hook", optimizer._optimizer_step_pre_hooks),
            ("register_step_post_hook", optimizer._optimizer_step_post_hooks),
        )
        for hook in table.values()
    ]
    if said or (said is None and known and not hooks):
        return
    if known and hooks:
        raise SettingError(
            f"the optimizer, {name}, has a hook, {hooks[0]}",
            f"{shares}, and the hook would see that part alone",
            f"leave the hook out, or {instead}, or elementwise = True in a class of your own if it treats every "
            f"{units} by itself",
        )
    raise SettingError(
        f"the optimizer is {name}",
        f"{shares}, and it is not known to step every {units} by itself",
        f"{instead}, or elementwise = True in its class if it does",
    )


def _is_own(optimizer: Optimizer, kind: type[Optimizer], methods: tuple[str, ...]) -> bool:
    """Whether it steps as this class does, whatever torch and stormo have wrapped around it."""
    return isinstance(optimizer, kind) and all(
        _plain(getattr(optimizer, method)) is _plain(getattr(kind, method)) for method in methods
    )


def _plain(method: Callable[..., Any]) -> Any:
    method = inspect.unwrap(method)
    return getattr(method, "__func__", method)


def to_local_params(optimizer: Optimizer, part_of: Mapping[Tensor, Tensor | None]) -> None:
    """Replace every parameter by its part on this worker, and drop those of which it has none.

    Groups stay, even empty ones, so that the learning rates line up on all workers.
    """
    if any(not _is_new(optimizer, state) for state in optimizer.state.values()):
        raise SettingError(
            f"the optimizer, {type(optimizer).__name__}, comes with a state",
            "this belongs to whole layers, of which workers would each step a part",
            "make it anew, or set --strategy ddp",
        )
    starts = dict(optimizer.state)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        held = [index for index, whole in enumerate(group["params"]) if part_of[whole] is not None]
        wholes, group["params"] = group["params"], []
        for index in held:
            part = part_of[wholes[index]]
            assert part is not None
            group["params"].append(part)
            if starts.get(wholes[index]):
                optimizer.state[part] = _start_of_adagrad(part, starts[wholes[index]], group)
        if "param_names" in group:
            group["param_names"] = [group["param_names"][index] for index in held]


def _is_new(optimizer: Optimizer, state: dict[str, Any]) -> bool:
    """Whether it is what the constructor leaves; only Adagrad's leaves anything, perhaps on no device."""
    return not state or (
        isinstance(optimizer, torch.optim.Adagrad) and (state["step"].is_meta or float(state["step"]) == 0)
    )


def _start_of_adagrad(part: Tensor, whole: dict[str, Tensor], group: dict[str, Any]) -> dict[str, Tensor]:
    start = group["initial_accumulator_value"]
    place = part.device if group["fused"] else torch.device("cpu")
    return {
        "step": torch.zeros((), dtype=whole["step"].dtype, device=place),
        "sum": torch.full_like(part, complex(start, start) if part.is_complex() else start),
    }
