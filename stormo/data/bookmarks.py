"""A place in a stream that can be found again without reading up to it, by the stream's own `state_dict`.

Streamed Hugging Face sets and torchdata's loaders have one. Not every state is complete: a shuffle buffer, for example,
is not part of it. So a bookmark holds digests of the samples that follow, and is used only if the same ones follow.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor

NUM_CHECKED = 8  # samples that must be the same
NOT_THE_SAME = (
    "the stream does not continue from its saved state with the same samples, as after a shuffle buffer; it is read "
    "again from the start of its pass"
)


@dataclass(slots=True)
class Bookmark:
    """Where a stream was, as plain values."""

    position: int  # samples of the run before it
    round: int  # how often the stream was restarted
    state: dict[str, Any]
    digests: list[str] = field(default_factory=list)  # of the first samples after it

    @classmethod
    def make(cls, data: Any, position: int, number: int) -> Bookmark | None:
        """That of a stream as it is; None where it has no state, or none that JSON can hold."""
        if not is_stateful(data):
            return None
        try:
            text = json.dumps(data.state_dict())
        except Exception:  # the library's own, or what JSON cannot hold
            return None
        return cls(position, number, json.loads(text))

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Bookmark | None:
        """The one of these fields; None for anything else, as in a damaged file."""
        known: dict[str, type[Any]] = {"position": int, "round": int, "state": dict, "digests": list}
        is_whole = values.keys() == known.keys() and all(isinstance(values[name], known[name]) for name in known)
        return cls(**values) if is_whole else None


def is_stateful(data: Any) -> bool:
    """Whether a stream says where it is, and can go there."""
    return callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None))


def digest(sample: Any) -> str:
    """Stands for what a sample or a batch holds: numbers, text, arrays and tensors."""
    found = hashlib.sha256()
    _add(found, sample)
    return found.hexdigest()[:16]


def _add(found: Any, value: Any) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            found.update(str(key).encode())
            _add(found, item)
    elif isinstance(value, list | tuple):
        found.update(f"{len(value)}[".encode())
        for item in value:
            _add(found, item)
    else:
        try:
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                _add(found, {each.name: getattr(value, each.name, None) for each in dataclasses.fields(value)})
            else:
                found.update(_bytes_of(value))
        except Exception:  # any that torch, pickle or the value itself raises
            found.update(os.urandom(16))  # what cannot be compared counts as another sample


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, Tensor):
        value = (value.detach() if value.layout == torch.strided else value.detach().to_dense()).cpu()
        value = (value.float() if value.dtype.itemsize == 2 else value).numpy()
    if isinstance(value, numpy.ndarray) and value.dtype != object:
        return f"{value.shape}{value.dtype}".encode() + numpy.ascontiguousarray(value).tobytes()
    return pickle.dumps(value)
