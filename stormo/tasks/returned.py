"""Checks what a task's methods return: the model, the data sets and the loss.

A mistake gets a sentence that names the method and the fix. `read_loss` runs in every micro-batch and costs no time.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset

from stormo.data.reading import is_stream
from stormo.errors import SettingError, first_names, pluralize

if TYPE_CHECKING:
    from stormo.tasks.task import Task

Count = Tensor | float  # of the items that a loss or a metric is a mean of


def check_model(owner: object, model: Any, *, may_be_meta: bool = False) -> nn.Module:
    """The model, or a sentence that says why it cannot be trained."""
    if isinstance(model, type):
        found = _kind(model), "a class holds no weights", f"return {model.__name__}(…), one of its objects"
    elif not isinstance(model, nn.Module):
        found = _kind(model), "an nn.Module is trained", "end it with return and the module"
    elif lazy := next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None):
        why = "the optimizer and the other workers must know its size before the first batch"
        found = f"a model with the lazy parameter {lazy}", why, "give that layer its number of inputs"
    elif not may_be_meta and any(parameter.is_meta for parameter in model.parameters()):
        found = "a model on the device meta", "its weights have no values", "build it without that device"
    elif not (parameters := list(model.parameters())):
        instead = "assign its layers to self, or keep several in an nn.ModuleList, not in a plain list"
        found = f"{_kind(model)} without parameters", "there is nothing to train", instead
    elif not any(parameter.requires_grad for parameter in parameters):
        why = "none requires a gradient, so there is nothing to train"
        instead = "call requires_grad_(True) on those that are to be trained"
        found = f"a model of {pluralize(len(parameters), 'parameter')}", why, instead
    else:
        return model
    what, why, instead = found
    raise SettingError(f"{type(owner).__name__}.model() returned {what}", why, instead)


def make_model(task: Task) -> nn.Module:
    """The task's model, with the weights of --init-from where this process has them."""
    model = check_model(task, task.model())
    if task._initialise is not None:
        task._initialise(model)
    return model


def check_data(owner: object, method: str, data: Any) -> Any:
    """The data set, or a sentence that says why no batches can be made of it."""
    if data is None:
        found = "None", "batches are made of a data set", "end it with return and the data set"
    elif isinstance(data, DataLoader):
        why = "batches are cut here, the same for any number of workers"
        found = "a DataLoader", why, "return the data set itself"
    elif isinstance(data, Iterator):
        instead = "return an object whose __iter__ starts from the beginning, or a list"
        found = f"{_kind(data)}, which can be read once", "every epoch reads it again", instead
    elif isinstance(data, Mapping) or _is_columns(data):
        what, why = f"{_kind(data)} of {pluralize(len(data), 'part')}", "a data set gives one sample for each index"
        found = what, why, "return stormo.data.TensorData(x, y) of tensors whose rows are the samples"
    elif is_stream(data):
        return data
    elif isinstance(data, type) or not _has_samples(data):
        instead = "return a list of samples, a stormo.data.TensorData, or a torch Dataset"
        found = _kind(data), "a data set has __len__ and __getitem__", instead
    elif len(data) == 0:
        found = "a data set without samples", "an epoch takes at least one", "check how they are read"
    else:
        return data
    what, why, instead = found
    raise SettingError(f"{type(owner).__name__}.{method}() returned {what}", why, instead)


def _is_columns(data: Any) -> bool:
    """Whether these are the columns of all samples, as in `return x, y`, instead of samples."""
    if not isinstance(data, tuple) or not all(isinstance(part, Tensor) and part.ndim for part in data):
        return False
    return len({part.shape for part in data}) > 1 and len({len(part) for part in data}) == 1


def _has_samples(data: Any) -> bool:
    reads_one = getattr(type(data), "__getitem__", Dataset.__getitem__) is not Dataset.__getitem__
    return hasattr(data, "__len__") and (reads_one or hasattr(data, "__getitems__"))


def read_loss(owner: Any, returned: Any) -> tuple[Tensor, Count | None]:
    """The loss and, where it came as (loss, count), the number of items that it is a mean of."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        return check_loss(owner, returned), None
    said = f"{type(owner).__name__}.loss() returned (loss, count)"
    if owner.loss_reduction == "sum":
        raise SettingError(
            f"{said} where loss_reduction is 'sum'", "a sum is not weighted by a count", "leave out one of the two"
        )
    loss = check_loss(owner, returned[0])
    return loss, read_count(said, returned[1], loss.device)


def read_count(said: str, count: Any, device: torch.device) -> Count:
    """The number of items of a mean, or a sentence; a count on a GPU is not waited for."""
    is_tensor = isinstance(count, Tensor) and not count.ndim and not count.is_complex()
    if is_tensor and count.device == device and device.type != "cpu":
        return torch.as_tensor(count)
    if (is_tensor and count.device.type == "cpu") or isinstance(count, numbers.Real):
        number = float(count)
        if 0 <= number < math.inf:
            return number
        raise SettingError(f"{said} with the count {number:g}", "it counts items", "return how many there are, from 0")
    shown = f"a tensor of shape {list(count.shape)}" if isinstance(count, Tensor) else _kind(count)
    raise SettingError(
        f"{said} with {shown} as count", "it is one number", "return a number, or a scalar tensor such as mask.sum()"
    )


def check_loss(owner: object, loss: Any) -> Tensor:
    """The loss, or a sentence that says why it has no gradient."""
    if isinstance(loss, Tensor) and not loss.ndim and loss.requires_grad and loss.is_floating_point():
        return loss
    if not isinstance(loss, Tensor):
        instead = "return the mean loss of the batch alone, or (loss, count)"
        if isinstance(loss, int | float):
            instead = "return the loss itself, without .item() or float()"
        found = _kind(loss), "the gradient is taken of a tensor", instead
    elif loss.ndim:
        found = f"a tensor of shape {list(loss.shape)}", "the gradient is taken of one number", "return its .mean()"
    elif not loss.is_floating_point():
        why = "only floating-point numbers have a gradient"
        found = f"a tensor of type {str(loss.dtype).removeprefix('torch.')}", why, "return the mean loss, not a count"
    else:
        why = "it must lead back to the parameters of the model"
        instead = "compute it from what model(…) returns, without torch.no_grad(), .detach() or .item()"
        found = "a tensor without a gradient", why, instead
    what, why, instead = found
    raise SettingError(f"{type(owner).__name__}.loss() returned {what}", why, instead)


def without_gradient(module: nn.Module) -> list[str]:
    """The trainable parameters that the last backward pass has not reached."""
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad and parameter.grad is None]


def unused_parameters(owner: object, names: list[str], when: str = "in the first batch") -> SettingError:
    """The error for parameters without a gradient."""
    name = type(owner).__name__
    are, them = ("parameters", "them") if len(names) > 1 else ("parameter", "it")
    return SettingError(
        f"{name}.model() has the {are} {first_names(names)}",
        f"{name}.loss() gave {them} no gradient {when}",
        f"use {them} in loss(), leave {them} out, call requires_grad_(False) on {them}, or set find_unused = True on "
        f"{name} if other batches use {them}",
    )


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
