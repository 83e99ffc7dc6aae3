"""What workers have kept back of their gradients for the next step, in a checkpoint.

The section `local` holds `3/error/…` of worker 3, and `basis/…`, which all workers have alike. Where the workers are
others, each gets an equal part of the sum of what all had: that sum is what the next mean gradient lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stormo.checkpoint.agreement import read_together
from stormo.checkpoint.layout import LOCAL
from stormo.checkpoint.reader import Reader, Wanted
from stormo.checkpoint.shard import Box, whole_box
from stormo.distributed.world import World
from stormo.parallel.base import Strategy

KEPT_BACK = "kept_back"  # the key among the plain values


def kept_boxes(world: World, strategy: Strategy) -> list[Box]:
    """This worker's own; on the main one also what all have."""
    if strategy.low_rank is None:
        return []
    own = {f"{world.rank}/error/{name}": tensor for name, tensor in strategy.low_rank.errors.items()}
    if world.is_main:
        own |= {f"basis/{name}": tensor for name, tensor in strategy.low_rank.bases.items()}
    return [whole_box(LOCAL, name, tensor) for name, tensor in own.items()]


def take_kept(world: World, path: Path, strategy: Strategy, state: Mapping[str, Any], *, is_same: bool) -> None:
    """Go on with what was kept back, or begin with nothing. Every worker calls it.

    Args:
        world: of the workers now.
        path: of the checkpoint.
        strategy: whose gradients travel so.
        state: the plain values of the checkpoint.
        is_same: whether every worker is where it was.
    """
    if strategy.low_rank is None:
        return
    errors: dict[str, Tensor] = {}
    bases: dict[str, Tensor] = {}
    with read_together(world, path):
        if KEPT_BACK in state:
            # Of other workers the main one reads what all have kept back, for all of them.
            ranks = [world.rank] if is_same else range(state["world_size"] if world.is_main else 0)
            with Reader(path) as reader:
                bases = _read(reader, 0, "basis/")
                for rank in ranks:
                    for name, tensor in _read(reader, rank, f"{rank}/error/").items():
                        errors[name] = errors[name].add_(tensor) if name in errors else tensor
            for error in [] if is_same else errors.values():
                error.div_(world.size)
    strategy.low_rank.take(errors if is_same else world.share_tensors(errors), bases)


def _read(reader: Reader, rank: int, prefix: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    wanted = []
    for name, entry in reader.local(rank).items():
        if name.startswith(prefix):
            into = found[name.removeprefix(prefix)] = torch.empty(entry.shape, dtype=entry.dtype)
            wanted.append(Wanted(section=LOCAL, name=name, offset=(0,) * into.ndim, into=into))
    reader.fill(wanted)
    return found
