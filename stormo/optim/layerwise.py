"""What the layer-wise optimizers share: which layers are adapted, and lists of tensors that one kernel takes at once.

A layer is one parameter. A step never waits for the device and never writes to a gradient. 16-bit parameters are
stepped through float32 copies, and their state is float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stormo.errors import SettingError

_HALVES = (torch.float16, torch.bfloat16)
# Lowest value, and the one it stays below; of `betas` each is held against them.
_LIMITS: dict[str, tuple[float, float]] = {
    "lr": (0.0, math.inf),
    "momentum": (0.0, 1.0),
    "betas": (0.0, 1.0),
    "weight_decay": (0.0, math.inf),
    "trust_coefficient": (0.0, math.inf),
    "eps": (0.0, math.inf),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """Layers of one group that are stepped alike: of one device, one dtype, all adapted or none."""

    weights: list[Tensor]  # the parameters, or float32 copies of 16-bit ones
    gradients: list[Tensor]  # in the dtype of the weights; only read
    states: list[dict[str, Any]]  # the optimizer's own
    rate: float | Tensor  # on the device
    decay: float
    is_adapted: bool

    def kept(self, key: str) -> list[Tensor]:
        """A state of every layer that is as large as the layer, zeros at first."""
        for state, weight in zip(self.states, self.weights, strict=True):
            if key not in state:
                state[key] = torch.zeros_like(weight)
        return [state[key] for state in self.states]


class LayerwiseOptimizer(Optimizer):
    """The frame of a step; a subclass computes it for layers that are alike.

    Group key `adapt`: True adapts every parameter of the group, False none, and `weight_decay` holds for all of it.
    None, the default, goes by the shape: parameters of at most one dimension, which are biases and norms, are neither
    adapted nor decayed.
    """

    def _update(self, layers: Layers, group: dict[str, Any]) -> None:
        """Step these layers in place."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose numbers are checked."""
        name, group = type(self).__name__, {**self.defaults, **param_group}
        for key, limits in _LIMITS.items():
            for value in group[key] if key == "betas" and key in group else [group.get(key)]:
                _check(name, key, value, limits)
        if group.get("nesterov") and not group["momentum"]:
            raise SettingError(f"{name} was given nesterov=True", "its momentum is 0", "give it a momentum above 0")
        super().add_param_group(param_group)
        if kinds := {p.dtype for p in self.param_groups[-1]["params"] if not p.is_floating_point()}:
            raise SettingError(
                f"{name} was given parameters of {', '.join(map(str, kinds))}",
                "its norms are those of real numbers",
                "give these to an optimizer of torch.optim, such as AdamW",
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every parameter that has a gradient; return what the closure does, which is called before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameters, layers in self._alike(group):
                self._update(layers, group)
                if layers.weights is not parameters:
                    torch._foreach_copy_(parameters, layers.weights)
        return loss

    def _alike(self, group: dict[str, Any]) -> Iterator[tuple[list[Tensor], Layers]]:
        adapt = group["adapt"]
        found: dict[tuple[torch.device, torch.dtype, bool], list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                is_adapted = parameter.ndim > 1 if adapt is None else adapt
                found.setdefault((parameter.device, parameter.dtype, is_adapted), []).append(parameter)
        for (device, dtype, is_adapted), parameters in found.items():
            wide, rate = torch.float32 if dtype in _HALVES else dtype, group["lr"]
            if isinstance(rate, Tensor):
                rate = rate.to(device, wide, non_blocking=True)
            yield (
                parameters,
                Layers(
                    weights=parameters if wide == dtype else [parameter.to(wide) for parameter in parameters],
                    gradients=[self._dense(parameter).to(wide) for parameter in parameters],
                    states=[self.state[parameter] for parameter in parameters],
                    rate=rate,
                    decay=group["weight_decay"] if is_adapted or adapt is not None else 0.0,
                    is_adapted=is_adapted,
                ),
            )

    def _dense(self, parameter: Tensor) -> Tensor:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout != torch.strided:
            raise SettingError(
                f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient",
                f"{type(self).__name__} takes the norm and the momentum of the whole layer",
                "make the embedding with sparse=False",
            )
        return gradient

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, each tensor in the dtype in which it was saved, counts of steps in host memory."""
        last: dict[str, Any] = {}
        hook = self.register_load_state_dict_pre_hook(lambda _, state: last.update(state))  # after all the others
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        # torch has cast the state to the dtype of the parameter, which may be 16 bits.
        numbers = chain.from_iterable(group["params"] for group in last["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            for key, value in last["state"].get(number, {}).items():
                place = torch.device("cpu") if key == "step" else parameter.device
                own = self.state[parameter][key]
                if isinstance(value, Tensor) and (own.dtype, own.device) != (value.dtype, place):
                    self.state[parameter][key] = value.to(place, copy=True)


def norms(tensors: list[Tensor]) -> Tensor:
    """The 2-norm of each, as one vector on their device."""
    return torch.stack(torch._foreach_norm(tensors))


def multiply(tensors: list[Tensor], by: float | Tensor) -> None:
    """Multiply all in place, by one number or each by its own of a vector, which never leaves the device."""
    factors: Any = list(by.unbind()) if isinstance(by, Tensor) and by.ndim else by
    torch._foreach_mul_(tensors, factors)


def host_numbers(vector: Tensor) -> Any:
    """The numbers of a vector in host memory, for one kernel over all layers; a compiler traces them as tensors."""
    return list(vector.unbind()) if torch.compiler.is_compiling() else vector.tolist()


def _check(name: str, key: str, value: Any, limits: tuple[float, float]) -> None:
    low, high = limits
    if isinstance(value, Tensor):  # not read, as it may lie on a device
        if value.ndim:
            raise SettingError(
                f"{name} was given {key} of shape {tuple(value.shape)}", "it is one number", "give a 0-dim tensor"
            )
    elif value is not None and not low <= value < high:
        span = f"in [{low:g}, {high:g})" if math.isfinite(high) else f"at least {low:g} and finite"
        raise SettingError(f"{name} was given {key} {value:g}", f"it must be {span}", f"give another {key}")
