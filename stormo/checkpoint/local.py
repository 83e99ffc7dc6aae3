"""Workers that stepped by themselves, in a checkpoint: what each has of its own, and the mean of them all.

The mean stands where the one model of other strategies stands, so that whoever knows nothing of these workers takes it:
another strategy, another number of workers, an export. The section `local` holds `3/model/…` and `3/optimizer/…` of
worker 3, and `outer/…` of the step that follows an averaging.
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
from stormo.strategies.bundles import means
from stormo.strategies.strategy import Strategy
from stormo.world.world import World

_OUTER = "outer/"


def local_boxes(world: World, strategy: Strategy) -> list[Box]:
    """This worker's own weights and optimizer state; on the main one also their mean. Every worker calls it."""
    own = boxes_of([replace(part, is_saved=True) for part in strategy.parts()], strategy.optimizer)
    rows = [replace(box, section=LOCAL, name=f"{world.rank}/{box.section}/{box.name}") for box in own]
    model = {box.name: box.tensor for box in own if box.section == "model"}
    trained = [part.name for part in strategy.parts() if part.local.requires_grad]
    for name, mean in zip(trained, strategy.mean_weights(), strict=True):
        if world.is_main:  # who alone keeps it, in host memory
            model[name] = mean.detach().to("cpu", copy=True)
    optimizer = _mean_state(world, {box.name: box.tensor for box in own if box.section == "optimizer"})
    if not world.is_main:
        return rows
    outer = [whole_box(LOCAL, _OUTER + name, tensor) for name, tensor in strategy.outer_state().items()]
    whole = {"model": model, "optimizer": optimizer}
    return [*rows, *outer, *(whole_box(section, *one) for section, each in whole.items() for one in each.items())]


def local_state(world: World, strategy: Strategy) -> dict[str, Any] | None:
    """The plain values of workers that step by themselves, on the main one. Every worker calls it."""
    scalers = world.gather_json(strategy.scaler_state())
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
            self._own[section] = {name.removeprefix(prefix): entry for name, entry in found if name.startswith(prefix)}
        return self._own[section]


def _take_outer(reader: Reader, strategy: Strategy) -> None:
    stored = reader.local(0)
    reader.fill(
        Wanted(section=LOCAL, name=_OUTER + name, offset=(0,) * tensor.ndim, into=tensor)
        for name, tensor in strategy.outer_state().items()
        if _OUTER + name in stored
    )


def _mean_state(world: World, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The mean of the optimizers' state over those workers that have it, on the main one."""
    told = world.gather_json(
        {
            name: [str(t.dtype).removeprefix("torch."), list(t.shape)]
            for name, t in own.items()
            if not _is_unstepped(name)
        }
    )
    union: dict[str, list[Any]] = {}
    for each in told or []:
        for name, (dtype, shape) in each.items():
            union.setdefault(name, [dtype, shape, 0])[2] += 1
    for name in [name for name in union if name.endswith("=none") and name.removesuffix("=none") in union]:
        del union[name]  # others have values there
    union = world.share_json(union)
    found: dict[str, Tensor] = {}
    for is_counted in (True, False):
        names = [name for name, (dtype, shape, _) in union.items() if is_counted == (not shape or not _is_mean(dtype))]
        tensors = [_given(own, name, *union[name][:2]) for name in names]
        # Counts of steps and the like as float64, in which the mean of equal ones is theirs.
        for name, mean in zip(names, means(world, tensors, torch.float64 if is_counted else None), strict=True):
            if world.is_main:
                dtype, _, count = union[name]
                over_some = mean.to("cpu", copy=True).mul_(world.size / count)
                found[name] = (over_some if _is_mean(dtype) else over_some.round()).to(getattr(torch, dtype))
    stepped = {name.rpartition("|")[0] for name in union}
    return found | {n: t for n, t in own.items() if _is_unstepped(n) and n.removesuffix("|") not in stepped}


def _is_unstepped(name: str) -> bool:
    """Whether it says of a parameter that it has no state."""
    return name.endswith("|")


def _is_mean(dtype: str) -> bool:
    """Whether numbers of this type have a mean of this type."""
    return bool(getattr(torch, dtype).is_floating_point or getattr(torch, dtype).is_complex)


def _given(own: Mapping[str, Tensor], name: str, dtype: str, shape: Sequence[int]) -> Tensor:
    """This worker's, or nothing to add where it has had no gradient yet."""
    return own[name] if name in own else torch.zeros(shape, dtype=getattr(torch, dtype))
