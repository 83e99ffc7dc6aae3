"""Whether the loss of a batch follows from those of its parts, as a step of several workers or passes takes it to.

The loss of a first batch is compared with those of two parts of it. A mean over tokens, a sum, or a loss of the batch
as a whole would train to another result on every number of workers, without a word.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stormo.data.batches import batch_length, cut
from stormo.data.loaders import Batch
from stormo.errors import SettingError, counted
from stormo.pipeline.trial import trial
from stormo.strategies.strategy import Strategy
from stormo.tasks.measured import held_metrics
from stormo.tasks.task import Task

# How far rounding may take a loss, as a share of it.
_TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "tf32": 5e-3}
_HALF_TOLERANCE = 2e-2


@dataclass(frozen=True, slots=True)
class _Found:
    """A batch whose loss does not follow from its parts."""

    is_sum: bool
    is_mean: bool
    is_counted: bool
    losses: Sequence[float]  # of the whole and of both parts
    num_samples: Sequence[int]  # of both parts


def check_parts(strategy: Strategy, batch: Batch | None, num_passes: int) -> None:
    """Refuse, on all workers alike, a loss whose result would depend on their number. All workers call it.

    Args:
        strategy: holds the task and the model.
        batch: a pass of this worker, as the task gets it.
        num_passes: into which a step of a worker is cut at most.
    """
    task, plan = strategy.task, strategy._plan
    is_own = strategy.steps_alone or strategy.staleness > 0  # each worker's gradient is stepped with by itself
    num_parts = (1 if is_own else strategy.world.data.size) * num_passes * plan.micro_batches
    if num_parts == 1:
        return
    if task.loss_reduction == "local":
        strategy.notices.append(
            f'{type(task).__name__}.loss_reduction is "local": a step is the mean of the losses of '
            f"{counted(num_parts, 'part')}, and another number of workers or passes gives another result."
        )
        return
    parts = _parts(batch) if batch is not None and not _has_batch_statistics(strategy.module) else None
    can = torch.tensor([float(parts is not None)])
    # Workers of a model that is spread call it equally often: all of them look, or none.
    if strategy.is_spread and strategy.world.max(1 - can).item():
        parts = None
    found = None if parts is None else _look(strategy, *parts)
    told = strategy.world.gather_json(None if found is None else [getattr(found, name) for name in _Found.__slots__])
    first = strategy.world.share_json(next((each for each in told or [] if each is not None), None))
    if first is not None:
        raise _refusal(task, _Found(*first), num_parts)


def _parts(batch: Batch) -> tuple[Any, Any, Any] | None:
    """A batch and two unequal parts of it; None where it cannot be cut."""
    try:
        length = batch_length(batch.data)
        if batch.is_ghost or length < 2 or length != batch.span.num_samples:
            return None
        at = max(1, length // 3)
        return batch.data, cut(batch.data, 0, at), cut(batch.data, at, length)
    except SettingError:
        return None


def _has_batch_statistics(module: nn.Module) -> bool:
    """Whether a layer takes the statistics of its batch in a validation too."""
    return any(
        isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is None for layer in module.modules()
    )


def _look(strategy: Strategy, whole: Any, first: Any, second: Any) -> _Found | None:
    model, task = strategy.validated, strategy.task
    with trial([strategy.module], strategy.world.device), _task_kept(task), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.eval()
        # All of them, also after one has failed: others may wait in the model.
        seen = [_value(strategy, model, data) for data in (whole, whole, first, second)]
    if any(value is None for value in seen):
        return None
    (total, count), (again, _), (a, count_a), (b, count_b) = (value for value in seen if value is not None)
    tolerance = _TOLERANCE.get(strategy._plan.precision, _HALF_TOLERANCE)
    if not math.isfinite(total) or not _close(total, again, tolerance):
        return None
    sizes = batch_length(first), batch_length(second)
    by = sizes if count is None else (count_a or 0.0, count_b or 0.0)
    mean = _mean((a, b), by)
    expected = a + b if task.loss_reduction == "sum" else mean
    if _close(total, expected, tolerance, a, b) or (count is not None and not count):
        return None
    return _Found(
        is_sum=_close(total, a + b, tolerance, a, b),
        is_mean=_close(total, mean, tolerance, a, b),
        is_counted=count is not None,
        losses=(total, a, b),
        num_samples=sizes,
    )


def _mean(losses: tuple[float, float], weights: tuple[float, float]) -> float:
    pairs = [(loss, weight) for loss, weight in zip(losses, weights, strict=True) if weight]
    return sum(loss * weight for loss, weight in pairs) / (sum(weights) or 1.0)


def _close(value: float, other: float, tolerance: float, *beside: float) -> bool:
    size = max(abs(number) for number in (value, other, *beside) if math.isfinite(number))
    return abs(value - other) <= tolerance * size + 1e-30


def _value(strategy: Strategy, model: nn.Module, data: Any) -> tuple[float, float | None] | None:
    """The loss and its count; None where there is none to be had."""
    try:
        with torch.no_grad(), strategy.autocast():
            returned: Any = strategy.task.loss(model, data)
        if isinstance(returned, tuple):
            loss, count = returned
            return float(loss), float(count)
        return float(returned), None
    except Exception:
        return None  # a task may take whole batches only, or give no loss in a validation


@contextmanager
def _task_kept(task: Task) -> Iterator[None]:
    """Afterwards the task has what it had: numbers, small containers, tensors, metrics and buffers of its modules."""
    attributes = {name: value for name, value in vars(task).items() if name != "_datasets"}
    contents = {name: _copied(value) for name, value in attributes.items()}
    metrics = [(metric, copy.deepcopy(metric.__dict__)) for metric in held_metrics(task)]
    modules = [value for value in attributes.values() if isinstance(value, nn.Module)]
    buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    try:
        yield
    finally:
        for name in [name for name in vars(task) if name not in attributes and name != "_datasets"]:
            delattr(task, name)
        for name, value in attributes.items():
            setattr(task, name, value)
            _put_back(value, contents[name])
        for metric, state in metrics:
            metric.__dict__.update(state)
        for buffer, before in buffers:
            buffer.copy_(before)


def _copied(value: Any) -> Any:
    """What a container or a tensor holds; None for others, which are not looked into."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, list | dict | set | deque) else None


def _put_back(value: Any, content: Any) -> None:
    if isinstance(value, Tensor):
        with torch.no_grad():
            value.copy_(content)
    elif isinstance(value, list):
        value[:] = content
    elif isinstance(value, dict | set):
        value.clear()
        value.update(content)
    elif isinstance(value, deque):
        value.clear()
        value.extend(content)


def _refusal(task: Task, found: _Found, num_parts: int) -> SettingError:
    name = type(task).__name__
    whole, a, b = (f"{loss:.6g}" for loss in found.losses)
    first, second = found.num_samples
    said = f"{name}.loss() gave {whole} for {first + second} samples, and {a} and {b} for {first} and {second} of them"
    cut_in = f"a step is cut into {counted(num_parts, 'part')}"
    local = (
        f'set loss_reduction = "local" in {name} for a loss of the batch as a whole, whose result depends on the '
        "number of workers"
    )
    if task.loss_reduction == "sum" and found.is_mean:
        return SettingError(said, "it is a mean, but loss_reduction is 'sum'", "leave loss_reduction out")
    if task.loss_reduction == "sum":
        return SettingError(
            said, f"it is no sum over samples, and {cut_in}", f"return the sum over the samples alone, or {local}"
        )
    if found.is_sum:
        return SettingError(
            said,
            f"it is a sum, {cut_in}, and each counts as a mean",
            f'return a mean, or set loss_reduction = "sum" in {name}',
        )
    count = "its count is not that of the items it is a mean of" if found.is_counted else "it is no mean over samples"
    return SettingError(
        said,
        f"{count}, and {cut_in}",
        "return (loss, count) with the number of items that it is a mean of (tokens, pixels that are not masked), or "
        + local,
    )
