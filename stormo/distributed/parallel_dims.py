"""The workers along the axes of the mesh, and the collectives among them. Built on torch's DeviceMesh.

Every set of axes gives a subgroup: the workers whose coordinates differ from this one's only along these axes. A
subgroup of one worker does not communicate.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from stormo.config.mesh import AXES, Mesh

DATA, MODEL = ("replicate", "shard"), ("pipeline", "shard", "tensor")
# torch 2.13 renamed it.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    """Set a variable for a moment, unless the user has set it."""
    if value is None or name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


class SubGroup:
    """Workers along some axes: this one's rank among them, and their collectives."""

    def __init__(self, ranks: Sequence[int], rank: int, group: dist.ProcessGroup | None) -> None:
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(rank)
        self.size = len(self.ranks)
        self.group = group  # None for one worker

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """Largest value in place."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tensor

    def gather(self, received: Tensor, sent: Tensor) -> None:
        """Every worker's tensor, one after the other, on all."""
        _all_gather(received.view(-1), sent.view(-1), group=self.group)  # flat, as Gloo wants them


class ParallelDims:
    """The mesh of a run, seen from one worker. All workers ask for the same subgroups in the same order."""

    def __init__(self, mesh: Mesh, rank: int, device: torch.device, timeout: timedelta | None = None) -> None:
        self.mesh = mesh
        self.rank = rank
        self.at = mesh.coordinates(rank)
        self._device = device
        self._timeout = timeout
        self._devices: DeviceMesh | None = None
        self._subgroups: dict[tuple[str, ...], SubGroup] = {}

    @property
    def devices(self) -> DeviceMesh:
        """torch's mesh of the axes with several workers and of `shard`, which torch's sharding always needs."""
        if self._devices is None:
            axes = tuple(axis for axis in AXES if axis == "shard" or getattr(self.mesh, axis) > 1)
            ranks = torch.arange(self.mesh.size).view([getattr(self.mesh, axis) for axis in axes])
            # Groups made here: those of torch's mesh would have torch's default timeout.
            groups = [self._group((axis,)) for axis in axes]
            self._devices = DeviceMesh.from_group(groups, self._device.type, ranks, mesh_dim_names=axes)
        return self._devices

    def _group(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        """A new process group of the workers along these axes, or that of all workers. All workers call it."""
        groups = self._groups(axes)
        if len(groups) == 1:
            assert dist.group.WORLD is not None, "the process group exists"
            return dist.group.WORLD
        mine: dist.ProcessGroup = dist.new_subgroups_by_enumeration(groups, timeout=self._timeout)[0]
        return mine

    def subgroup(self, *axes: str) -> SubGroup:
        """The workers along these axes. All workers call it."""
        key = tuple(axis for axis in AXES if axis in axes)
        if key not in self._subgroups:
            self._subgroups[key] = self._make(key)
        return self._subgroups[key]

    def small_messages(self, *axes: str, algorithm: str | None = None) -> SubGroup:
        """The workers along these axes, with a communicator of their own; NCCL's is on a stream of high priority.

        A small message that the computation waits for then never queues behind buckets of gradients. And on Gloo,
        workers that use different parameters may start a message and a bucket in different orders. All workers call it.

        Args:
            axes: along which the workers differ.
            algorithm: of NCCL for this communicator; None for NCCL's own choice.
        """
        plain = self.subgroup(*axes)
        if plain.size == 1:
            return plain
        is_gloo, options = dist.get_backend(plain.group) == "gloo", None
        if not is_gloo:
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            if self._timeout is not None:
                options._timeout = self._timeout
        with _environment("NCCL_ALGO", algorithm):  # NCCL reads it when it makes a communicator
            backend = "gloo" if is_gloo else "nccl"
            group = dist.new_subgroups_by_enumeration(self._groups(axes), self._timeout, backend, options)[0]
            dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        return SubGroup(plain.ranks, self.rank, group)

    def _make(self, axes: tuple[str, ...]) -> SubGroup:
        ranks = self.ranks(axes, self.at)
        used = [axis for axis in axes if getattr(self.mesh, axis) > 1]
        if len(ranks) == 1:
            return SubGroup(ranks, self.rank, None)
        is_own_axis = len(used) == 1 and len(ranks) < self.mesh.size
        group = self.devices.get_group(used[0]) if is_own_axis else self._group(axes)
        return SubGroup(ranks, self.rank, group)

    def ranks(self, axes: Sequence[str], at: dict[str, int]) -> tuple[int, ...]:
        """The ranks along these axes through a coordinate of the mesh."""
        fixed = {axis: at[axis] for axis in AXES if axis not in axes}
        return tuple(rank for rank in range(self.mesh.size) if self.mesh.coordinates(rank).items() >= fixed.items())

    def _groups(self, axes: Sequence[str]) -> list[list[int]]:
        """The ranks of every subgroup along these axes."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.mesh.size):
            at = self.mesh.coordinates(rank)
            found.setdefault(tuple(at[axis] for axis in AXES if axis not in axes), []).append(rank)
        return list(found.values())
