"""Nested values: written as JSON and tensors, sent as bytes, summed over the workers.

What JSON would change silently, such as tuples and numeric keys, is written with its type. Reading runs no code.
"""

from __future__ import annotations

import io
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import safetensors.torch
import torch
from torch import Tensor

from stormo.distributed.world import World
from stormo.errors import SettingError

_TYPE, _VALUE = "type", "value"
_PLAIN = (str, bool, int, float, type(None))
_LISTS: dict[str, type[Any]] = {"tuple": tuple, "deque": deque, "set": set, "frozenset": frozenset}
_MAPS: dict[str, type[Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_LARGEST_INT = 2**53  # integers up to this are exact in float64


def encode(value: Any, tensors: dict[str, Tensor], where: str, *, done: str = "saved") -> Any:
    """A value as JSON; its tensors go into `tensors`. `done` names the operation in errors."""
    if isinstance(value, Tensor):
        tensors[where] = value.detach()
        return {_TYPE: "tensor", _VALUE: where}
    if isinstance(value, numpy.generic | numpy.ndarray) and value.dtype.kind in "biufc":
        tensors[where] = torch.from_numpy(numpy.array(value))
        return {_TYPE: "numpy", _VALUE: where}
    if type(value) in _PLAIN:
        is_in_json = type(value) is not float or math.isfinite(value)
        return value if is_in_json else {_TYPE: "float", _VALUE: str(value)}
    if type(value) is list:
        return [encode(item, tensors, f"{where}/{index}", done=done) for index, item in enumerate(value)]
    for name, kind in _LISTS.items():
        if type(value) is kind:
            return {_TYPE: name, _VALUE: encode(list(value), tensors, where, done=done)}
    if type(value) in (*_MAPS.values(), defaultdict):
        pairs = [
            [encode(part, tensors, f"{where}/{n}/{name}", done=done) for part, name in ((key, "key"), (item, key))]
            for n, (key, item) in enumerate(value.items())
        ]
        return {_TYPE: "dict" if type(value) is defaultdict else type(value).__name__, _VALUE: pairs}
    raise SettingError(
        f"a {type(value).__name__} was to be {done} ({where})",
        f"numbers, text, tensors and lists, tuples, sets and dicts of them can be {done}, and never code",
        "give what it is made of, such as its state_dict()",
    )


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `encode` was given."""
    if not isinstance(value, dict):
        return [decode(item, tensors) for item in value] if isinstance(value, list) else value
    kind, inner = value[_TYPE], value[_VALUE]
    if kind == "float":
        return float(inner)
    if kind == "tensor":
        return tensors[inner]
    if kind == "numpy":
        array = tensors[inner].numpy()
        return array[()] if array.ndim == 0 else array
    if kind in _LISTS:
        return _LISTS[kind](decode(inner, tensors))
    return _MAPS[kind]({decode(key, tensors): decode(item, tensors) for key, item in inner})


def pack(value: Any, done: str) -> bytes:
    """A value as bytes; `done` names the operation in errors."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(value, tensors, "value", done=done)).encode()
    # Clones: safetensors refuses tensors that share memory or have gaps.
    content = safetensors.torch.save({name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()})
    return len(text).to_bytes(8, "little") + text + content


def unpack(payload: bytes) -> Any:
    """What `pack` was given; its tensors are on the CPU."""
    stream = io.BytesIO(payload)
    text = stream.read(int.from_bytes(stream.read(8), "little"))
    return decode(json.loads(text), safetensors.torch.load(stream.read()))


def broadcast_bytes(world: World, payloads: list[bytes] | None) -> list[bytes]:
    """Rank 0's payloads, on all workers; the others pass None."""
    tensors = None
    if payloads is not None:
        tensors = {str(n): torch.frombuffer(bytearray(each), dtype=torch.uint8) for n, each in enumerate(payloads)}
    return [tensor.numpy().tobytes() for tensor in world.broadcast_tensors(tensors).values()]


# Sums and maxima over the workers


def describe(value: Any) -> str:
    """The structure of a nested value, which must be the same on all workers."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, int | float | numpy.number):
        return "a number"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {describe(value[key])}" for key in sorted(value, key=str)) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(describe(item) for item in value)}]"
    raise SettingError(
        f"a {type(value).__name__} was to be reduced over the workers",
        "only numbers, tensors, and dicts, lists and tuples of them can be",
        "give it as a number or a tensor",
    )


def reduce_sum(value: Any, world: World) -> Any:
    """A nested value, summed over the workers; what was given stays as it is."""
    return _reduce(value, world, world.sum)


def reduce_max(value: Any, world: World) -> Any:
    """The largest over the workers, or NaN where one of them has NaN."""

    def largest(wide: Tensor) -> Tensor:
        if not wide.is_floating_point():
            return world.max(wide)
        is_nan = world.sum(wide.isnan().to(torch.float64)) > 0  # a comparison would skip it
        found = world.max(wide.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf))
        return found.masked_fill(is_nan, math.nan)

    return _reduce(value, world, largest)


def scale(value: Any, count: float) -> Any:
    """A nested value times a count, in float64; a count of 0 gives zeros, also for NaN."""

    def scaled(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return float(leaf) * count if count else 0.0
        wide = leaf.detach().to(torch.complex128 if leaf.is_complex() else torch.float64)
        return wide * count if count else torch.zeros_like(wide)

    return _rebuild(value, (scaled(leaf) for leaf in _leaves(value)))


def divide(sums: Any, total: float, like: Any) -> Any:
    """A nested value divided by a number, in the floating-point types of `like`."""

    def divided(leaf: Any, before: Any) -> Any:
        is_float = isinstance(before, Tensor) and (before.is_floating_point() or before.is_complex())
        return (leaf / total).to(before.dtype) if is_float else leaf / total

    return _rebuild(sums, (divided(*pair) for pair in zip(_leaves(sums), _leaves(like), strict=True)))


def _reduce(value: Any, world: World, reduce: Callable[[Tensor], Tensor]) -> Any:
    leaves = [leaf.item() if isinstance(leaf, numpy.number) else leaf for leaf in _leaves(value)]
    found: dict[int, Any] = {
        n: _reduce_tensor(leaf, world, reduce) for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)
    }
    numbers = [n for n in range(len(leaves)) if n not in found]
    if numbers:  # all at once; one that is an int here may be a float elsewhere, where a worker had something to add
        values = [leaves[n] for n in numbers]
        wide = reduce(torch.tensor([_exact(value) for value in values], dtype=torch.float64)).tolist()
        is_float = world.max(torch.tensor([isinstance(value, float) for value in values], dtype=torch.int64)).tolist()
        found |= {n: w if f else int(w) for n, w, f in zip(numbers, wide, is_float, strict=True)}
    return _rebuild(value, iter([found[n] for n in range(len(leaves))]))


def _reduce_tensor(leaf: Tensor, world: World, reduce: Callable[[Tensor], Tensor]) -> Any:
    # In 64 bits, so that the values of many workers do not round away.
    wide = torch.float64 if leaf.is_floating_point() else torch.complex128 if leaf.is_complex() else torch.int64
    reduced = reduce(leaf.detach().to(world.device, wide, copy=True).contiguous())
    return reduced.to(leaf.device, torch.int64 if leaf.dtype == torch.bool else leaf.dtype)


def _exact(value: float) -> float:
    if isinstance(value, int) and abs(value) > _LARGEST_INT:
        raise SettingError(
            f"the integer {value} was to be reduced over the workers",
            f"integers are exact up to {_LARGEST_INT}",
            "give it as a tensor",
        )
    return float(value)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):  # the order of a dict may differ between workers
            yield from _leaves(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _rebuild(value: Any, leaves: Iterator[Any]) -> Any:
    """The same structure with other leaves."""
    if isinstance(value, Mapping):
        found = {key: _rebuild(value[key], leaves) for key in sorted(value, key=str)}
        return {key: found[key] for key in value}
    if isinstance(value, list | tuple):
        items = [_rebuild(item, leaves) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return next(leaves)
