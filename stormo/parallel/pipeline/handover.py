"""What goes from one stage to the next: any nested value with tensors in it, as a flat row of dense float tensors.

torch's stages send tensors of fixed shapes, want a gradient back for each of them, and keep the memory layout in some
releases only. So every tensor travels in a carrier: dense in memory, of a float type (whole numbers by their bits), and
with a gradient, zero where there is none. What is not a tensor must be the same in every micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.utils._pytree import tree_leaves, tree_map

from stormo.errors import SettingError

# By their bits; smaller ones by value, which fp16 has exactly.
_BITS = {torch.int64: torch.float64, torch.int32: torch.float32, torch.int16: torch.float16}
_VALUES = (torch.bool, torch.uint8, torch.int8)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PLAIN = (bool, int, float, str, bytes, type(None), torch.Size, torch.dtype, torch.device, slice, type(Ellipsis))


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]  # its dimensions by their strides, so that channels_last stays so

    @property
    def carrier(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of what travels."""
        return tuple(self.shape[dim] for dim in self.order), _carrier_dtype(self.dtype)

    def packed(self, tensor: Tensor) -> Tensor:
        """What travels, without a gradient."""
        dense = tensor.detach().permute(self.order).contiguous()
        if self.dtype in _BITS:
            return dense.view(_BITS[self.dtype])
        return dense.to(torch.float16) if self.dtype in _VALUES else dense

    def unpacked(self, carrier: Tensor) -> Tensor:
        """What has travelled."""
        value = carrier.detach()
        if self.dtype in _BITS:
            value = value.view(self.dtype)
        elif self.dtype in _VALUES:
            value = value.to(self.dtype)
        return value.permute(self._back)

    def zeros(self, device: torch.device) -> Tensor:
        """A tensor for it, with zeros."""
        shape, _ = self.carrier
        return torch.zeros(shape, dtype=self.dtype, device=device).permute(self._back)

    @property
    def _back(self) -> list[int]:
        return sorted(range(len(self.order)), key=self.order.__getitem__)


def _carrier_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype in _FLOATS:
        return dtype
    return torch.float16 if dtype in _VALUES else _BITS[dtype]


def describe(value: Any, place: str) -> Any:
    """The value with a slot for every tensor."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if leaf.dtype not in (*_FLOATS, *_VALUES, *_BITS):
                raise SettingError(
                    f"a tensor of type {leaf.dtype} is in {place}",
                    "it cannot go from one worker to the next",
                    "convert it to a float or an integer type, or cut the model elsewhere",
                )
            strides = leaf.stride()
            order = sorted(range(leaf.ndim), key=lambda dim: (-strides[dim], dim))
            return Slot(tuple(leaf.shape), leaf.dtype, tuple(order))
        if not isinstance(leaf, _PLAIN):
            raise SettingError(
                f"a {type(leaf).__name__} is in {place}",
                "only tensors and plain values can go from one worker to the next",
                "cut the model elsewhere with the task's pieces(model)",
            )
        return leaf

    return tree_map(of, value)


def slots_of(described: Any) -> list[Slot]:
    """All slots in their order."""
    return [leaf for leaf in tree_leaves(described) if isinstance(leaf, Slot)]


def filled(described: Any, tensors: Sequence[Tensor]) -> Any:
    """The value with these tensors in its slots."""
    given = iter(tensors)
    return tree_map(lambda leaf: next(given) if isinstance(leaf, Slot) else leaf, described)


def _alias(tensor: Tensor) -> Tensor:
    """The same memory, for autograd a tensor of its own, which the next operation may change in place."""
    found = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return found.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


class _Arrive(Function):
    @staticmethod
    def forward(ctx: Any, slots: Sequence[Slot], *carriers: Tensor) -> tuple[Tensor, ...]:
        ctx.slots, ctx.device = slots, carriers[0].device
        ctx.set_materialize_grads(False)
        tensors = tuple(_alias(slot.unpacked(carrier)) for slot, carrier in zip(slots, carriers, strict=True))
        ctx.mark_non_differentiable(*(tensor for tensor in tensors if not tensor.is_floating_point()))
        return torch.zeros(0, device=ctx.device), *tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        found: list[Tensor | None] = [None]
        for slot, gradient in zip(ctx.slots, gradients[1:], strict=True):
            shape, dtype = slot.carrier
            is_none = gradient is None or slot.dtype not in _FLOATS
            found.append(torch.zeros(shape, dtype=dtype, device=ctx.device) if is_none else slot.packed(gradient))
        return tuple(found)


class _Depart(Function):
    @staticmethod
    def forward(ctx: Any, slot: Slot, tie: Tensor, tensor: Tensor) -> Tensor:
        ctx.slot = slot
        return _alias(slot.packed(tensor))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        is_wanted = ctx.needs_input_grad[2] and ctx.slot.dtype in _FLOATS
        given = ctx.slot.unpacked(gradients[0]) if is_wanted else None
        return None, torch.zeros(0, device=gradients[0].device), given


def arrive(described: Any, carriers: Sequence[Tensor]) -> tuple[Tensor, Any]:
    """The value that carriers bring, and an empty tensor that ties what leaves the stage to what has arrived.

    By the tie every carrier gets a gradient in the backward pass, also one that the stage makes no use of.
    """
    tie, *tensors = _Arrive.apply(slots_of(described), *carriers)  # type: ignore[no-untyped-call]
    return tie, filled(described, tensors)


def depart(described: Any, value: Any, tie: Tensor, place: str) -> tuple[Tensor, ...]:
    """The carriers of a value, which must be as described."""
    found = describe(value, place)
    if _without_order(found) != _without_order(described):
        raise SettingError(
            f"{place} was {_without_order(described)}",
            f"in another micro-batch of the same shape it is {_without_order(found)}",
            "cut the model elsewhere with the task's pieces(model)",
        )
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    slots = slots_of(described)
    pairs = zip(slots, tensors, strict=True)
    return tuple(_Depart.apply(slot, tie, tensor) for slot, tensor in pairs)  # type: ignore[no-untyped-call]


def _without_order(described: Any) -> Any:
    return tree_map(lambda leaf: (leaf.shape, leaf.dtype) if isinstance(leaf, Slot) else leaf, described)
