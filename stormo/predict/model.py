"""What a model and its optimizer come to, counted on tensors without memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from stormo.config import schema
from stormo.errors import SettingError
from stormo.optim.own import own_optimizer
from stormo.optim.table import make_optimizer
from stormo.parallel.fsdp import _has_statistics
from stormo.parallel.pipeline.orders import stages_of
from stormo.parallel.pipeline.pieces import find_pieces
from stormo.parallel.pipeline.split import into_stages
from stormo.parallel.tensor.plan import COLUMN, ROW, derive_plan, matched
from stormo.parallel.tensor.split import KINDS
from stormo.parallel.units import blocks_of
from stormo.predict.blank import Blank
from stormo.predict.terms import Model, Parameter
from stormo.predict.watching import OTHER, Watch, storage_of
from stormo.tasks.task import Task

_SIDES = (7, 11, 13, 17, 19, 23, 29, 31)  # of small parameters, each another: what is as long is known by its length


def count_model(task: Task, blank: Blank, settings: schema.TrainConfig) -> Model:
    """Parameters, buffers and the state of the optimizer, which takes two steps for it.

    Args:
        task: whose model it is; its own optimizer is made, where it has one.
        blank: the model; what the optimizer leaves out is frozen in it.
        settings: of the run.
    """
    twin, fake = blank.model(), blank.fake
    optimizer = own_optimizer(task.optimizer, twin) or make_optimizer(twin, settings.optimizer)
    blank.frozen |= {name for name, parameter in twin.named_parameters() if not parameter.requires_grad}
    state, step_bytes, notices = _stepped(twin, optimizer, fake)
    units = blocks_of(twin, settings.sharding.shard_modules)
    return Model(
        parameters=tuple(
            Parameter(
                name=name,
                num_bytes=parameter.nbytes,
                num_values=parameter.numel(),
                num_rows=parameter.shape[0] if parameter.ndim else 1,
                is_trained=parameter.requires_grad,
                dtype=str(parameter.dtype).removeprefix("torch."),
                state_bytes=state.get(name, 0),
                block=next((unit for unit in units if name.startswith(f"{unit}.")), ""),
                keeps_format=_has_statistics(twin.get_submodule(name.rpartition(".")[0])),
            )
            for name, parameter in twin.named_parameters()
        ),
        buffer_bytes=sum(buffer.nbytes for buffer in twin.buffers()),
        step_bytes=step_bytes,
        optimizer=type(optimizer).__name__,
        notices=(*blank.notices, *notices),
    )


def _stepped(model: nn.Module, optimizer: Optimizer, fake: FakeTensorMode) -> tuple[dict[str, int], int, list[str]]:
    """Bytes of state by parameter, the most that a step needs beside it, and what is not known."""
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    for group in optimizer.param_groups:
        if group.get("fused"):  # the same state, by operations whose shapes torch knows
            group["fused"] = group["foreach"] = False
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    with fake:
        for parameter in names:
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    try:
        # Not within the mode: counters that an optimizer makes itself have values then, which it may read.
        optimizer.step()
        state = {names[parameter]: _bytes_in(kept) for parameter, kept in optimizer.state.items()}
        with Watch(model) as watch:
            watch.ignore(tensor for kept in optimizer.state.values() for tensor in _tensors(kept))
            watch.ignore(parameter.grad for parameter in names if parameter.grad is not None)
            optimizer.step()
    except Exception:
        return _stepped_in_small(names, optimizer)
    # One kernel for all needs nothing beside.
    return state, 0 if is_fused else max((row[OTHER] for row in watch.rows), default=0), []


def _stepped_in_small(names: Mapping[Tensor, str], optimizer: Optimizer) -> tuple[dict[str, int], int, list[str]]:
    """The same of an optimizer that reads values: from real parameters, small, whose sides all differ."""
    small: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        for whole in group["params"]:
            shape = [side if side == 1 else _SIDES[index] for index, side in enumerate(whole.shape)]
            small[whole] = nn.Parameter(torch.ones(shape, dtype=whole.dtype))
            small[whole].grad = torch.ones_like(small[whole])
        group["params"] = [small[whole] for whole in group["params"]]
    optimizer.state.clear()
    try:
        optimizer.step()
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        told = f"The state of {type(optimizer).__name__} is taken as two values a parameter: its step ended in {first}"
        return {name: 2 * whole.nbytes for whole, name in names.items() if whole.requires_grad}, 0, [told]
    found = {}
    for whole, twin in small.items():
        sides = dict(zip(twin.shape, whole.shape, strict=True))
        kept = _tensors(optimizer.state[twin])
        found[names[whole]] = sum(
            tensor.element_size() * math.prod(sides.get(side, side) for side in tensor.shape) for tensor in kept
        )
    return found, 0, [f"What a step of {type(optimizer).__name__} needs beside its state is not counted"]


def _tensors(kept: Mapping[Any, Any]) -> list[Tensor]:
    return [value for value in tree_leaves(dict(kept)) if isinstance(value, Tensor)]


def _bytes_in(kept: Mapping[Any, Any]) -> int:
    storages = {storage_of(tensor)._cdata: storage_of(tensor).nbytes() for tensor in _tensors(kept)}
    return sum(storages.values())


def cut_by_tensor(task: Task, model: nn.Module, num_workers: int) -> frozenset[str]:
    """The parameters that the axis tensor cuts; a sentence where it cannot."""
    found = set()
    for path, wish in matched(model, derive_plan(task, model, num_workers)).items():
        heads = getattr(model.get_submodule(path.rpartition(".")[0]), "num_heads", None)
        for name, dim in KINDS[wish.kind].dims.items():
            parameter = getattr(model.get_submodule(path), name, None)
            if parameter is None:
                continue
            count = heads if heads is not None and wish.num_groups is None else wish.num_groups or parameter.shape[dim]
            if count % num_workers:
                raise SettingError(
                    f"--mesh tensor={num_workers} was set", f"{path} has {count} parts to deal out", "set fewer"
                )
            found.add(f"{path}.{name}")
    return frozenset(found)


@torch.no_grad()
def keep_one_part(task: Task, model: nn.Module, num_workers: int) -> None:
    """Leave what one worker along the axis tensor has of the layers between which activations are cut, in place."""
    for path, wish in matched(model, derive_plan(task, model, num_workers)).items():
        layer = model.get_submodule(path)
        for name, dim in KINDS[wish.kind].dims.items() if wish.kind in (COLUMN, ROW) else ():
            whole = getattr(layer, name, None)
            if whole is not None:
                part = whole.narrow(dim, 0, whole.shape[dim] // num_workers).clone()
                setattr(layer, name, nn.Parameter(part, whole.requires_grad))


def stages_by_pipeline(task: Task, model: nn.Module, num_workers: int, per_worker: int) -> tuple[frozenset[str], ...]:
    """The parameters of each worker of a pipeline, dealt by their sizes; a sentence where that is not known."""
    given = task.pieces(model)
    if given is None and not isinstance(model, nn.Sequential):
        raise SettingError(
            "a pipeline was asked for",
            "where the model can be cut is found by tracing it, which training does",
            f"give {type(task).__name__} a pieces(model)",
        )
    pieces = find_pieces(model, given, name=type(task).__name__)
    costs = [float(sum(parameter.numel() for parameter in piece.parameters())) for piece in pieces.items]
    stages = into_stages(pieces, num_workers * per_worker, lambda: costs)
    names = {parameter: name for name, parameter in model.named_parameters()}
    return tuple(
        frozenset(
            names[parameter]
            for number in stages_of(worker, num_workers, num_workers * per_worker)
            for piece in stages[number]
            for parameter in piece.parameters()
        )
        for worker in range(num_workers)
    )
