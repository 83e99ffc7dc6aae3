"""Gradients that travel as 16-bit numbers and are summed in 32 bits.

An all-reduce of 16-bit numbers rounds every partial sum, and the more workers there are the more it loses. Here every
worker gets one piece of the gradient from all others, adds it up in 32 bits, and gives the sum, rounded once, back to
all: as many bytes, and two roundings however many workers there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stormo.parallel.compression import Parcel, Wire

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_HEAD_BYTES = 4  # of a row: the power of two its numbers were multiplied with
_LARGEST = 14  # the largest number of a row lies below 2 to this, whose double fp16 can hold
_MOST = 100  # powers of two that float32 can be multiplied with


class Halves:
    """bf16, or fp16 with a power of two for each row, which keeps it within its range."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def exchange(self, parcel: Parcel, wire: Wire) -> None:
        """Sum the pieces where they meet."""
        flat = parcel.flat
        if not flat.numel():
            return
        if flat.is_complex():
            flat = torch.view_as_real(flat).flatten()
        wide = torch.promote_types(flat.dtype, torch.float32)
        length = -(-flat.numel() // wire.size)
        length += length % 2  # the head of every row begins at a multiple of its size
        came = wire.swap(self._packed(flat, wire.size, length))
        total = self._unpacked(came, wide).sum(dim=0)
        whole = wire.gather(self._packed(total, 1, length).flatten())
        flat.copy_(self._unpacked(whole, wide).flatten()[: flat.numel()])

    def _packed(self, values: Tensor, num_rows: int, length: int) -> Tensor:
        """The values in rows of bytes, filled up with zeros."""
        rows = torch.zeros(num_rows, _HEAD_BYTES + 2 * length, dtype=torch.uint8, device=values.device)
        scale = _scale(values) if self._dtype is torch.float16 else torch.ones((), device=values.device)
        rows[:, :_HEAD_BYTES].view(torch.float32).copy_(scale)
        numbers = torch.zeros(num_rows * length, dtype=self._dtype, device=values.device)
        # A GPU would round the scale to 16 bits for values of 16 bits, of which it may lie out of range.
        wide = torch.promote_types(values.dtype, torch.float32)
        numbers[: values.numel()] = values if self._dtype is torch.bfloat16 else values.to(wide) * scale
        rows[:, _HEAD_BYTES:].view(self._dtype).copy_(numbers.view(num_rows, length))
        return rows

    def _unpacked(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        numbers = rows[:, _HEAD_BYTES:].view(self._dtype).to(dtype)
        return numbers if self._dtype is torch.bfloat16 else numbers.div_(rows[:, :_HEAD_BYTES].view(torch.float32))


def _scale(values: Tensor) -> Tensor:
    """A power of two that brings the largest value near the top of fp16's range; 1 where it is not finite."""
    largest = torch.linalg.vector_norm(values, torch.inf).float()
    power = torch.frexp(largest).exponent.clamp(_LARGEST - _MOST, _LARGEST + _MOST)
    scale = torch.ldexp(torch.ones_like(largest), _LARGEST - power)
    return torch.where(torch.isfinite(largest) & (largest > 0), scale, torch.ones_like(scale))
