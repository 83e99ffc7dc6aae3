"""Buffers of all workers in a checkpoint: replicas once, those that differ by every worker that holds them.

Which they are is found with one exchange of digests, whose size does not grow with the workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stormo.checkpoint.spread import kept_buffers
from stormo.checkpoint.tensors import DTYPE_NAMES, DTYPES, weights_digest
from stormo.distributed.world import World
from stormo.parallel.base import Strategy

_ABSENT = -(2**62)
_DIGITS = 15  # hexadecimal ones, which fit a 64-bit number
_Described = Mapping[str, tuple[str, list[int], bool]]  # name: type, shape, whether it is part of the model's state


@dataclass(frozen=True, kw_only=True)
class StoredBuffers:
    """What this worker stores of the buffers."""

    own: dict[str, Tensor] = field(default_factory=dict)  # as its own
    model: dict[str, Tensor] = field(default_factory=dict)  # as those of the model, for any other mesh
    sources: dict[str, int] = field(default_factory=dict)  # who stores a replica that is not in the model's state


@torch.no_grad()
def stored_buffers(world: World, strategy: Strategy) -> StoredBuffers:
    """What this worker stores. Every worker calls it.

    The model's state gets the mean of buffers of floating point that differ, and the first worker's of all others.
    """
    held = {name: buffer.detach() for name, buffer in strategy.named_buffers()}
    kept = kept_buffers(strategy).keys()
    described = _described(world, {n: (DTYPE_NAMES[t.dtype], list(t.shape), n in kept) for n, t in held.items()})
    found = StoredBuffers()
    firsts, differing = _compare(world, held, list(described))
    means = _means(world, held, {name: described[name] for name in differing})
    for name, (_, _, is_kept) in described.items():
        is_first = firsts[name] == world.rank
        if name in differing and name in held:
            found.own[name] = held[name]
        elif name not in differing and not is_kept:
            found.sources[name] = firsts[name]
            if is_first:
                found.own[name] = held[name]
        if is_kept and is_first:
            found.model[name] = means.get(name, held[name])
    return found


def _described(world: World, held: _Described) -> _Described:
    """All buffers that some worker holds: without stages those of this worker."""
    if world.mesh.pipeline == 1:
        return held
    is_speaker = not any(place for axis, place in world.grid.at.items() if axis != "pipeline")
    gathered = world.gather_json(held if is_speaker else {})
    union: dict[str, Any] = {}
    for each in gathered or []:
        union |= each
    shared: _Described = world.share_json(union)
    return shared


def _compare(world: World, held: Mapping[str, Tensor], names: list[str]) -> tuple[dict[str, int], set[str]]:
    """The first worker that holds each buffer, and those of which not all holders have the same values."""
    if not names:
        return {}, set()
    rows = torch.full((len(names), 5), _ABSENT)
    for row, name in zip(rows, names, strict=True):
        if name in held:
            digest = weights_digest({name: held[name]})
            words = [int(digest[start : start + _DIGITS], 16) for start in (0, _DIGITS)]
            row.copy_(torch.tensor([*words, *(-word for word in words), world.size - world.rank]))
    world.max(rows)
    firsts = {name: world.size - int(row[4]) for row, name in zip(rows, names, strict=True)}
    return firsts, {name for row, name in zip(rows, names, strict=True) if not torch.equal(row[:2], -row[2:4])}


def _means(world: World, held: Mapping[str, Tensor], differing: _Described) -> dict[str, Tensor]:
    """The means of those that belong to the model's state and have a mean, over the workers that hold them."""
    names = [n for n, (dtype, _, is_kept) in differing.items() if is_kept and DTYPES[dtype].is_floating_point]
    if not names:
        return {}
    sizes = [torch.Size(differing[name][1]).numel() for name in names]
    sums = torch.zeros(len(names) + sum(sizes), dtype=torch.float64)
    pieces = sums[len(names) :].split(sizes)
    for number, (name, piece) in enumerate(zip(names, pieces, strict=True)):
        if name in held:
            sums[number] = 1.0
            piece.copy_(held[name].reshape(-1))
    world.sum(sums)
    return {
        name: (piece / count).to(DTYPES[differing[name][0]]).reshape(differing[name][1])
        for name, count, piece in zip(names, sums, pieces, strict=False)
    }
