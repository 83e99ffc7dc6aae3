"""The device mesh: named axes, the presets of strategies, and the checks of their arithmetic.

Ranks are row-major: the last axis, `tensor`, which has the most traffic, lies within a node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from stormo.config.strategies import StrategySpec
from stormo.errors import SettingError, pluralize, unknown_name

AXES = ("pipeline", "replicate", "shard", "tensor")
# What is sharded, by --zero.
SHARDED = {1: "optimizer state", 2: "optimizer state and gradients", 3: "optimizer state, gradients and weights"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """The sizes of the axes."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """In the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def size(self) -> int:
        """Number of workers."""
        return math.prod(self.sizes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The index of a rank on each axis."""
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return {axis: found[axis] for axis in AXES}

    def __str__(self) -> str:
        named = [f"{axis}={size}" for axis, size in zip(AXES, self.sizes, strict=True) if size > 1]
        return ",".join(named) or "one worker"


def parse_mesh(text: str) -> dict[str, int]:
    """The axes of a `--mesh`, in the order given."""
    found: dict[str, int] = {}
    for item in text.split(","):
        axis, equals, number = (piece.strip() for piece in item.partition("="))
        if not equals or not number.isdecimal() or int(number) < 1:
            raise SettingError(
                f"--mesh {text} was set",
                f"{item.strip()!r} is no axis with a number of workers",
                'set something like --mesh "replicate=2,shard=4"',
            )
        if axis not in AXES:
            raise unknown_name("axis", axis, AXES)
        if axis in found:
            raise SettingError(f"--mesh {text} was set", f"it names {axis} twice", "name every axis once")
        found[axis] = int(number)
    return found


def mesh_of(axes: Mapping[str, int], text: str, world_size: int, origin: str) -> Mesh:
    """The mesh of all workers; the product of its axes must be the number of workers."""
    mesh = Mesh(**axes)
    if mesh.size == world_size:
        return mesh
    product = " × ".join(str(size) for size in axes.values())
    made = f"{product} = {mesh.size}" if len(axes) > 1 else str(mesh.size)
    raise SettingError(
        f"--mesh {text} was set",
        f"that is {made} and there {'is' if world_size == 1 else 'are'} {pluralize(world_size, 'worker')} ({origin})",
        _nearest(axes, mesh, world_size),
    )


def _nearest(axes: Mapping[str, int], mesh: Mesh, world_size: int) -> str:
    start = f"start {pluralize(mesh.size, 'worker')}"
    for axis in ("replicate", "shard", *axes):
        others = mesh.size // getattr(mesh, axis)
        if world_size % others == 0 and world_size // others >= 1:
            changed = {**axes, axis: world_size // others}
            named = ",".join(f"{name}={size}" for name, size in changed.items() if size > 1 or name in axes)
            return f"set --mesh {named}, or {start}"
    return start


def preset_mesh(spec: StrategySpec, world_size: int, workers_per_node: int) -> Mesh:
    """The mesh of a strategy with an axis."""
    assert spec.axis is not None
    if spec.replicates_nodes:
        if world_size % workers_per_node or world_size == workers_per_node:
            why = f"there is one node, of {pluralize(workers_per_node, 'worker')}"
            if world_size % workers_per_node:
                why = f"{world_size} workers do not divide into nodes of {workers_per_node}"
            raise SettingError(
                f"--strategy {spec.name} was set",
                f"it shards within a node and replicates between nodes, and {why}",
                "set --strategy fsdp, or --mesh replicate=…,shard=…",
            )
        return Mesh(replicate=world_size // workers_per_node, **{spec.axis: workers_per_node})
    return Mesh(**{spec.axis: world_size})
