"""Checks that the workers' replicas of a model are still the same, at the start and end of a loop and before a save.

It finds what a script does on one worker alone: weights loaded there, a learning rate lowered for a metric of its own
samples, a `loss.backward()` that was left in. Two numbers of every tensor are compared, not its bits, because last bits
may differ between machines: the norm, and the sum of its values under fixed random signs, in which small differences
of many values do not cancel.
"""

from __future__ import annotations

import functools
import sys
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
_NUM_SIGNS = 4093  # a prime, so that the rows of a matrix do not begin at the same sign
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)
_HALVES = (torch.bfloat16, torch.float16)


class _Number(NamedTuple):
    kind: str  # "rate", "parameter" or "buffer"
    name: str
    value: float
    tolerance: float


class ReplicaCheck:
    """The learning rates, parameters and buffers of all that a script has wrapped, in one or two numbers each."""

    def __init__(self, world: World, groups: list[Group]) -> None:
        self._world = world
        self._groups = groups
        self._numbers: list[_Number] = []
        self._told: set[str] = set()

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
        is_same |= torch.tensor([number.name in self._told for number in self._numbers])
        return 0 if bool(is_same.all()) else int((~is_same).nonzero()[0]) + 1

    def report(self, differences: Sequence[int]) -> None:
        """Raise, on all workers, what one has found; a buffer that differs is told once, as it may be a cache."""
        rank = next((rank for rank, found in enumerate(differences) if found), None)
        if rank is None:
            return
        number = self._numbers[differences[rank] - 1]
        if number.kind == "rate":
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
        self._told.add(number.name)
        if self._world.is_main:
            print(  # noqa: T201
                f"stormo: buffer {number.name} differs between rank 0 and rank {rank}: each worker computes it from "
                "its own samples, and rank 0's is saved. Compute it with world.sum(), or register it with "
                "persistent=False if it is no part of the model.",
                file=sys.stderr,
                flush=True,
            )


def _numbers_of(group: Group) -> Iterator[_Number]:
    for index, optimizer in enumerate(group.optimizers, 1):
        for place, settings in enumerate(optimizer.param_groups, 1):
            rate = float(settings.get("lr", 0.0))
            yield _Number("rate", f"of optimizer {index}, group {place}", rate, _TOLERANCE * abs(rate))
    named: list[tuple[str, str, Tensor]] = [("parameter", *each) for each in group.model.named_parameters()]
    if not group.averages_buffers:
        named += [("buffer", *each) for each in _persistent_buffers(group.model)]
    named = [each for each in named if _has_norm(each[2])]
    for (kind, name, tensor), (norm, signed) in zip(named, _summaries([each[2] for each in named]), strict=True):
        epsilon = float(torch.finfo(tensor.dtype).eps)
        yield _Number(kind, name, norm, max(_TOLERANCE, epsilon) * norm)
        # What roundings may add up to over a long training: half of the digits.
        yield _Number(kind, name, signed, epsilon**0.5 * norm)


def _persistent_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    # Not by state_dict(), which a model may override.
    return [
        (f"{place}.{name}".lstrip("."), buffer)
        for place, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    ]


def _has_norm(tensor: Tensor) -> bool:
    return not (is_lazy(tensor) or tensor.is_inference()) and tensor.dtype in _DTYPES and tensor.layout == torch.strided


@torch.no_grad()
def _summaries(tensors: list[Tensor]) -> list[tuple[float, float]]:
    """Norm and signed sum of each, with one synchronisation for each device."""
    found = [(0.0, 0.0)] * len(tensors)
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        places = [index for index, tensor in enumerate(tensors) if tensor.device == device]
        with torch.autocast(device.type, enabled=False):  # the script may loop inside of one
            both = [torch.stack([_norm(tensors[index]), _signed_sum(tensors[index])]) for index in places]
        for index, (norm, signed) in zip(places, torch.stack(both).tolist(), strict=True):
            found[index] = norm, signed
    return found


def _norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float32 if tensor.dtype in _HALVES else None)
    return norm.double()


def _signed_sum(tensor: Tensor) -> Tensor:
    """The sum of all values under signs that repeat, so that nothing as large as the tensor is made."""
    flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)
    num_rows, num_left = divmod(len(flat), _NUM_SIGNS)
    total = flat[len(flat) - num_left :].double() @ _signs(flat.device, torch.float64)[:num_left]
    if num_rows:
        rows = flat[: num_rows * _NUM_SIGNS].view(num_rows, _NUM_SIGNS)
        if flat.dtype in _HALVES:  # a product of halves would be rounded to halves
            total += rows.sum(dim=0, dtype=torch.float32).double() @ _signs(flat.device, torch.float64)
        else:
            total += (rows @ _signs(flat.device, flat.dtype)).double().sum()
    return total


@functools.cache
def _signs(device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randint(0, 2, (_NUM_SIGNS,), generator=generator, device="cpu").mul(2).sub(1).to(device, dtype)
