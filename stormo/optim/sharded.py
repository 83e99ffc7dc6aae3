"""Sharded parameters: moves an optimizer made for whole layers onto the shards of a worker, and scales fp16 losses.

Moving is exact where the step of an element depends on this element alone, or on norms of whole layers.
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
    """Refuse an optimizer whose step on shards may differ from its step on whole layers.

    Accepted are the element-wise optimizers of torch.optim and stormo's layer-wise ones, without hooks. A class
    attribute `elementwise`, True or False, decides for any other.

    Args:
        optimizer: to be checked.
        shares: how the step is shared out, for the message.
        units: what must be stepped independently, for the message.
        instead: what to set instead, for the message.
    """
    declared, name, known = getattr(optimizer, "elementwise", None), type(optimizer).__name__, _is_known(optimizer)
    hooks = [
        f"{method}({getattr(hook, '__name__', type(hook).__name__)})"
        for method, table in (
            ("register_step_pre_hook", optimizer._optimizer_step_pre_hooks),
            ("register_step_post_hook", optimizer._optimizer_step_post_hooks),
        )
        for hook in table.values()
    ]
    if declared or (declared is None and known and not hooks):
        return
    if known and hooks:
        raise SettingError(
            f"the optimizer, {name}, has a hook, {hooks[0]}",
            f"{shares}, and the hook would see that part only",
            f"leave the hook out, or {instead}, or elementwise = True in a subclass if it treats every "
            f"{units} independently",
        )
    raise SettingError(
        f"the optimizer is {name}",
        f"{shares}, and it is not known to step every {units} independently",
        f"{instead}, or elementwise = True in its class if it does",
    )


def steps_elementwise(optimizer: Optimizer) -> bool:
    """Whether its step on shards is that on whole layers, apart from hooks: it is known to be, or declared."""
    declared: bool | None = getattr(optimizer, "elementwise", None)
    return _is_known(optimizer) if declared is None else declared


def _is_known(optimizer: Optimizer) -> bool:
    is_of_torch = any(_is_own(optimizer, kind, ("step", "_init_group")) for kind in _ELEMENTWISE)
    return is_of_torch or _is_own(optimizer, LayerwiseOptimizer, ("step",))


def _is_own(optimizer: Optimizer, kind: type[Optimizer], methods: tuple[str, ...]) -> bool:
    """Whether it has the methods of this class, apart from wrappers of torch and stormo."""
    return isinstance(optimizer, kind) and all(
        _plain(getattr(optimizer, method)) is _plain(getattr(kind, method)) for method in methods
    )


def _plain(method: Callable[..., Any]) -> Any:
    method = inspect.unwrap(method)
    return getattr(method, "__func__", method)


def to_local_params(optimizer: Optimizer, part_of: Mapping[Tensor, Tensor | None]) -> None:
    """Replace every parameter by its shard on this worker, and drop those of which it has none.

    Empty groups stay, so that all workers have the same learning rates.
    """
    if any(not _is_new(optimizer, state) for state in optimizer.state.values()):
        raise SettingError(
            f"the optimizer, {type(optimizer).__name__}, comes with a state",
            "the state is that of whole layers and each worker steps a shard",
            "make it without a state, or set --strategy ddp",
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
    """Whether a state is that of a new optimizer; only Adagrad's constructor makes one, perhaps on the meta device."""
    return not state or (
        isinstance(optimizer, torch.optim.Adagrad) and (state["step"].is_meta or float(state["step"]) == 0)
    )


def _start_of_adagrad(part: Tensor, whole: dict[str, Tensor], group: dict[str, Any]) -> dict[str, Tensor]:
    start = group["initial_accumulator_value"]
    device = part.device if group["fused"] else torch.device("cpu")
    return {
        "step": torch.zeros((), dtype=whole["step"].dtype, device=device),
        "sum": torch.full_like(part, complex(start, start) if part.is_complex() else start),
    }


class ShardedGradScaler(torch.amp.GradScaler):
    """Torch's GradScaler for sharded gradients: all workers skip a step, or none.

    Args:
        device: of the gradients and of the scale.
        all_reduce_max: takes the maximum over the workers, in place.
        options: torch's own, such as `enabled`.
    """

    def __init__(self, device: torch.device, all_reduce_max: Callable[[Tensor], Tensor], **options: Any) -> None:
        super().__init__(device.type, **options)
        self._all_reduce_max = all_reduce_max
        if self.is_enabled():
            # Done by `scale` otherwise, which a worker without a loss never calls.
            self._lazy_init_scale_growth_tracker(device)

    # Both `unscale_` and the step of a fused optimizer look for infinities here.
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        device = found_inf.device
        # Without gradients, `found_inf` is still 0.
        seen = torch.stack([found_inf, *(flag.to(device) for flag in found.values())])
        return {device: self._all_reduce_max(seen.amax(dim=0, keepdim=True))[0]}
