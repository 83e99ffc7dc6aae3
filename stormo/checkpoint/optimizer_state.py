"""An optimizer's state as named tensors, and back.

Names are `parameter|key` for a tensor, `parameter|key=number` and `parameter|key=none` for a Python number and
None, and `parameter|` for a parameter without state, so that a missing parameter can be told from one never
stepped. The hyper-parameters of the groups are not stored: the plan of the run sets them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stormo.errors import StormoError, counted

Names = Mapping[Tensor, str] | Sequence[str]

# Scalars that torch's optimizers keep in host memory, unless the step runs inside a kernel or a graph.
_HOST_SCALARS = frozenset({"step", "mu_product"})
# States of one value for each of the parameter's.
_LIKE_PARAMETER = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg"})


class OptimizerStateError(StormoError):
    """The state does not fit the optimizer, or cannot be stored."""


def flatten_optimizer(optimizer: Optimizer, names: Names) -> dict[str, Tensor]:
    """The state of every parameter as named tensors, which still share the optimizer's memory.

    Args:
        optimizer: one whose state values are tensors, numbers or None.
        names: parameter to name, or the names in the order of the optimizer's parameter groups.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter, _ in _named_parameters(optimizer, names):
        # Not `optimizer.state[parameter]`: that would create an empty entry.
        state: dict[Any, Any] = optimizer.state.get(parameter, {})
        if not state:
            tensors[f"{name}|"] = torch.empty(0, dtype=torch.uint8)
        for key, value in state.items():
            if not isinstance(key, str) or not key or "|" in key or "=" in key:
                raise OptimizerStateError(f"The state of {name} has the key {key!r}, which cannot be stored as a name.")
            if isinstance(value, Tensor):
                tensors[f"{name}|{key}"] = value.detach()
            elif isinstance(value, bool | int | float):
                tensors[f"{name}|{key}=number"] = _number_tensor(value)
            elif value is None:
                tensors[f"{name}|{key}=none"] = torch.empty(0, dtype=torch.uint8)
            else:
                raise OptimizerStateError(
                    f"The state {key!r} of {name} is a {type(value).__name__}; "
                    f"{type(optimizer).__name__} cannot be checkpointed, only tensors, numbers and None can be stored."
                )
    return tensors


@torch.no_grad()
def restore_optimizer(optimizer: Optimizer, names: Names, tensors: Mapping[str, Tensor]) -> None:
    """Replace the optimizer's state by copies of `tensors`, in their dtype and on the device the optimizer expects.

    Nothing is changed when the names do not fit.
    """
    stored = _stored_by_parameter(tensors)
    parameters = list(_named_parameters(optimizer, names))
    known = {name for name, _, _ in parameters}
    if unknown := sorted(set(stored) - known):
        raise OptimizerStateError(f"The stored optimizer state is for {_listed(unknown)}, which this optimizer lacks.")
    if missing := sorted(known - set(stored)):
        raise OptimizerStateError(f"The stored optimizer state has nothing for {_listed(missing)}.")
    for name, parameter, group in parameters:
        state: dict[str, Any] = {}
        for key, kind, tensor in stored[name]:
            if kind == "number":
                state[key] = tensor.item()
            elif kind == "none":
                state[key] = None
            elif key:
                if key in _LIKE_PARAMETER and tensor.dim() and tensor.shape != parameter.shape:
                    raise OptimizerStateError(
                        f"The stored {key} of {name} has shape {list(tensor.shape)}, and the parameter "
                        f"{list(parameter.shape)}."
                    )
                state[key] = _placed(tensor, key, parameter, group)
        if state:
            optimizer.state[parameter] = state
        else:
            optimizer.state.pop(parameter, None)


def _named_parameters(optimizer: Optimizer, names: Names) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """Name, parameter and its group, in the order of the groups; each name once."""
    pairs = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    has = f"the optimizer has {counted(len(pairs), 'parameter')}"
    if isinstance(names, Mapping):
        if num_unnamed := sum(parameter not in names for parameter, _ in pairs):
            raise OptimizerStateError(f"{has}, but no name was given for {num_unnamed}.")
        ordered = [names[parameter] for parameter, _ in pairs]
    else:
        if len(names) != len(pairs):
            raise OptimizerStateError(f"{has}, but {counted(len(names), 'name')} came.")
        ordered = list(names)
    if len(set(ordered)) != len(ordered):
        raise OptimizerStateError(
            f"Two parameters have one name: {_listed(sorted({n for n in ordered if ordered.count(n) > 1}))}."
        )
    for name, (parameter, group) in zip(ordered, pairs, strict=True):
        yield name, parameter, group


def _stored_by_parameter(tensors: Mapping[str, Tensor]) -> dict[str, list[tuple[str, str, Tensor]]]:
    """Parameter name to its (key, kind, tensor)."""
    stored: dict[str, list[tuple[str, str, Tensor]]] = {}
    for full_name, tensor in tensors.items():
        # From the right: a state key never contains the separator, a parameter's name may.
        name, separator, tail = full_name.rpartition("|")
        key, _, kind = tail.partition("=")
        if not separator or kind not in ("", "number", "none") or (kind and not key):
            raise OptimizerStateError(f"The stored optimizer state {full_name!r} is not named parameter|key.")
        stored.setdefault(name, []).append((key, kind, tensor))
    return stored


def _number_tensor(value: float) -> Tensor:
    # The dtype tells the type when it is read back; int64 keeps counts above 2**53 exact.
    if isinstance(value, bool):
        return torch.tensor(value, dtype=torch.bool)
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)


def _placed(tensor: Tensor, key: str, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    """A copy where the optimizer expects it, with the parameter's strides where the shapes agree."""
    on_device = bool(group.get("fused") or group.get("capturable"))
    if tensor.dim() == 0 and key in _HOST_SCALARS and not on_device:
        return tensor.to("cpu", copy=True)
    if tensor.shape == parameter.shape:
        # The multi-tensor kernels take their fast path only when state and parameter are laid out alike.
        return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
    return tensor.to(parameter.device, copy=True)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
