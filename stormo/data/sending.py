"""How a data set travels to a loading process: its tensors by shared memory or, where they are many, by value.

A tensor in shared memory takes a file descriptor, and no more than a few hundred can be sent at once: a list of samples
that are tensors would not get through.
"""

from __future__ import annotations

import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

_MOST_SHARED = 64  # of the 256 descriptors that are sent at once, some of which are needed otherwise

_ARRAYS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_ARRAYS |= {torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128}


class Travels:
    """Base of what is sent to a loading process with a data set in it."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        counting = _Counting(io.BytesIO(), protocol)
        counting.dump(vars(self))
        if counting.num_tensors <= _MOST_SHARED:
            return super().__reduce_ex__(protocol)
        content = io.BytesIO()
        _ByValue(content, protocol).dump(vars(self))
        return _arrived, (type(self), content.getvalue())


def _arrived(cls: type[Any], content: bytes) -> Any:
    made = object.__new__(cls)
    vars(made).update(pickle.loads(content))
    return made


class _Counting(ForkingPickler):
    """Counts tensors and leaves out what is in them."""

    num_tensors = 0

    def persistent_id(self, value: Any) -> str | None:
        """A stand-in for a tensor."""
        if not isinstance(value, Tensor):
            return None
        self.num_tensors += 1
        return "tensor"


class _ByValue(ForkingPickler):
    """Writes the numbers of tensors, where multiprocessing's way is to share them."""

    def reducer_override(self, value: Any) -> Any:
        """As an array, which does not bring along the tensor that a row is part of; otherwise as plain pickle does."""
        if type(value) is Tensor and value.dtype in _ARRAYS and value.is_cpu and not value.requires_grad:
            return torch.from_numpy, (value.numpy(),)
        if isinstance(value, Tensor | torch.UntypedStorage | torch.TypedStorage):
            return value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented
