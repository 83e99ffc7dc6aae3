"""Reads what `Task.metrics` returns: sums over samples, means with their counts, and metrics with a state.

`training/validation.py` adds the sums. The state of a metric (torchmetrics') is gathered here: torchmetrics' own sync
fails where a rank had no batch, and counts ranks that share their samples several times.
"""

from __future__ import annotations

import itertools
import numbers
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.tasks.returned import read_count

COUNT_OF = "count of "  # prefix of the name of a mean: its number of items
_METHODS = ("update", "compute", "reset", "to")
_MOST_PARTS = 1000  # a longer list holds data, not metrics


def is_metric(value: Any) -> bool:
    """Whether a value is a metric with a state: it has update, compute, reset and to."""
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in _METHODS)


def held_metrics(task: Any) -> list[Any]:
    """The metrics among a task's attributes, also in lists, dicts and modules."""
    attributes = {name: value for name, value in vars(task).items() if name != "_datasets"}
    return list(_metrics_in(attributes))


def _metrics_in(value: Any) -> Iterator[Any]:
    if is_metric(value):
        yield value
        return
    parts: Any = ()
    if isinstance(value, nn.Module):
        parts = value.children()
    elif isinstance(value, Mapping) and len(value) <= _MOST_PARTS:
        parts = value.values()
    elif isinstance(value, list | tuple) and len(value) <= _MOST_PARTS:
        parts = value
    for part in parts:
        yield from _metrics_in(part)


def read_metrics(task: Any, returned: Any, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The sums of a batch as float64 scalars and the metric objects, by name; a mistake raises a sentence.

    A mean becomes a sum over its items, and their number another sum, named with `COUNT_OF`.
    """
    said = f"{type(task).__name__}.metrics()"
    if not isinstance(returned, Mapping):
        raise SettingError(
            f"{said} returned a value of type {type(returned).__name__}",
            "each value is reported under its name",
            'return a dict, such as {"loss": loss_sum}',
        )
    sums: dict[str, Tensor] = {}
    objects: dict[str, Any] = {}
    for name, value in returned.items():
        if not isinstance(name, str):
            raise SettingError(
                f"{said} returned a value under the name {name!r}", "a name is a text", f'write "{name}" as its key'
            )
        if is_metric(value):
            objects[name] = value
        elif isinstance(value, tuple) and len(value) == 2:
            count = read_count(f"{said} returned {name!r} as (value, count)", value[1], device)
            mean, count = _sum(f"{said} returned {name!r} as", value[0], device), _scalar(count, device)
            sums[name] = torch.where(count > 0, mean * count, 0.0)  # the mean of nothing is no number
            sums[COUNT_OF + name] = count
        else:
            sums[name] = _sum(f"{said} returned {name!r} as", value, device)
    return sums, objects


def _sum(said: str, value: Any, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        if value.ndim:
            raise SettingError(
                f"{said} a tensor of shape {list(value.shape)}",
                "the sum over the samples of a batch is one number",
                "return its .sum()",
            )
        if not value.is_complex():
            return _scalar(value, device)
    elif isinstance(value, numbers.Real):
        return _scalar(float(value), device)
    kind = f"of type {str(value.dtype) if isinstance(value, Tensor) else type(value).__name__}"
    raise SettingError(
        f"{said} a value {kind}",
        "the sum over the samples of a batch is a real number",
        "return a scalar tensor, a number, (mean, count), or a metric with update(), compute(), reset() and to(), as "
        "torchmetrics has",
    )


def _scalar(value: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(device=device, dtype=torch.float64)
    return torch.tensor(value, dtype=torch.float64, device=device)


def compute(name: str, metric: Any, world: World) -> dict[str, float]:
    """What a metric computes over the batches of all ranks, as numbers by name. All ranks call it."""
    with _all_states(name, metric, world), warnings.catch_warnings():
        # A rank without a batch computes from the states of the others.
        warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
        found = metric.compute()
    return dict(_numbers(name, found, type(metric).__name__))


def _numbers(name: str, value: Any, origin: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _numbers(f"{name}/{key}", part, origin)
    elif isinstance(value, numbers.Real) or (
        isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    ):
        yield name, float(value)
    else:
        kind = f"tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise SettingError(
            f"metrics() returned the metric {origin} as {name!r}",
            f"its compute() gives a {kind}, and a number is reported",
            "let it average (such as average='macro'), or return the sums that are of interest instead",
        )


@contextmanager
def _all_states(name: str, metric: Any, world: World) -> Iterator[None]:
    """Inside, torchmetrics gathers the states of all ranks through `_gather`."""
    if world.size == 1:
        yield
        return
    base: Any = getattr(sys.modules.get("torchmetrics"), "Metric", ())
    parts = [part for part in metric.modules() if isinstance(part, base)] if hasattr(metric, "modules") else []
    if not parts:
        raise SettingError(
            f"metrics() returned an object of type {type(metric).__name__} as {name!r}",
            f"it cannot gather what {world.size} workers have put into it",
            "return sums over the samples, or a metric of torchmetrics",
        )
    asking = {part: part._to_sync for part in parts}
    plain = [part for part in parts if type(part)._sync_dist is base._sync_dist]  # others sync in their own way
    try:
        for part in parts:
            part._to_sync = True
        for part in plain:
            part._sync_dist = partial(_gather, part, world)
        yield
    finally:
        for part, asked in asking.items():
            part._to_sync = asked
        for part in plain:
            del part._sync_dist


def _gather(part: Any, world: World, *_: Any, **__: Any) -> None:
    """Set each state to the reduction of all ranks' states."""
    reductions: dict[str, Any] = part._reductions
    is_list = {name: isinstance(default, list) for name, default in part._defaults.items()}
    own: dict[str, Tensor] = {}
    for index, name in enumerate(reductions):
        state = getattr(part, name)
        if is_list[name]:
            entries = [state] if isinstance(state, Tensor) else state
            own |= {f"{index}/{number}": entry for number, entry in enumerate(entries)}
        else:
            own[str(index)] = state
    payload = safetensors.torch.save({key: tensor.detach().cpu().contiguous().clone() for key, tensor in own.items()})
    gathered = world.gather_bytes(payload)
    every = None
    if gathered is not None:
        every = {
            f"{rank}/{key}": tensor
            for rank, theirs in enumerate(gathered)
            for key, tensor in safetensors.torch.load(theirs).items()
        }
    shared = {key: tensor.to(world.device) for key, tensor in world.broadcast_tensors(every).items()}
    for index, (name, reduction) in enumerate(reductions.items()):
        value: Any
        if is_list[name]:
            value = [tensor for rank in world.samplers for tensor in _entries(shared, f"{rank}/{index}")]
        else:
            # A state may take its shape with the first batch; one without a batch is broadcast to it.
            states = [shared[f"{rank}/{index}"] for rank in world.samplers]
            value = torch.stack(torch.broadcast_tensors(*states))
        setattr(part, name, value if reduction is None else reduction(value))


def _entries(tensors: Mapping[str, Tensor], prefix: str) -> Iterator[Tensor]:
    for number in itertools.count():
        tensor = tensors.get(f"{prefix}/{number}")
        if tensor is None:
            return
        yield tensor
