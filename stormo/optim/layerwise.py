"""What the layer-wise optimizers share: which layers are adapted, and one kernel for lists of tensors.

A layer is one parameter. A step never waits for the device and never writes to a gradient. 16-bit parameters are
stepped through float32 copies, and their state is float32. Where workers hold shards of layers, a step has two parts:
before and after the norms of whole layers are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from stormo.errors import SettingError
from stormo.optim.global_norms import squares_of

_HALVES = (torch.float16, torch.bfloat16)
# Minimum (inclusive) and maximum (exclusive); for `betas`, of each.
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
    """Layers of one group that are stepped together: of one device and dtype, all adapted or none."""

    parameters: list[Tensor]  # none is empty
    group: dict[str, Any]
    weights: list[Tensor]  # the parameters, or float32 copies of 16-bit ones
    gradients: list[Tensor]  # in the dtype of the weights; only read
    states: list[dict[str, Any]]  # the optimizer's own
    lr: float | Tensor  # on the device
    decay: float
    is_adapted: bool
    has_gradient: bool

    def state_of(self, key: str) -> list[Tensor]:
        """A state of every layer in the layer's shape, initially zeros."""
        for state, weight in zip(self.states, self.weights, strict=True):
            if key not in state:
                state[key] = torch.zeros_like(weight)
        return [state[key] for state in self.states]

    def write_back(self) -> None:
        """Round the float32 copies to 16 bits."""
        if self.weights is not self.parameters:
            torch._foreach_copy_(self.parameters, self.weights)


Begun = tuple[Layers, tuple[list[Tensor], ...], Sequence[Tensor]]  # with what `_begin` returns, and its norms


class LayerwiseOptimizer(Optimizer):
    """The base class; a subclass computes the step of layers of one kind.

    Group key `adapt`: True adapts every parameter of the group, False none, and `weight_decay` holds for all of them.
    None, the default, goes by the shape: parameters of at most one dimension, which are biases and norms, are neither
    adapted nor decayed.

    Where the parameters are shards of layers, `global_squares` is set. It is called once a step on every worker, with
    the parameters that are stepped and sums over their elements, [rows, parameters] in float64, and returns the same
    sums over the whole layers. The last row counts the shards with a gradient: a layer is stepped if any of its shards
    has one, and a shard without one has zeros. Empty shards are left out.
    """

    num_norms: ClassVar[int]  # of a layer, that its step needs
    global_squares: Callable[[list[Tensor], Tensor], Tensor] | None = None

    def __init__(self, params: ParamsT, **defaults: Any) -> None:
        super().__init__(params, defaults)

    def _begin(self, layers: Layers) -> tuple[list[Tensor], ...]:
        """Do all that needs no norm, with the weights untouched; return the `num_norms` lists that are to be measured.

        Each list has one tensor a layer. What is returned for layers that are not adapted is not measured.
        """
        raise NotImplementedError

    def _end(self, layers: Layers, begun: tuple[list[Tensor], ...], norms: Sequence[Tensor]) -> None:
        """Step the weights in place by what `_begin` has returned, with a vector of norms for each list of it."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group after checking its numbers."""
        name, group = type(self).__name__, {**self.defaults, **param_group}
        for key, limits in _LIMITS.items():
            for value in group[key] if key == "betas" and key in group else [group.get(key)]:
                _check(name, key, value, limits)
        if group.get("nesterov") and not group["momentum"]:
            raise SettingError(f"{name} was given nesterov=True", "its momentum is 0", "give it a momentum above 0")
        super().add_param_group(param_group)
        if kinds := {p.dtype for p in self.param_groups[-1]["params"] if not p.is_floating_point()}:
            self.param_groups.pop()
            raise SettingError(
                f"{name} was given parameters of {', '.join(map(str, kinds))}",
                "its norms are those of real numbers",
                "give these to an optimizer of torch.optim, such as AdamW",
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every parameter that has a gradient; return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.global_squares is None:
            for layers in self._alike():
                begun = self._begin(layers)
                self._finish([(layers, begun, [norms(tensors) for tensors in begun] if layers.is_adapted else ())])
        else:
            self._step_shards(self.global_squares)
        return loss

    def _step_shards(self, global_squares: Callable[[list[Tensor], Tensor], Tensor]) -> None:
        sets = [*self._alike(), *self._without_gradient()]
        begun = [self._begin(layers) for layers in sets]
        widths = [len(layers.parameters) for layers in sets]
        device = sets[0].weights[0].device if sets else None
        own = torch.zeros(self.num_norms + 1, sum(widths), dtype=torch.float64, device=device)
        for layers, tensors, columns in zip(sets, begun, own.split(widths, dim=1), strict=True):
            if layers.is_adapted:
                for row, measured in zip(columns[:-1], tensors, strict=True):
                    row.copy_(squares_of(measured))
            columns[-1].fill_(float(layers.has_gradient))
        whole = global_squares([parameter for layers in sets for parameter in layers.parameters], own)
        ready: list[Begun] = []
        for layers, tensors, columns in zip(sets, begun, whole.split(widths, dim=1), strict=True):
            if not layers.has_gradient:
                if not columns[-1].item():  # nor has any other shard
                    continue
                self.state[layers.parameters[0]] = layers.states[0]
            lengths = columns[:-1].sqrt().to(layers.weights[0])
            ready.append((layers, tensors, list(lengths) if layers.is_adapted else ()))
        self._finish(ready)

    def _finish(self, ready: Sequence[Begun]) -> None:
        """Step what `_begin` has prepared. Workers with shards call it once a step, for the same layers."""
        for layers, begun, lengths in ready:
            self._end(layers, begun, lengths)
            layers.write_back()

    def _alike(self) -> Iterator[Layers]:
        """All parameters with a gradient, except empty ones."""
        for group in self.param_groups:
            found: dict[tuple[torch.device, torch.dtype, bool], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel():
                    kind = parameter.device, parameter.dtype, _is_adapted(parameter, group)
                    found.setdefault(kind, []).append(parameter)
            for parameters in found.values():
                gradients = [self._dense(parameter) for parameter in parameters]
                yield _layers(group, parameters, gradients, [self.state[parameter] for parameter in parameters])

    def _without_gradient(self) -> Iterator[Layers]:
        """The other parameters, one at a time, with zeros for a gradient and a copy of the state."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None and parameter.numel():
                    state = {key: value.clone() for key, value in self.state.get(parameter, {}).items()}
                    gradients = [torch.zeros_like(parameter)]
                    yield _layers(group, [parameter], gradients, [state], has_gradient=False)

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
        """Load a state, each tensor in the dtype in which it was saved, step counts in host memory."""
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
                device = torch.device("cpu") if key == "step" else parameter.device
                own = self.state[parameter][key]
                if isinstance(value, Tensor) and (own.dtype, own.device) != (value.dtype, device):
                    self.state[parameter][key] = value.to(device, copy=True)


def _layers(
    group: dict[str, Any],
    parameters: list[Tensor],
    gradients: list[Tensor],
    states: list[dict[str, Any]],
    *,
    has_gradient: bool = True,
) -> Layers:
    device, dtype, is_adapted = parameters[0].device, parameters[0].dtype, _is_adapted(parameters[0], group)
    wide, lr = torch.float32 if dtype in _HALVES else dtype, group["lr"]
    return Layers(
        parameters=parameters,
        group=group,
        weights=parameters if wide == dtype else [parameter.to(wide) for parameter in parameters],
        gradients=[gradient.to(wide) for gradient in gradients],
        states=states,
        lr=lr.to(device, wide, non_blocking=True) if isinstance(lr, Tensor) else lr,
        decay=group["weight_decay"] if is_adapted or group["adapt"] is not None else 0.0,
        is_adapted=is_adapted,
        has_gradient=has_gradient,
    )


def _is_adapted(parameter: Tensor, group: dict[str, Any]) -> bool:
    return bool(parameter.ndim > 1 if group["adapt"] is None else group["adapt"])


def norms(tensors: list[Tensor]) -> Tensor:
    """The 2-norm of each tensor, as a vector on their device."""
    return torch.stack(torch._foreach_norm(tensors))


def multiply(tensors: list[Tensor], by: float | Tensor) -> None:
    """Multiply all in place by one number, or each by its element of a vector, which never leaves the device."""
    factors: Any = list(by.unbind()) if isinstance(by, Tensor) and by.ndim else by
    torch._foreach_mul_(tensors, factors)


def host_numbers(vector: Tensor) -> Any:
    """A vector in host memory as numbers, for one kernel over all layers; a compiler traces them as tensors."""
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
