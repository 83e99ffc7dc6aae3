"""Counts a model and its optimizer on fake tensors, and the parameters that a strategy shards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stormo.config import schema
from stormo.data.batches import tensors_in
from stormo.errors import SettingError
from stormo.optim.table import freeze, make_optimizer
from stormo.optim.task_optimizer import make_task_optimizer
from stormo.parallel.fsdp import has_statistics
from stormo.parallel.pipeline.partition import into_stages
from stormo.parallel.pipeline.schedules import worker_stages
from stormo.parallel.pipeline.split_points import find_pieces
from stormo.parallel.tensor.plan import COLUMN, ROW, derive_plan, matched
from stormo.parallel.tensor.split import KINDS
from stormo.parallel.units import units_of
from stormo.predict.fake_tensors import OTHER, FakeModel, MemoryTrace, storage_key
from stormo.predict.forecast import ModelSize, ParameterSize
from stormo.tasks.check import has_several_optimizers
from stormo.tasks.task import Task

_SIDES = (7, 11, 13, 17, 19, 23, 29, 31)  # of small parameters, all different: a length names its side


def count_model(task: Task, fake_model: FakeModel, settings: schema.TrainConfig) -> ModelSize:
    """Count parameters, buffers and the state of the optimizer, which takes two steps for it.

    Parameters that the task's optimizer leaves out are frozen in `fake_model`.
    """
    twin, fake = fake_model.model(), fake_model.fake
    if has_several_optimizers(type(task)):
        raise SettingError(
            f"{type(task).__name__} has several optimizers", "predict counts one step", "try it on a GPU instead"
        )
    if settings.optimizer.freeze is not None:
        freeze(twin, settings.optimizer.freeze)
    optimizer = make_task_optimizer(task.optimizer, twin) or make_optimizer(twin, settings.optimizer, task.lr_factors)
    fake_model.frozen |= {name for name, parameter in twin.named_parameters() if not parameter.requires_grad}
    state, step_bytes, notices = _optimizer_bytes(twin, optimizer, fake)
    has_average = settings.optimizer.ema is not None
    units = units_of(twin, settings.sharding.shard_modules)
    return ModelSize(
        parameters=tuple(
            ParameterSize(
                name=name,
                num_bytes=parameter.nbytes,
                num_values=parameter.numel(),
                num_rows=parameter.shape[0] if parameter.ndim else 1,
                is_trained=parameter.requires_grad,
                dtype=str(parameter.dtype).removeprefix("torch."),
                state_bytes=state.get(name, 0) + (parameter.nbytes if has_average and parameter.requires_grad else 0),
                block=next((unit for unit in units if name.startswith(f"{unit}.")), ""),
                keeps_format=has_statistics(twin.get_submodule(name.rpartition(".")[0])),
            )
            for name, parameter in twin.named_parameters()
        ),
        buffer_bytes=sum(buffer.nbytes for buffer in twin.buffers()),
        step_bytes=step_bytes,
        optimizer=type(optimizer).__name__,
        notices=(*fake_model.notices, *notices),
    )


def _optimizer_bytes(
    model: nn.Module, optimizer: Optimizer, fake: AbstractContextManager[Any]
) -> tuple[dict[str, int], int, list[str]]:
    """Bytes of state by parameter, the temporary memory of a step, and notices of what is not known."""
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    for group in optimizer.param_groups:
        if group.get("fused"):  # same state, from operations with known shapes
            group["fused"] = group["foreach"] = False
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    with fake:
        for parameter in names:
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    try:
        # Not within the mode, so that an optimizer may read the values of its own counters.
        optimizer.step()
        state = {names[parameter]: _bytes_in(kept) for parameter, kept in optimizer.state.items()}
        with MemoryTrace(model) as trace:
            trace.ignore(tensor for kept in optimizer.state.values() for tensor in _tensors(kept))
            trace.ignore(parameter.grad for parameter in names if parameter.grad is not None)
            optimizer.step()
    except Exception:
        return _optimizer_bytes_of_small(names, optimizer)
    # A fused kernel needs no temporary memory.
    return state, 0 if is_fused else max((row[OTHER] for row in trace.rows), default=0), []


def _optimizer_bytes_of_small(
    names: Mapping[Tensor, str], optimizer: Optimizer
) -> tuple[dict[str, int], int, list[str]]:
    """The same for an optimizer that reads values: from small real parameters with distinct side lengths."""
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
        notice = (
            f"The state of {type(optimizer).__name__} is taken as two values a parameter, as its step failed: {first}"
        )
        return {name: 2 * whole.nbytes for whole, name in names.items() if whole.requires_grad}, 0, [notice]
    found = {}
    for whole, twin in small.items():
        sides = dict(zip(twin.shape, whole.shape, strict=True))
        kept = _tensors(optimizer.state[twin])
        found[names[whole]] = sum(
            tensor.element_size() * math.prod(sides.get(side, side) for side in tensor.shape) for tensor in kept
        )
    return found, 0, [f"The temporary memory of a step of {type(optimizer).__name__} is not counted"]


def _tensors(kept: Mapping[Any, Any]) -> list[Tensor]:
    return list(tensors_in(dict(kept)))


def _bytes_in(kept: Mapping[Any, Any]) -> int:
    return sum({storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in _tensors(kept)}.values())


def tensor_sharded(task: Task, model: nn.Module, num_workers: int) -> frozenset[str]:
    """Names of the parameters that are sharded along tensor; an error where they cannot be."""
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
                    f"--mesh tensor={num_workers} was set",
                    f"{path} has {count} parts, which {num_workers} do not divide",
                    "set fewer",
                )
            found.add(f"{path}.{name}")
    return frozenset(found)


@torch.no_grad()
def keep_tensor_shard(task: Task, model: nn.Module, num_workers: int) -> None:
    """Keep one worker's shard of the column- and row-parallel layers, in place."""
    for path, wish in matched(model, derive_plan(task, model, num_workers)).items():
        layer, dims = model.get_submodule(path), KINDS[wish.kind].dims if wish.kind in (COLUMN, ROW) else {}
        for name, dim in dims.items():
            whole = getattr(layer, name, None)
            if whole is not None:
                part = whole.narrow(dim, 0, whole.shape[dim] // num_workers).clone()
                setattr(layer, name, nn.Parameter(part, whole.requires_grad))


def pipeline_stages(task: Task, model: nn.Module, num_workers: int, per_worker: int) -> tuple[frozenset[str], ...]:
    """The parameters of each pipeline worker, split by their sizes; an error where the split is not known."""
    given = task.pieces(model)
    if given is None and not isinstance(model, nn.Sequential):
        raise SettingError(
            "a pipeline was asked for",
            "where the model can be split is found by tracing it, which only training does",
            f"give {type(task).__name__} a pieces(model)",
        )
    pieces = find_pieces(model, given, name=type(task).__name__)
    costs = [float(sum(parameter.numel() for parameter in piece.parameters())) for piece in pieces.items]
    stages = into_stages(pieces, num_workers * per_worker, lambda: costs)
    names = {parameter: name for name, parameter in model.named_parameters()}
    return tuple(
        frozenset(
            names[parameter]
            for number in worker_stages(worker, num_workers, num_workers * per_worker)
            for piece in stages[number]
            for parameter in piece.parameters()
        )
        for worker in range(num_workers)
    )
