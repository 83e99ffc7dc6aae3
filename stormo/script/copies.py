"""Whether the workers' copies of a model are still the same, looked at whenever a loop over a loader starts.

What a script does on one worker alone shows here: weights loaded there, a layer drawn anew in the middle of a training,
a rate lowered for a metric of its own samples, a `loss.backward()` that was left in. Norms are compared, because last
bits may differ between machines. A buffer that differs is told and not refused: a cache may.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from stormo.errors import SettingError
from stormo.world.world import World

if TYPE_CHECKING:
    from stormo.script.stepping import Group

_TOLERANCE = 1e-5
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)


@dataclass(frozen=True, slots=True)
class _Number:
    """A rate, or the norm of a tensor."""

    kind: str
    name: str
    value: float


class Copies:
    """The rates, weights and buffers of all that a script has wrapped, in one number each."""

    def __init__(self, world: World, groups: list[Group]) -> None:
        self._world = world
        self._groups = groups
        self._norms = WeakIdKeyDictionary()  # of a tensor: its version, address and norm
        self._numbers: list[_Number] = []
        self._told: set[str] = set()

    def look(self) -> int:
        """Take the numbers of this worker; how many there are."""
        if self._world.size > 1:
            self._numbers = [number for group in self._groups for number in self._of(group)]
        return len(self._numbers)

    def first_difference(self) -> int:
        """Which of the numbers, from 1, is another one on the main worker; 0 where none is. All workers call it."""
        here = torch.tensor([number.value for number in self._numbers], dtype=torch.float64)
        main = self._world.broadcast(here.clone())
        is_same = (here - main).abs() <= _TOLERANCE * torch.maximum(here.abs(), main.abs())
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
            _Number("rate", f"of optimizer {number}, group {place}", float(settings.get("lr", 0.0)))
            for number, optimizer in enumerate(group.optimizers, 1)
            for place, settings in enumerate(optimizer.param_groups, 1)
        ]
        named: list[tuple[str, str, Tensor]] = [("parameter", *each) for each in group.model.named_parameters()]
        if not group.averages_buffers:
            named += [("buffer", *each) for each in _persistent_buffers(group.model)]
        named = [(kind, name, tensor) for kind, name, tensor in named if _has_norm(tensor)]
        fresh = [tensor for _, _, tensor in named if self._norms.get(tensor, ())[:2] != _stamp(tensor)]
        for tensor, norm in zip(fresh, _norms(fresh), strict=True):
            self._norms[tensor] = (*_stamp(tensor), norm)
        return rates + [_Number(kind, name, self._norms[tensor][2]) for kind, name, tensor in named]


def _persistent_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        (f"{place}.{name}".lstrip("."), buffer)
        for place, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


def _has_norm(tensor: Tensor) -> bool:
    return not (is_lazy(tensor) or tensor.is_inference()) and tensor.dtype in _DTYPES and tensor.layout == torch.strided


def _stamp(tensor: Tensor) -> tuple[int, int]:
    return tensor._version, tensor.data_ptr()


@torch.no_grad()
def _norms(tensors: list[Tensor]) -> list[float]:
    """One for each, with one wait for each device."""
    found = [0.0] * len(tensors)
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        places = [index for index, tensor in enumerate(tensors) if tensor.device == device]
        norms = [torch.linalg.vector_norm(tensors[index], dtype=_wide(tensors[index])).double() for index in places]
        for index, norm in zip(places, torch.stack(norms).tolist(), strict=True):
            found[index] = norm
    return found


def _wide(tensor: Tensor) -> torch.dtype | None:
    return torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else None
