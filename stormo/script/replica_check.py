"""Checks that the workers' replicas of a model are still the same, at the start and end of a loop and before a save.

It finds what a script does on one worker alone: weights loaded there, a learning rate lowered for that worker's metric,
a `loss.backward()` that was left in. Norms of tensors are compared, not their bits, because last bits may differ
between machines.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stormo.distributed.world import World
from stormo.errors import SettingError

if TYPE_CHECKING:
    from stormo.script.stepping import Group

_TOLERANCE = 1e-5  # of learning rates and norms
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)
_HALVES = (torch.bfloat16, torch.float16)


class _Number(NamedTuple):
    kind: str  # "learning rate", "parameter" or "buffer"
    name: str
    value: float
    tolerance: float


class ReplicaCheck:
    """The learning rates, parameters and buffers of all that a script has wrapped, in one number each."""

    def __init__(self, world: World, groups: list[Group]) -> None:
        self._world = world
        self._groups = groups
        self._numbers: list[_Number] = []
        self._reported: set[str] = set()

    def fingerprint(self) -> int:
        """Take this worker's numbers; one that stands for all of them, 0 where there are none."""
        if self._world.size > 1:
            self._numbers = [number for group in self._groups for number in _numbers_of(group)]
        values = array("d", [number.value for number in self._numbers])
        return len(values) << 32 | zlib.crc32(values.tobytes()) if values else 0

    def may_differ(self, fingerprints: Sequence[int]) -> bool:
        """Whether the numbers must be compared one by one. Models of another shape are found by the next backward."""
        is_comparable = all(each >> 32 == len(self._numbers) for each in fingerprints)
        return is_comparable and any(each != fingerprints[0] for each in fingerprints)

    def first_difference(self) -> int:
        """Which number, from 1, differs from rank 0's; 0 where none does. All workers call it."""
        here = torch.tensor([number.value for number in self._numbers], dtype=torch.float64)
        main = self._world.broadcast(here.clone())
        tolerance = torch.tensor([number.tolerance for number in self._numbers], dtype=torch.float64)
        is_same = ((here - main).abs() <= tolerance) | (here == main) | (here.isnan() & main.isnan())
        is_same |= torch.tensor([number.name in self._reported for number in self._numbers])
        return 0 if bool(is_same.all()) else int((~is_same).nonzero()[0]) + 1

    def report(self, differences: Sequence[int]) -> str | None:
        """Raise on all workers the difference that one found. A buffer may be a cache: it is reported once instead."""
        rank = next((rank for rank, found in enumerate(differences) if found), None)
        if rank is None:
            return None
        number = self._numbers[differences[rank] - 1]
        if number.kind == "learning rate":
            values = self._world.broadcast_object(self._world.gather_objects(number.value))
            raise SettingError(
                f"the learning rate {number.name} is {values[0]:g} on rank 0",
                f"it is {values[rank]:g} on rank {rank}, so their weights would differ",
                "compute it from world.sum() of a metric, and pass the scheduler to world.wrap()",
            )
        if number.kind == "parameter":
            raise SettingError(
                f"parameter {number.name} differs between rank 0 and rank {rank}",
                "every worker trains a replica of one model",
                "call world.backward(loss) instead of loss.backward(), and let all workers load or draw the same "
                "weights and optimizer state, or do it before world.wrap()",
            )
        self._reported.add(number.name)
        return (
            f"buffer {number.name} differs between rank 0 and rank {rank}: each worker computes it from its own "
            "samples, and rank 0's is saved. Compute it with world.sum(), or register it with persistent=False if it "
            "is no part of the model."
        )


def _numbers_of(group: Group) -> Iterator[_Number]:
    for index, optimizer in enumerate(group.optimizers, 1):
        for number, settings in enumerate(optimizer.param_groups, 1):
            lr = float(settings.get("lr", 0.0))
            yield _Number("learning rate", f"of optimizer {index}, group {number}", lr, _TOLERANCE * abs(lr))
    named: list[tuple[str, str, Tensor]] = []
    if not group.is_sharded:
        named += [("parameter", *each) for each in group.model.named_parameters()]
    if not group.averages_buffers:
        named += [("buffer", *each) for each in _persistent_buffers(group.model)]
    named = [each for each in named if _has_norm(each[2])]
    for (kind, name, tensor), norm in zip(named, _norms([each[2] for each in named]), strict=True):
        yield _Number(kind, name, norm, max(_TOLERANCE, float(torch.finfo(tensor.dtype).eps)) * norm)


def _persistent_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    # Not by state_dict(), which a model may override.
    return [
        (f"{path}.{name}".lstrip("."), buffer)
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    ]


def _has_norm(tensor: Tensor) -> bool:
    return not (is_lazy(tensor) or tensor.is_inference()) and tensor.dtype in _DTYPES and tensor.layout == torch.strided


@torch.no_grad()
def _norms(tensors: list[Tensor]) -> list[float]:
    """The norm of each, with one synchronisation for each device."""
    found = [0.0] * len(tensors)
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        indices = [index for index, tensor in enumerate(tensors) if tensor.device == device]
        with torch.autocast(device.type, enabled=False):  # the script may loop inside of one
            norms = [
                torch.linalg.vector_norm(each, dtype=torch.float32 if each.dtype in _HALVES else None).double()
                for each in (tensors[index] for index in indices)
            ]
        for index, norm in zip(indices, torch.stack(norms).tolist(), strict=True):
            found[index] = norm
    return found
