"""What a batch may be: tensors in nested dicts, lists, tuples and dataclasses; moved, counted, cut and put together.

The path of a part of a batch is written as Python would reach it (`batch['graph'][0]`), for errors that name it.
"""

from __future__ import annotations

import copy
import dataclasses
import numbers
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy
import torch
from torch import Tensor
from torch.utils.data import default_collate

from stormo.errors import SettingError, pluralize

Collate = Callable[[list[Any]], Any]

_PLAIN = (str, bytes, numbers.Number, numpy.generic, type(None))  # passed on as they are
_ROOT = "batch"


def tensors_in(data: Any) -> Iterator[Tensor]:
    """Every tensor of a batch."""
    if isinstance(data, Tensor):
        yield data
        return
    for _, part in _parts(data, _ROOT) or ():
        yield from tensors_in(part)


def move(data: Any, device: torch.device, path: str = _ROOT) -> Any:
    """The same batch on the device; what cannot be moved is refused by its path."""
    if isinstance(data, Tensor):
        return data.to(device, non_blocking=True)
    if isinstance(data, numpy.ndarray) and data.dtype.kind in "biufc":
        # torch wants memory that runs forward and may be written to.
        return torch.from_numpy(numpy.require(data, requirements=["C", "W"])).to(device, non_blocking=True)
    if isinstance(data, _PLAIN):
        return data
    if _moves_itself(data):
        moved = data.to(device)
        return data if moved is None else moved
    parts = _parts(data, path)
    if parts is None:
        raise SettingError(
            f"{path} is {_described(data)}",
            f"only tensors can be moved to {device}, also those in dicts, lists, tuples and dataclasses",
            "give that type a method to(device), return tensors from the data set, or write collate() in the task",
        )
    return _rebuilt(data, [move(part, device, where) for where, part in parts], path)


def is_opaque(data: Any) -> bool:
    """Whether something in a batch moves itself and does not show its tensors."""
    parts = _parts(data, _ROOT)
    if parts is None:
        return not isinstance(data, Tensor) and _moves_itself(data)
    return any(is_opaque(part) for _, part in parts)


def _moves_itself(data: Any) -> bool:
    return callable(getattr(data, "to", None)) and not isinstance(data, type)


def batch_length(batch: Any) -> int:
    """How many samples a batch holds: the first dimension of the first tensor that has one."""
    length = next((length for _, length in _lengths(batch, _ROOT)), None)
    if length is None:
        raise SettingError(
            f"a batch of type {type(batch).__name__} was given", "it holds no tensor to count", "override metrics()"
        )
    return length


def cut(batch: Any, start: int, stop: int) -> Any:
    """Rows `start` to `stop` of every tensor, and of every list of plain values; numbers and scalars stay."""
    return _rows(batch, slice(start, stop))


def samples_first(batch: Any, dim: int, *, undo: bool = False) -> Any:
    """The same batch with its samples along the first dimension, which are along `dim` of what has so many."""
    if dim == 0 or isinstance(batch, _PLAIN):
        return batch
    if isinstance(batch, Tensor | numpy.ndarray):
        dims = (0, dim) if undo else (dim, 0)
        if batch.ndim <= dim:
            return batch
        if not isinstance(batch, Tensor):
            return numpy.moveaxis(batch, *dims)
        moved = batch.movedim(*dims)
        return moved.contiguous() if undo else moved  # a script may want views of it
    parts = _parts(batch, _ROOT)
    return (
        batch if parts is None else _rebuilt(batch, [samples_first(each, dim, undo=undo) for _, each in parts], _ROOT)
    )


def repeat_rows(batch: Any, num_rows: int) -> Any:
    """The rows of a batch, repeated until there are so many, copied."""
    length = batch_length(batch)
    return _rows(batch, [row % length for row in range(num_rows)])


def rotated(batch: Any, start: int) -> Any:
    """The rows of a batch from one to the last, and then those before it."""
    return _rows(batch, [*range(start, batch_length(batch)), *range(start)])


def _rows(batch: Any, rows: slice | list[int]) -> Any:
    lengths = list(_lengths(batch, _ROOT))
    for path, length in lengths[1:]:
        if length != lengths[0][1]:
            raise SettingError(
                f"{lengths[0][0]} has {pluralize(lengths[0][1], 'row')}",
                f"{path} has {length}, so that it is not clear which rows are one sample",
                "let the first dimension of everything in a batch be the samples",
            )
    return _cut(batch, rows, _ROOT)


def collate(samples: list[Any]) -> Any:
    """torch's way to make a batch of samples, with an answer where they do not fit together."""
    try:
        return default_collate(samples)
    except (TypeError, RuntimeError, KeyError, ValueError) as error:
        described = list(dict.fromkeys(_described(sample) for sample in samples))
        more = f" and {len(described) - 3} more kinds" if len(described) > 3 else ""
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise SettingError(
            f"the data set gave samples that are {'; '.join(described[:3])}{more}",
            f"they cannot be put together into a batch ({reason})",
            "write collate(self, samples) in the task, which pads them or takes out what is needed",
        ) from error


def _parts(data: Any, path: str) -> list[tuple[str, Any]] | None:
    """Path and value of each part of a container; None for anything else."""
    if isinstance(data, Mapping):
        return [(f"{path}[{key!r}]", value) for key, value in data.items()]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return [(f"{path}.{name}", value) for name, value in zip(data._fields, data, strict=True)]
    if isinstance(data, list | tuple):
        return [(f"{path}[{index}]", value) for index, value in enumerate(data)]
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return [(f"{path}.{field.name}", getattr(data, field.name)) for field in dataclasses.fields(data)]
    return None


def _rebuilt(data: Any, values: list[Any], path: str) -> Any:
    """A container of the same type with other values."""
    try:
        if isinstance(data, Mapping):
            pairs = dict(zip(data, values, strict=True))
            return pairs if type(data) is dict else _mapping(data, pairs)
        if isinstance(data, tuple) and hasattr(data, "_fields"):
            return type(data)(*values)
        if isinstance(data, list | tuple):
            return type(data)(values)
        made = copy.copy(data)  # not by its constructor, which may take other arguments
        for field, value in zip(dataclasses.fields(data), values, strict=True):
            object.__setattr__(made, field.name, value)
        return made
    except TypeError as error:
        raise SettingError(
            f"{path} is {_described(data)}",
            f"it cannot be rebuilt from its parts ({error})",
            "give that type a method to(device), or return a plain dict, list or tuple",
        ) from error


def _mapping(data: Mapping[Any, Any], pairs: dict[Any, Any]) -> Any:
    factory = getattr(data, "default_factory", None)
    if factory is not None:  # a defaultdict, whose first argument is another
        return cast(Any, type(data))(factory, pairs)
    try:
        return cast(Any, type(data))(pairs)
    except TypeError:
        return pairs


def _lengths(data: Any, path: str) -> Iterator[tuple[str, int]]:
    """Path and number of rows of everything that has rows."""
    if isinstance(data, Tensor | numpy.ndarray):
        if data.ndim:
            yield path, int(data.shape[0])
    elif isinstance(data, torch.nn.utils.rnn.PackedSequence):
        yield path, int(data.batch_sizes[0])
    elif _is_column(data):
        yield path, len(data)
    else:
        for where, part in _parts(data, path) or ():
            yield from _lengths(part, where)


def _is_column(data: Any) -> bool:
    """Whether a list holds one plain value for each sample, such as file names, of which torch makes a tuple."""
    if not isinstance(data, list | tuple) or hasattr(data, "_fields"):
        return False
    kinds = _PLAIN if isinstance(data, list) else (str, bytes)
    return bool(data) and all(isinstance(value, kinds) for value in data)


def _cut(data: Any, rows: slice | list[int], path: str) -> Any:
    if isinstance(data, Tensor | numpy.ndarray):
        return data[rows] if data.ndim else data
    if isinstance(data, _PLAIN):
        return data
    if _is_column(data):
        return data[rows] if isinstance(rows, slice) else type(data)(data[row] for row in rows)
    parts = None if isinstance(data, torch.nn.utils.rnn.PackedSequence) else _parts(data, path)
    if parts is None:
        raise SettingError(
            f"{path} is {_described(data)}",
            "it has no rows that could be cut",
            "return tensors, or dicts, lists, tuples or dataclasses of them",
        )
    return _rebuilt(data, [_cut(part, rows, where) for where, part in parts], path)


def _described(data: Any) -> str:
    """A value's type and shape."""
    if isinstance(data, Tensor | numpy.ndarray):
        kind = "a tensor" if isinstance(data, Tensor) else f"an array of {data.dtype}"
        return f"{kind} of shape {list(data.shape)}"
    parts = _parts(data, "")
    if not parts or isinstance(data, _PLAIN):
        return f"of type {type(data).__name__}"
    inner = [f"{where.strip('.')} {_described(part).removeprefix('a ')}" for where, part in parts[:4]]
    return f"a {type(data).__name__} of {', '.join(inner)}{', …' * (len(parts) > 4)}"
