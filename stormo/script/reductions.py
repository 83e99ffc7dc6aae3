"""Sums and maxima over the workers of whatever a script counts in: numbers, tensors, and nests of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from stormo.errors import SettingError

Reduce = Callable[[Tensor], Tensor]

_LARGEST = 2**53  # whole numbers up to this are exact in float64


def reduced(value: Any, add: Reduce, largest: Reduce, device: torch.device, *, is_sum: bool) -> Any:
    """A nest of numbers and tensors, reduced over the workers without touching what was given."""
    leaves = [leaf.item() if isinstance(leaf, numpy.number) else leaf for leaf in _leaves(value)]
    reduce = add if is_sum else with_nan(largest, add)
    found: dict[int, Any] = {
        index: _tensor(leaf, reduce, device) for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)
    }
    numbers = [index for index in range(len(leaves)) if index not in found]
    if numbers:
        found |= dict(zip(numbers, _numbers([leaves[index] for index in numbers], reduce, largest), strict=True))
    return _rebuild(value, iter([found[index] for index in range(len(leaves))]))


def weighed(value: Any, count: float) -> Any:
    """A nest times a count, in float64; a count of 0 makes zeros of whatever there is, also of no number."""
    return _rebuild(value, (_weighed(leaf, count) for leaf in _leaves(value)))


def divided(sums: Any, total: float, like: Any) -> Any:
    """A nest divided by a number, in the floating-point types that another one has."""
    pairs = zip(_leaves(sums), _leaves(like), strict=True)
    return _rebuild(sums, (_divided(each, total, before) for each, before in pairs))


def _weighed(leaf: Any, count: float) -> Any:
    if isinstance(leaf, Tensor):
        wide = leaf.detach().to(torch.complex128 if leaf.is_complex() else torch.float64)
        return wide * count if count else torch.zeros_like(wide)
    return float(leaf) * count if count else 0.0


def _divided(leaf: Any, total: float, before: Any) -> Any:
    is_float = isinstance(before, Tensor) and (before.is_floating_point() or before.is_complex())
    return (leaf / total).to(before.dtype) if is_float else leaf / total


def described(value: Any) -> str:
    """The form of a nest, which must be the same on all workers."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, int | float | numpy.number):
        return "a number"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {described(value[key])}" for key in sorted(value, key=str)) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(described(item) for item in value)}]"
    raise SettingError(
        f"a {type(value).__name__} was to be reduced over the workers",
        "numbers, tensors, and dicts, lists and tuples of them can be",
        "give it as a number or a tensor",
    )


def _tensor(leaf: Tensor, reduce: Reduce, device: torch.device) -> Tensor:
    if leaf.dtype == torch.bool:
        wide_dtype, dtype = torch.int64, torch.int64
    else:
        # 16 and 32 bits are summed in 64: many workers' values must not round away.
        kind = torch.float64 if leaf.is_floating_point() else torch.complex128 if leaf.is_complex() else torch.int64
        wide_dtype, dtype = kind, leaf.dtype
    wide = leaf.detach().to(device, wide_dtype, copy=True).contiguous()
    return reduce(wide).to(leaf.device, dtype)


def with_nan(largest: Reduce, add: Reduce) -> Reduce:
    """The largest of all workers' values, or NaN where one of them has that: a comparison would pass it over."""

    def reduce(wide: Tensor) -> Tensor:
        if not wide.is_floating_point():
            return largest(wide)
        is_nan = add(wide.isnan().to(torch.float64)) > 0
        return largest(wide.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)).masked_fill(is_nan, math.nan)

    return reduce


def _numbers(values: list[int | float], reduce: Reduce, largest: Reduce) -> list[int | float]:
    """All numbers at once. One that is whole here may not be so elsewhere, as where a worker had nothing to add."""
    wide = reduce(torch.tensor([_exact(value) for value in values], dtype=torch.float64)).tolist()
    is_float = largest(torch.tensor([isinstance(value, float) for value in values], dtype=torch.int64)).tolist()
    return [total if broken else int(_exact(total)) for total, broken in zip(wide, is_float, strict=True)]


def _exact(value: float) -> float:
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise SettingError(
            f"the number {value} was to be reduced over the workers",
            f"whole numbers are exact up to {_LARGEST}",
            "give it as a tensor",
        )
    return float(value)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):  # a dict's order may differ between workers
            yield from _leaves(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _rebuild(value: Any, leaves: Iterator[Any]) -> Any:
    """The same nesting with other numbers and tensors."""
    if isinstance(value, Mapping):
        found = {key: _rebuild(value[key], leaves) for key in sorted(value, key=str)}
        return {key: found[key] for key in value}
    if isinstance(value, list | tuple):
        items = [_rebuild(item, leaves) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return next(leaves)
