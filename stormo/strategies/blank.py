"""The task's model without memory for its weights, and the value that each of them begins with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stormo.strategies.deferred import deferred_model
from stormo.strategies.tape import CannotDeferError
from stormo.tasks.returned import check_model
from stormo.tasks.task import Task

Value = Callable[[str], Tensor]  # of a parameter or buffer, whole, in host memory


def blank_model(task: Task, notices: list[str]) -> tuple[nn.Module, Value]:
    """The model on meta, and a function that computes what one process would begin with, one tensor at a time.

    Where a model cannot be built without values, it is built in host memory, which a notice says.
    """
    try:
        deferred = deferred_model(lambda: check_model(task, task.model(), may_be_meta=True))
    except CannotDeferError as error:
        notices.append(f"The model is built whole in the host memory of every worker: {error}.")
    else:
        return deferred.module, deferred.value
    model = check_model(task, task.model())
    values = {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    return model.to("meta"), lambda name: values[name]


def make_room(model: nn.Module, device: torch.device) -> None:
    """Give a model on meta memory for its values; unlike torch's `to_empty`, it leaves tied what is tied."""
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((table, name))
    model.to_empty(device=device)
    for (first, first_name), *others in places.values():
        for table, name in others:
            table[name] = first[first_name]
