"""Workers that stepped by themselves, in a checkpoint: what each has of its own, and the mean of them all.

The mean stands where the one model of other strategies stands, so that whoever knows nothing of these workers takes it:
another strategy, another number of workers, an export. Each worker stores the means of some tensors, so that none holds
all of them. The section `local` holds `3/model/…`, where the workers are apart, and `3/optimizer/…` of worker 3, and
`outer/…` of the step that follows an averaging.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stormo.checkpoint.agreement import read_together
from stormo.checkpoint.index import Entry
from stormo.checkpoint.layout import LOCAL
from stormo.checkpoint.parts import boxes_of, take_parts
from stormo.checkpoint.reader import Reader, Wanted
from stormo.checkpoint.shard import Box, whole_box
from stormo.distributed.world import World
from stormo.parallel.base import Strategy
from stormo.parallel.coalesced import means

_OUTER = "outer/"


def local_boxes(world: World, strategy: Strategy) -> list[Box]:
    """This worker's own weights and optimizer state, and its share of the means. Every worker calls it."""
    own = boxes_of([replace(part, is_saved=True) for part in strategy.parts()], strategy.optimizer)
    trained = [part.name for part in strategy.parts() if part.local.requires_grad]
    # Workers that have just averaged have the mean.
    is_own = set(trained) if strategy.is_apart else set()
    boxes = [
        replace(box, section=LOCAL, name=f"{world.rank}/{box.section}/{box.name}")
        for box in own
        if box.section == "optimizer" or box.name in is_own
    ]
    for number, (name, mean) in enumerate(zip(trained, strategy.mean_weights(), strict=True)):
        if number % world.size == world.rank:
            boxes.append(whole_box("model", name, mean.detach().to("cpu", copy=True)))
    optimizer = _mean_state(world, {box.name: box.tensor for box in own if box.section == "optimizer"})
    boxes += [whole_box("optimizer", name, tensor) for name, tensor in optimizer.items()]
    if world.is_main:
        boxes += [box for box in own if box.section == "model" and box.name not in trained]
        boxes += [whole_box(LOCAL, _OUTER + name, tensor) for name, tensor in strategy.outer_state().items()]
    return boxes


def local_state(world: World, strategy: Strategy) -> dict[str, Any] | None:
    """The plain values of workers that step by themselves, on the main one. Every worker calls it."""
    scalers = world.gather_json(dict(strategy.scaler.state_dict()))
    return None if scalers is None else {"is_apart": strategy.is_apart, "scalers": scalers}


def take_local(world: World, path: Path, strategy: Strategy, state: Mapping[str, Any], *, is_same: bool) -> None:
    """Go on where the workers were, after the mean has been taken up. Every worker calls it.

    Args:
        world: of the workers now.
        path: of the checkpoint.
        strategy: whose weights and optimizer hold the mean.
        state: the plain values of the checkpoint.
        is_same: whether every worker is where it was; others go on from the mean.
    """
    if LOCAL not in state:
        return
    with read_together(world, path):
        with Reader(path) as reader:
            _take_outer(reader, strategy)
        if is_same:
            with _OwnReader(path, world.rank) as own:
                take_parts(own, strategy.parts(), strategy.optimizer)
            strategy.is_apart = state[LOCAL]["is_apart"]
            if strategy.scaler.is_enabled() and state[LOCAL]["scalers"][world.rank]:
                strategy.scaler.load_state_dict(dict(state[LOCAL]["scalers"][world.rank]))


class _OwnReader(Reader):
    """A checkpoint as if one worker had saved it alone."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path)
        self._rank = rank
        self._own: dict[str, dict[str, Entry]] = {}

    def entries(self, section: str) -> Mapping[str, Entry]:
        if section not in self._own:
            prefix = f"{self._rank}/{section}/"
            found = self.local(self._rank).items()
            own = {name.removeprefix(prefix): entry for name, entry in found if name.startswith(prefix)}
            # Weights that all workers have alike are stored once.
            self._own[section] = {**super().entries(section), **own} if section == "model" else own
        return self._own[section]


def _take_outer(reader: Reader, strategy: Strategy) -> None:
    stored = reader.local(0)
    reader.fill(
        Wanted(section=LOCAL, name=_OUTER + name, offset=(0,) * tensor.ndim, into=tensor)
        for name, tensor in strategy.outer_state().items()
        if _OUTER + name in stored
    )


def _mean_state(world: World, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This worker's share of the means of the optimizers' state, each over those workers that have it."""
    union = _all_state(
        world,
        {
            name: [str(t.dtype).removeprefix("torch."), list(t.shape)]
            for name, t in own.items()
            if not _is_unstepped(name)
        },
    )
    found: dict[str, Tensor] = {}
    unstepped = {n: t for n, t in own.items() if _is_unstepped(n) and world.is_main}
    for is_counted in (True, False):
        names = [name for name, (dtype, shape, _) in union.items() if is_counted == (not shape or not _is_mean(dtype))]
        tensors = [_given(own, name, *union[name][:2]) for name in names]
        # Counts of steps and the like as float64, in which the mean of equal ones is theirs.
        found_means = means(world, tensors, torch.float64 if is_counted else None)
        for number, (name, mean) in enumerate(zip(names, found_means, strict=True)):
            if number % world.size == world.rank:
                dtype, _, count = union[name]
                over_some = mean.to("cpu", copy=True).mul_(world.size / count)
                found[name] = (over_some if _is_mean(dtype) else over_some.round()).to(getattr(torch, dtype))
    stepped = {name.rpartition("|")[0] for name in union}
    return found | {n: t for n, t in unstepped.items() if n.removesuffix("|") not in stepped}


def _all_state(world: World, described: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """All state that some worker has: its type, its shape, and how many have it."""
    is_other = world.share_json(described) != described
    if not world.max(torch.tensor([float(is_other)])).item():
        return {name: [*each, world.size] for name, each in described.items()}
    union: dict[str, list[Any]] = {}
    for each in world.gather_json(described) or []:
        for name, (dtype, shape) in each.items():
            union.setdefault(name, [dtype, shape, 0])[2] += 1
    for name in [name for name in union if name.endswith("=none") and name.removesuffix("=none") in union]:
        del union[name]  # others have values there
    shared: dict[str, list[Any]] = world.share_json(union)
    return shared


def _is_unstepped(name: str) -> bool:
    """Whether it says of a parameter that it has no state."""
    return name.endswith("|")


def _is_mean(dtype: str) -> bool:
    """Whether numbers of this type have a mean of this type."""
    return bool(getattr(torch, dtype).is_floating_point or getattr(torch, dtype).is_complex)


def _given(own: Mapping[str, Tensor], name: str, dtype: str, shape: Sequence[int]) -> Tensor:
    """This worker's, or nothing to add where it has had no gradient yet."""
    return own[name] if name in own else torch.zeros(shape, dtype=getattr(torch, dtype))
