"""Values of a script (a scheduler's state, a loader's position, a best score) as JSON and tensors, and back.

What JSON would change without a word, such as tuples and numbers as keys, is written with its type; nothing that
comes back can run code.
"""

from __future__ import annotations

import io
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import numpy
import safetensors.torch
import torch
from torch import Tensor

from stormo.errors import SettingError

_TYPE, _VALUE = "type", "value"
_PLAIN = (str, bool, int, float, type(None))
_LISTS: dict[str, type[Any]] = {"tuple": tuple, "deque": deque, "set": set, "frozenset": frozenset}
_MAPS: dict[str, type[Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}


def encode(value: Any, tensors: dict[str, Tensor], where: str, *, done: str = "saved") -> Any:
    """A value as JSON; its tensors are put into `tensors` by where they were. `done`: what is to be done with it."""
    if isinstance(value, Tensor):
        tensors[where] = value.detach()
        return {_TYPE: "tensor", _VALUE: where}
    if isinstance(value, numpy.generic | numpy.ndarray) and value.dtype.kind in "biufc":
        tensors[where] = torch.from_numpy(numpy.array(value))
        return {_TYPE: "numpy", _VALUE: where}
    if type(value) in _PLAIN:
        is_nameless = type(value) is float and not math.isfinite(value)  # JSON has no word for it
        return {_TYPE: "float", _VALUE: str(value)} if is_nameless else value
    if type(value) is list:
        return [encode(item, tensors, f"{where}/{index}", done=done) for index, item in enumerate(value)]
    for name, kind in _LISTS.items():
        if type(value) is kind:
            return {_TYPE: name, _VALUE: encode(list(value), tensors, where, done=done)}
    if isinstance(value, Mapping):
        kind_name = type(value).__name__ if type(value) in _MAPS.values() else "dict"
        if type(value) not in (*_MAPS.values(), defaultdict):
            raise _refusal(value, where, done)
        pairs = [
            [encode(part, tensors, f"{where}/{n}/{name}", done=done) for part, name in ((key, "key"), (item, key))]
            for n, (key, item) in enumerate(value.items())
        ]
        return {_TYPE: kind_name, _VALUE: pairs}
    raise _refusal(value, where, done)


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
    """A value as bytes; `done` says in errors what is to be done with it."""
    tensors: dict[str, Tensor] = {}
    words = json.dumps(encode(value, tensors, "value", done=done)).encode()
    # Clones: tensors that share memory, or have gaps, are refused otherwise.
    content = safetensors.torch.save({name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()})
    return len(words).to_bytes(8, "little") + words + content


def unpack(payload: bytes) -> Any:
    """What `pack` was given; its tensors are on the CPU."""
    stream = io.BytesIO(payload)
    words = stream.read(int.from_bytes(stream.read(8), "little"))
    return decode(json.loads(words), safetensors.torch.load(stream.read()))


def _refusal(value: Any, where: str, done: str) -> SettingError:
    return SettingError(
        f"a {type(value).__name__} was to be {done} ({where})",
        f"numbers, text, tensors and lists, tuples, sets and dicts of them can be {done}, and never code",
        "give what it is made of, such as its state_dict()",
    )
