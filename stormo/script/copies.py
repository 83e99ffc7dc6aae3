"""Whether the workers' copies of a model are still the same, looked at whenever a loop over a loader starts or ends.

What a script does on one worker alone shows here: weights loaded there, a layer drawn anew in the middle of a training,
a rate lowered for a metric of its own samples, a `loss.backward()` that was left in. Of every tensor two numbers are
compared, and not its bits, because last bits may differ between machines: its norm, and the sum of its values with
signs that are drawn once, in which small differences of many values do not cancel. A buffer that differs is told and
not refused: a cache may.
"""

from __future__ import annotations

import functools
import sys
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stormo.distributed.world import World
from stormo.errors import SettingError

if TYPE_CHECKING:
    from stormo.script.stepping import Group

_TOLERANCE = 1e-5  # of rates and norms
_NUM_SIGNS = 4093  # a prime, so that no row of a matrix begins where another one did
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)


@dataclass(frozen=True, slots=True)
class _Number:
    """A rate, or one of those that stand for a tensor."""

    kind: str
    name: str
    value: float
    slack: float  # a difference that is none


class Copies:
    """The rates, weights and buffers of all that a script has wrapped, in one number each."""

    def __init__(self, world: World, groups: list[Group]) -> None:
        self._world = world
        self._groups = groups
        self._numbers: list[_Number] = []
        self._told: set[str] = set()

    def look(self) -> int:
        """Take the numbers of this worker; one that stands for all of them, and is 0 where there are none."""
        if self._world.size > 1:
            self._numbers = [number for group in self._groups for number in self._of(group)]
        values = array("d", [number.value for number in self._numbers])
        return len(values) << 32 | zlib.crc32(values.tobytes()) if values else 0

    def may_differ(self, looks: Sequence[int]) -> bool:
        """Whether the numbers of all workers must be compared one by one.

        Copies of another make are found by the next backward, which says more of them.
        """
        return any(look != looks[0] for look in looks) and all(look >> 32 == len(self._numbers) for look in looks)

    def first_difference(self) -> int:
        """Which of the numbers, from 1, is another one on the main worker; 0 where none is. All workers call it."""
        here = torch.tensor([number.value for number in self._numbers], dtype=torch.float64)
        main = self._world.broadcast(here.clone())
        slack = torch.tensor([number.slack for number in self._numbers], dtype=torch.float64)
        is_same = (here - main).abs() <= slack
        is_same |= (here == main) | (here.isnan() & main.isnan())
        is_same |= torch.tensor([number.name in self._told for number in self._numbers])
        return 0 if bool(is_same.all()) else int((~is_same).nonzero()[0]) + 1

    def answer(self, differences: list[int]) -> None:
        """Refuse what one worker has found, the same on all of them, or tell it where it may be meant."""
        rank = next((rank for rank, found in enumerate(differences) if found), None)
        if rank is None:
            return
        index = differences[rank] - 1
        number = self._numbers[index]
        if number.kind == "rate":
            values = self._world.share_json(self._world.gather_json(number.value))
            raise SettingError(
                f"the learning rate {number.name} is {values[0]:g} on rank 0",
                f"it is {values[rank]:g} on rank {rank}, and their weights would part",
                "decide it by what all workers know, such as the world.sum() of a metric, and pass the scheduler to "
                "world.wrap()",
            )
        if number.kind == "parameter":
            raise SettingError(
                f"the parameter {number.name} is another one on rank {rank} than on rank 0",
                "every worker trains a copy of one model",
                "call world.backward(loss) instead of loss.backward(), and let all workers load or draw the same "
                "weights and optimizer state, or do it before world.wrap()",
            )
        self._told.add(number.name)
        if self._world.is_main:
            print(  # noqa: T201
                f"stormo: the buffer {number.name} is another one on rank {rank} than on rank 0, because each worker "
                "keeps it of its own samples; what is saved is rank 0's. Keep it of all samples by world.sum(), or "
                "register it with persistent=False if it is no part of the model.",
                file=sys.stderr,
                flush=True,
            )

    def _of(self, group: Group) -> list[_Number]:
        rates = [
            _Number("rate", f"of optimizer {number}, group {place}", rate, _TOLERANCE * abs(rate))
            for number, optimizer in enumerate(group.optimizers, 1)
            for place, settings in enumerate(optimizer.param_groups, 1)
            for rate in [float(settings.get("lr", 0.0))]
        ]
        named: list[tuple[str, str, Tensor]] = [("parameter", *each) for each in group.model.named_parameters()]
        if not group.averages_buffers:
            named += [("buffer", *each) for each in _persistent_buffers(group.model)]
        named = [(kind, name, tensor) for kind, name, tensor in named if _has_norm(tensor)]
        found = _summed_up([tensor for _, _, tensor in named])
        return rates + [
            _Number(kind, name, value, slack)
            for (kind, name, tensor), (norm, signed) in zip(named, found, strict=True)
            for value, slack in ((norm, _norm_rounding(tensor) * norm), (signed, _rounding(tensor) * norm))
        ]


def _persistent_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        (f"{place}.{name}".lstrip("."), buffer)
        for place, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


def _has_norm(tensor: Tensor) -> bool:
    return not (is_lazy(tensor) or tensor.is_inference()) and tensor.dtype in _DTYPES and tensor.layout == torch.strided


def _norm_rounding(tensor: Tensor) -> float:
    """A value of two bytes that is rounded otherwise may be more than the tolerance by itself."""
    return max(_TOLERANCE, float(torch.finfo(tensor.dtype).eps))


def _rounding(tensor: Tensor) -> float:
    """What roundings may add up to over a long training on machines that differ in them: half of the digits."""
    return float(torch.finfo(tensor.dtype).eps ** 0.5)


@torch.no_grad()
def _summed_up(tensors: list[Tensor]) -> list[tuple[float, float]]:
    """Norm and signed sum of each, with one wait for each device."""
    found = [(0.0, 0.0)] * len(tensors)
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        places = [index for index, tensor in enumerate(tensors) if tensor.device == device]
        with torch.autocast(device.type, enabled=False):  # the script may loop inside of one
            both = [
                torch.stack([torch.linalg.vector_norm(each, dtype=_wide(each)).double(), _signed_sum(each)])
                for each in (tensors[index] for index in places)
            ]
        for index, (norm, signed) in zip(places, torch.stack(both).tolist(), strict=True):
            found[index] = norm, signed
    return found


def _signed_sum(tensor: Tensor) -> Tensor:
    """The sum of all values, each with the sign of its place, which repeats: nothing as large as the tensor is made."""
    flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)
    num_rows, num_left = divmod(len(flat), _NUM_SIGNS)
    total = flat[len(flat) - num_left :].double() @ _signs(flat.device, torch.float64)[:num_left]
    if num_rows:
        rows = flat[: num_rows * _NUM_SIGNS].view(num_rows, _NUM_SIGNS)
        if (wide := _wide(flat)) is None:
            total += (rows @ _signs(flat.device, flat.dtype)).double().sum()
        else:  # a product of halves would be rounded to halves
            total += rows.sum(dim=0, dtype=wide).double() @ _signs(flat.device, torch.float64)
    return total


@functools.cache
def _signs(device: torch.device, dtype: torch.dtype) -> Tensor:
    draws = torch.Generator("cpu").manual_seed(0)
    return torch.randint(0, 2, (_NUM_SIGNS,), generator=draws, device="cpu").mul(2).sub(1).to(device, dtype)


def _wide(tensor: Tensor) -> torch.dtype | None:
    return torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else None
