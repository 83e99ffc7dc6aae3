"""What a worker holds of a spread model, and of its optimizer's state, as boxes of a checkpoint and back.

State of the shape of a part is a box of the whole state; any other, such as a count of steps or a number for the whole
layer, is the same on all workers that hold something of the layer, and is stored once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from stormo.checkpoint.optimizer_state import flatten_optimizer, restore_optimizer
from stormo.checkpoint.reader import Reader, Wanted
from stormo.checkpoint.shard import Box, whole_box
from stormo.errors import StormoError

if TYPE_CHECKING:
    from stormo.parallel.parameter_shards import Part


class MisfitError(StormoError):
    """A checkpoint is of another model."""


def boxes_of(parts: Sequence[Part], optimizer: Optimizer) -> list[Box]:
    """What this worker stores of the weights and of the optimizer's state."""
    boxes = [_cut("model", part.name, part, part.local.detach()) for part in parts if part.is_saved]
    stepped = _stepped(parts, optimizer)
    for full_name, tensor in flatten_optimizer(optimizer, _labels(stepped)).items():
        label, _, key = full_name.rpartition("|")
        part = stepped[label]
        if not part.is_saved:
            continue
        name = f"{part.name}|{key}"
        if key and "=" not in key and tensor.ndim and tensor.shape == part.local.shape:
            boxes.append(_cut("optimizer", name, part, tensor))
        elif not any(part.offset):
            boxes.append(whole_box("optimizer", name, tensor))
    return boxes


@torch.no_grad()
def take_parts(reader: Reader, parts: Sequence[Part], optimizer: Optimizer, more: Sequence[Wanted] = ()) -> None:
    """Fill the parts, the optimizer's state and what more is wanted with what a checkpoint holds."""
    wanted, stepped = list(more), _stepped(parts, optimizer)
    for part in parts:
        _require_shape(reader, part)
        wanted.append(Wanted(section="model", name=part.name, offset=part.offset, into=part.local.detach()))
    keys: dict[str, list[str]] = {}
    for full_name in reader.names("optimizer"):
        # From the right: a state's key never contains the separator, a parameter's name may.
        name, _, key = full_name.rpartition("|")
        keys.setdefault(name, []).append(key)
    state: dict[str, Tensor] = {}
    for label, part in stepped.items():
        for key in keys.get(part.name, []):
            name = f"{part.name}|{key}"
            entry = reader.entries("optimizer")[name]
            is_cut = entry.shape == part.whole_shape
            offset, shape = (part.offset, part.local.shape) if is_cut else ((0,) * len(entry.shape), entry.shape)
            place = state[f"{label}|{key}"] = torch.empty(shape, dtype=entry.dtype)
            wanted.append(Wanted(section="optimizer", name=name, offset=offset, into=place))
    reader.fill(wanted)
    restore_optimizer(optimizer, _labels(stepped), state)


def stepped_names(parts: Sequence[Part], optimizer: Optimizer) -> set[str]:
    """The parameters that the optimizer steps on this worker."""
    return {part.name for part in _stepped(parts, optimizer).values()}


def _cut(section: str, name: str, part: Part, tensor: Tensor) -> Box:
    return Box(section=section, name=name, whole_shape=part.whole_shape, offset=part.offset, tensor=tensor)


def _stepped(parts: Sequence[Part], optimizer: Optimizer) -> dict[str, Part]:
    """The parts that the optimizer steps, each by a name that no other has; the rest is frozen."""
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    stepped: dict[str, Part] = {}
    for part in parts:
        if part.local in own:
            label, number = part.name, 1
            while label in stepped:
                number += 1
                label = f"{part.name} ({number})"
            stepped[label] = part
    return stepped


def _labels(stepped: dict[str, Part]) -> dict[Tensor, str]:
    return {part.local: label for label, part in stepped.items()}


def _require_shape(reader: Reader, part: Part) -> None:
    entry = reader.entries("model").get(part.name)
    if entry is None:
        raise MisfitError(f"The checkpoint {reader.path} has no {part.name}, which the model has.")
    if entry.shape != part.whole_shape:
        raise MisfitError(
            f"The checkpoint {reader.path} has {part.name} of shape {list(entry.shape)}, but the model's has shape "
            f"{list(part.whole_shape)}."
        )
