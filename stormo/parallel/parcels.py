"""What travels between workers and servers: tensors of any types in one piece of host memory.

A parcel goes out with gradients and comes back with weights, in the same memory: a server answers what it has received.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

GOES_ON, ENDS, FAILED = range(3)  # what the sender says of itself

_ALIGNMENT_BYTES = 64  # of every tensor, for the vector loads of optimizers
_HEAD_BYTES = 16


def deal(sizes_bytes: Sequence[int], num_servers: int) -> list[list[int]]:
    """For each server the numbers of the tensors that it keeps: the largest first, each to who has the fewest bytes."""
    dealt: list[list[int]] = [[] for _ in range(num_servers)]
    loads = [0] * num_servers
    for number in sorted(range(len(sizes_bytes)), key=lambda number: -sizes_bytes[number]):
        # Of equal loads to who has the fewest tensors, so that none is left without one.
        least = min(range(num_servers), key=lambda server: (loads[server], len(dealt[server])))
        dealt[least].append(number)
        loads[least] += sizes_bytes[number]
    return [sorted(numbers) for numbers in dealt]


class Parcel:
    """Room for tensors like the given ones, for a number and a mark of the sender, and for a flag of each tensor."""

    def __init__(self, tensors: Sequence[Tensor], *, is_pinned: bool = False) -> None:
        places, at = list[int](), _aligned(_HEAD_BYTES + len(tensors))
        for tensor in tensors:
            places.append(at)
            at = _aligned(at + tensor.nbytes)
        self.buffer = torch.zeros(at, dtype=torch.uint8, pin_memory=is_pinned)
        self._head = self.buffer[:_HEAD_BYTES].view(torch.float64).numpy()
        self._flags = self.buffer[_HEAD_BYTES : _HEAD_BYTES + len(tensors)].numpy()
        self.values = [
            self.buffer[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for place, tensor in zip(places, tensors, strict=True)
        ]

    @property
    def number(self) -> float:
        """The sender's learning rate."""
        return float(self._head[0])

    @property
    def mark(self) -> int:
        """Whether the sender goes on, ends or has failed."""
        return int(self._head[1])

    @torch.no_grad()
    def pack(self, tensors: Sequence[Tensor | None], number: float = 0.0, mark: int = GOES_ON) -> None:
        """Take in the values, zeros where there are none."""
        self._head[:] = number, mark
        self._flags[:] = [tensor is not None for tensor in tensors]
        for place, tensor in zip(self.values, tensors, strict=True):
            if tensor is None:
                place.zero_()
        pairs = [(place, tensor) for place, tensor in zip(self.values, tensors, strict=True) if tensor is not None]
        _copy(pairs)

    @torch.no_grad()
    def unpack(self, tensors: Sequence[Tensor]) -> None:
        """Give the values away."""
        _copy(list(zip(tensors, self.values, strict=True)))

    @torch.no_grad()
    def add(self, other: Parcel) -> None:
        """Add another's values to these; a tensor is there if either has it."""
        torch._foreach_add_(self.values, other.values)
        self._flags |= other._flags

    @torch.no_grad()
    def take(self, other: Parcel) -> None:
        """Become a copy of another."""
        self.buffer.copy_(other.buffer)

    def present(self) -> list[Tensor | None]:
        """The values, None where the sender had none."""
        return [value if flag else None for value, flag in zip(self.values, self._flags, strict=True)]


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """From the second of each to the first; returns when host memory may be read and written again."""
    for place, value in pairs:
        place.copy_(value, non_blocking=True)
    for device in {tensor.device for pair in pairs for tensor in pair if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
