"""How the workers are arranged: a mesh of named axes, its presets, and every check of the arithmetic.

Ranks are counted with the last axis fastest, so that the axis with the most traffic, `tensor`, lies within a node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from stormo.config.strategies import StrategySpec
from stormo.errors import SettingError, counted, unknown_name

AXES = ("pipeline", "replicate", "shard", "tensor")
# What each axis does, in words for help and explanations.
MEANINGS: dict[str, str] = {
    "pipeline": "layers in stages, one after the other",
    "replicate": "copies of the model, gradients averaged",
    "shard": "weights, gradients and optimizer state cut into parts",
    "tensor": "every large layer cut into parts that compute together",
}
# What --zero makes the axis shard cut.
CUTS = {1: "optimizer state", 2: "optimizer state and gradients", 3: "optimizer state, gradients and weights"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """The lengths of the axes."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """The lengths in the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def size(self) -> int:
        """Workers."""
        return math.prod(self.sizes)

    @property
    def data_size(self) -> int:
        """Parts of a batch: workers along pipeline and tensor take the same samples."""
        return self.replicate * self.shard

    @property
    def model_size(self) -> int:
        """Workers that hold one copy of the model together."""
        return self.pipeline * self.shard * self.tensor

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank is on each axis."""
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
    """The mesh of all workers from the axes that were set; their product must be the number of workers."""
    mesh = Mesh(**axes)
    if mesh.size == world_size:
        return mesh
    product = " × ".join(str(size) for size in axes.values())
    made = f"{product} = {mesh.size}" if len(axes) > 1 else str(mesh.size)
    raise SettingError(
        f"--mesh {text} was set",
        f"that is {made} and there {'is' if world_size == 1 else 'are'} {counted(world_size, 'worker')} ({origin})",
        _nearest(axes, mesh, world_size),
    )


def _nearest(axes: Mapping[str, int], mesh: Mesh, world_size: int) -> str:
    start = f"start {counted(mesh.size, 'worker')}"
    for axis in ("replicate", "shard", *axes):
        others = mesh.size // getattr(mesh, axis)
        if world_size % others == 0 and world_size // others >= 1:
            changed = {**axes, axis: world_size // others}
            named = ",".join(f"{name}={size}" for name, size in changed.items() if size > 1 or name in axes)
            return f"set --mesh {named}, or {start}"
    return start


def preset_mesh(spec: StrategySpec, world_size: int, workers_per_node: int) -> Mesh:
    """The mesh of a strategy that was named."""
    assert spec.axis is not None
    if spec.replicates_nodes:
        if world_size % workers_per_node or world_size == workers_per_node:
            why = f"there is one node, of {counted(workers_per_node, 'worker')}"
            if world_size % workers_per_node:
                why = f"{world_size} workers do not divide into nodes of {workers_per_node}"
            raise SettingError(
                f"--strategy {spec.name} was set",
                f"it shards within a node and copies between nodes, and {why}",
                "set --strategy fsdp, or say the shape with --mesh replicate=…,shard=…",
            )
        return Mesh(replicate=world_size // workers_per_node, **{spec.axis: workers_per_node})
    return Mesh(**{spec.axis: world_size})
