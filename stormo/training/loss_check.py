"""Checks that the loss of a batch follows from the losses of its parts, as several workers or micro-batches assume.

The loss of the first batch is compared with those of two parts of it. A mean over tokens, a sum, or a loss of the batch
as a whole would silently train to another result on every number of workers. The same batch in another order, and one
sample in batches of different sizes, show how large rounding is.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stormo.data.batches import batch_length, cut, rotated, tensors_in
from stormo.data.loaders import Batch
from stormo.errors import SettingError, pluralize
from stormo.parallel.base import Strategy, no_cudnn_benchmark
from stormo.parallel.compression import HALF_DTYPES
from stormo.parallel.meta_init import no_side_effects
from stormo.tasks.metrics import held_metrics
from stormo.tasks.task import Task

# The relative rounding error of a loss, by dtype.
_ROUNDING = {torch.float64: 1e-11, torch.float32: 1e-5}
_HALF_ROUNDING = 2e-2
_MAX_SAMPLES = 32  # that are compared: more take time, and their parts are more alike
_MAX_BYTES = 2**20  # of a tensor of the task that is restored
_MAX_ROUNDING = 0.05  # a larger relative difference is not rounding


@dataclass(frozen=True, slots=True)
class _Mismatch:
    """A loss that does not follow from its parts."""

    is_sum: bool
    is_mean: bool
    is_counted: bool
    losses: Sequence[float]  # of the batch and of both parts
    num_samples: Sequence[int]  # of both parts


def check_loss_parts(strategy: Strategy, batch: Batch | None, num_micro_batches: int) -> None:
    """Refuse a loss whose result would depend on the number of ranks or micro-batches. All ranks call it."""
    task, plan = strategy.task, strategy._plan
    steps_locally = strategy.local_updates or strategy.staleness > 0  # each rank's gradient makes its own step
    num_parts = (1 if steps_locally else strategy.world.data.size) * num_micro_batches * plan.micro_batches
    if num_parts == 1:
        return
    if task.loss_reduction == "local":
        strategy.notices.append(
            f'{type(task).__name__}.loss_reduction is "local": a step is the mean of the losses of '
            f"{pluralize(num_parts, 'part')}, and another number of workers or micro-batches gives another result."
        )
        return
    parts = None if batch is None else _parts(batch)
    # Ranks of a sharded model must call it equally often: all of them check, or none.
    if strategy.is_sharded and strategy.world.any(parts is None):
        parts = None
    found = None if parts is None else _find(strategy, *parts)
    first = strategy.world.first_object(None if found is None else asdict(found))
    if first is not None:
        raise _refusal(task, _Mismatch(**first), num_parts)


def _parts(batch: Batch) -> tuple[Any, ...] | None:
    """Samples of a batch, the same in another order, and three splits in two parts; None if it cannot be split."""
    try:
        length = batch_length(batch.data)
        if batch.is_padding or length < 2 or length != batch.span.num_samples:
            return None
        length = min(length, _MAX_SAMPLES)
        data = cut(batch.data, 0, length)
        # Several splits, as two parts may be alike by chance.
        cuts = (max(1, length // 3), length // 2, 1)
        pairs = ((cut(data, 0, at), cut(data, at, length)) for at in cuts)
        return data, rotated(data, cuts[0]), *itertools.chain(*pairs)
    except SettingError:
        return None


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """The loss of one batch."""

    num_samples: int
    loss: float
    count: float | None
    rounding: float  # of a number of the loss's type
    rows: tuple[Tensor, Tensor] | None  # the first and the last of what the model returned


def _find(strategy: Strategy, *batches: Any) -> _Mismatch | None:
    model, task = strategy.validated, strategy.task
    without_trace = no_side_effects([strategy.module], strategy.world.device)
    with without_trace, _task_restored(task), _exact(strategy), no_cudnn_benchmark():
        model.eval()
        # All of them, even after one has failed: other ranks may wait in the model.
        evaluated = [_evaluate(strategy, model, data) for data in batches]
    whole, again, *parts = evaluated
    if whole is None or again is None:
        return None
    noise = abs(whole.loss - again.loss)
    is_random = not noise <= _MAX_ROUNDING * max(abs(whole.loss), abs(again.loss))  # or not a number
    if is_random or (whole.count is not None and not whole.count):
        return None
    for first, second in zip(parts[::2], parts[1::2], strict=True):
        found = _compared(task, noise, whole, first, second) if first is not None and second is not None else None
        if found is not None:
            return found
    return None


def _compared(
    task: Task, noise: float, whole: _Evaluation, first: _Evaluation, second: _Evaluation
) -> _Mismatch | None:
    losses = whole.loss, first.loss, second.loss
    drift = _drift(whole, first, second)
    size = max(abs(loss) for loss in losses if math.isfinite(loss))
    slack = size * max(whole.rounding, 10 * drift) + 10 * noise + 1e-30
    sizes = first.num_samples, second.num_samples
    by = sizes if whole.count is None else (first.count or 0.0, second.count or 0.0)
    off_mean, off_sum = abs(whole.loss - _mean(losses[1:], by)), abs(whole.loss - (first.loss + second.loss))
    if drift > _MAX_ROUNDING or (off_sum if task.loss_reduction == "sum" else off_mean) <= slack:
        return None
    return _Mismatch(
        # Beside a part whose loss is 0, such as a masked one, a mean looks like a sum.
        is_sum=off_sum <= slack < min(abs(first.loss), abs(second.loss)),
        is_mean=off_mean <= slack,
        is_counted=whole.count is not None,
        losses=losses,
        num_samples=sizes,
    )


def _drift(whole: _Evaluation, first: _Evaluation, second: _Evaluation) -> float:
    """The relative change of a sample's output with the rest of its batch, where that is known."""
    if whole.rows is None or first.rows is None or second.rows is None:
        return 0.0
    size = max(float(row.abs().max()) for row in whole.rows)
    pairs = ((whole.rows[0], first.rows[0]), (whole.rows[1], second.rows[1]))
    if not size or any(a.shape != b.shape for a, b in pairs):
        return 0.0
    return max(float((a - b).abs().max()) for a, b in pairs) / size


def _mean(losses: Sequence[float], weights: Sequence[float]) -> float:
    pairs = [(loss, weight) for loss, weight in zip(losses, weights, strict=True) if weight]
    return sum(loss * weight for loss, weight in pairs) / (sum(weights) or 1.0)


@contextmanager
def _exact(strategy: Strategy) -> Iterator[None]:
    """Compute in the precision of the weights, and without compiling."""
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    formats = matmul.fp32_precision, conv.fp32_precision
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")
        if strategy._plan.compile:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        is_gathered_in_half = strategy._plan.layout.zero == 3 and strategy._plan.precision in HALF_DTYPES
        if is_gathered_in_half:
            stack.enter_context(strategy.autocast())
        matmul.fp32_precision = conv.fp32_precision = "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision, conv.fp32_precision = formats


def _evaluate(strategy: Strategy, model: nn.Module, data: Any) -> _Evaluation | None:
    """The loss of a batch; None if it cannot be computed.

    Ranks of a sharded model call it together or not at all. An error inside the model ends the job: other ranks wait
    there.
    """
    outputs: list[Any] = []
    is_inside = is_over = False

    def enter(module: nn.Module, inputs: Any) -> None:
        nonlocal is_inside, is_over
        if strategy.is_sharded:
            is_over = bool(strategy.world.max(torch.zeros(1)).item())
            if is_over:
                raise _OutsideError
        is_inside = True

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal is_inside
        is_inside = False
        outputs.append(output)

    hooks = model.register_forward_pre_hook(enter, prepend=True), model.register_forward_hook(leave)
    try:
        with torch.no_grad():
            returned: Any = strategy.loss_of(model, data)
        loss, count = returned if isinstance(returned, tuple) else (returned, None)
        found = _Evaluation(
            num_samples=batch_length(data),
            loss=float(loss),
            count=None if count is None else float(count),
            rounding=_ROUNDING.get(loss.dtype, _HALF_ROUNDING),
            rows=_rows(outputs, batch_length(data)),
        )
    except Exception:
        if strategy.is_sharded and is_inside:
            raise
        found = None  # a task may take whole batches only, or give no loss in a validation
    finally:
        for hook in hooks:
            hook.remove()
    if strategy.is_sharded and not is_over:
        strategy.world.max(torch.ones(1))  # keeps other ranks from calling the model once more
    return found


class _OutsideError(Exception):
    """Another rank does not call the model."""


def _rows(outputs: list[Any], length: int) -> tuple[Tensor, Tensor] | None:
    for output in tensors_in(outputs):
        if output.ndim and len(output) == length and output.is_floating_point():
            return output[0].double(), output[-1].double()
    return None


@contextmanager
def _task_restored(task: Task) -> Iterator[None]:
    """Restore the task afterwards: attributes, containers, small tensors, metrics and buffers of its modules."""
    attributes = {name: value for name, value in vars(task).items() if name != "_datasets"}
    contents = {name: _copied(value) for name, value in attributes.items()}
    metrics = [(metric, copy.deepcopy(metric.__dict__)) for metric in held_metrics(task)]
    modules = [value for value in attributes.values() if isinstance(value, nn.Module)]
    buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    try:
        yield
    finally:
        for name in vars(task).keys() - attributes.keys() - {"_datasets"}:
            del vars(task)[name]
        vars(task).update(attributes)
        for name, value in attributes.items():
            if contents[name] is not None:
                _restore(value, contents[name])
        for metric, state in metrics:
            metric.__dict__.update(state)
        for buffer, before in buffers:
            buffer.copy_(before)


def _copied(value: Any) -> Any:
    """A copy of a container or a small tensor; None for anything else."""
    if isinstance(value, Tensor):
        return value.detach().clone() if value.nbytes <= _MAX_BYTES else None
    return copy.copy(value) if isinstance(value, list | dict | set | deque) else None


def _restore(value: Any, content: Any) -> None:
    if isinstance(value, Tensor):
        with torch.no_grad():
            value.copy_(content)
        return
    value.clear()
    (value.update if isinstance(value, dict | set) else value.extend)(content)


def _refusal(task: Task, found: _Mismatch, num_parts: int) -> SettingError:
    name = type(task).__name__
    whole, a, b = (f"{loss:.6g}" for loss in found.losses)
    first, second = found.num_samples
    what = f"{name}.loss() gave {whole} for {first + second} samples, and {a} and {b} for {first} and {second} of them"
    cut_in = f"a step is cut into {pluralize(num_parts, 'part')}"
    local = (
        f'set loss_reduction = "local" in {name} for a loss of the batch as a whole, whose result depends on the '
        "number of workers"
    )
    if task.loss_reduction == "sum" and found.is_mean:
        return SettingError(what, "it is a mean, but loss_reduction is 'sum'", "leave loss_reduction out")
    if task.loss_reduction == "sum":
        return SettingError(
            what,
            f"it is no sum over samples, and {cut_in}",
            f"return the sum over the samples alone, or leave loss_reduction out and return (loss, count), or {local}",
        )
    if found.is_sum and not found.is_counted:
        return SettingError(
            what,
            f"it is a sum, {cut_in}, and each counts as a mean",
            f'return a mean, or set loss_reduction = "sum" in {name}',
        )
    count = "its count is not that of the items it is a mean of" if found.is_counted else "it is no mean over samples"
    return SettingError(
        what,
        f"{count}, and {cut_in}",
        "return (loss, count) with the number of items that it is a mean of (tokens, pixels that are not masked), or "
        + local,
    )
