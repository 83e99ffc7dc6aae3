"""A spread model read from a checkpoint by all its workers, each its own boxes, whatever mesh has saved it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from stormo.checkpoint.agreement import raise_together, read_together, require_seen
from stormo.checkpoint.layout import RANKS
from stormo.checkpoint.parts import MisfitError, stepped_names, take_parts
from stormo.checkpoint.reader import Reader, Wanted
from stormo.distributed.world import World

if TYPE_CHECKING:
    from stormo.parallel.base import Strategy


# Keys among the plain values: every worker's part of the loss, and which rank has stored a buffer that all have alike.
LOSSES, BUFFERS = "losses", "buffers"
BUFFER = "buffer/"  # before the names of buffers among what a worker has of its own


def kept_buffers(strategy: Strategy) -> dict[str, Tensor]:
    """The buffers of this worker that belong to the model's state; others, such as tables, are made anew."""
    kept = {id(tensor) for tensor in strategy.module.state_dict(keep_vars=True).values()}
    return {name: buffer for name, buffer in strategy.named_buffers() if id(buffer) in kept}


def aliases(strategy: Strategy) -> dict[str, str]:
    """Further names of tensors that the model has under several, each with the one under which it is stored."""
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in strategy.module.state_dict(keep_vars=True).items():
        by_tensor.setdefault(id(tensor), []).append(name)
    stored = {part.name for part in strategy.parts()} | kept_buffers(strategy).keys()
    return {
        name: first
        for names in by_tensor.values()
        for first in names
        if first in stored
        for name in names
        if name not in stored
    }


def take_checkpoint(
    world: World, path: Path, strategy: Strategy, is_same: Callable[[Mapping[str, Any]], bool]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fill weights, buffers and optimizer with what a checkpoint holds.

    Every worker calls it. One that cannot read its boxes, or a checkpoint of another model, is told by all.

    Args:
        world: of the workers now.
        path: of the checkpoint.
        strategy: what is filled.
        is_same: tells from the plain values whether every worker is where it was.

    Returns:
        The plain values, and what this worker had of its own, where it is where it was.
    """
    require_seen(world, path)
    state, own, stored = dict[str, Any](), dict[str, Tensor](), dict[str, set[str]]()
    with read_together(world, path), Reader(path) as reader:
        buffers = kept_buffers(strategy)
        if missing := sorted(buffers.keys() - set(reader.names("model"))):
            raise MisfitError(f"The checkpoint {path} has no {missing[0]}, which the model has.")
        wanted = [
            Wanted(section="model", name=name, offset=(0,) * buffer.ndim, into=buffer)
            for name, buffer in buffers.items()
        ]
        take_parts(reader, strategy.parts(), strategy.optimizer, wanted)
        state = reader.state()
        if LOSSES not in state:
            state[LOSSES] = losses_of(reader.tensors(RANKS))
        if is_same(state):
            for name, rank in state.get(BUFFERS, {}).items():
                own |= reader.own(rank, [BUFFER + name])
            own |= reader.own(world.rank)
        stored = {
            "model": set(reader.names("model")),
            "optimizer": {name.rpartition("|")[0] for name in reader.names("optimizer")},
        }
    raise_together(world, _left_over(world, path, strategy, stored))
    strategy.parts_changed()
    return state, own


def losses_of(ranks: Mapping[str, Tensor]) -> list[float]:
    """The losses of all workers, where they are stored as tensors: up to version 2."""
    return [float(tensor) for name, tensor in ranks.items() if name.endswith("/loss")]


def _left_over(world: World, path: Path, strategy: Strategy, stored: dict[str, set[str]]) -> Exception | None:
    """What no worker has taken, on the main one: it belongs to another model."""
    # Of the workers that hold something of a parameter, one names it.
    parts = [part for part in strategy.parts() if part.is_saved and not any(part.offset)]
    here = {
        "model": [*(part.name for part in parts), *kept_buffers(strategy), *aliases(strategy)],
        "optimizer": sorted(stepped_names(parts, strategy.optimizer)),
    }
    gathered: Sequence[dict[str, list[str]]] | None = world.gather_json(here)
    for section, names in stored.items() if gathered is not None else ():
        taken = {name for each in gathered or [] for name in each[section]}
        if more := sorted(names - taken):
            what = "" if section == "model" else "the optimizer's state for "
            lacks = "model" if section == "model" else "optimizer"
            return MisfitError(f"The checkpoint {path} has {what}{more[0]}, which this {lacks} lacks.")
    return None
