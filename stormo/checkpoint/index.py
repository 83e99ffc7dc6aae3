"""The index of a checkpoint: for every tensor its whole shape, and which box of it lies where.

A box is an offset and a shape. The boxes of a tensor fill it, each place once: a part that is missing or given twice is
refused. A tensor without elements has no box.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stormo.checkpoint.layout import LOCAL, SECTIONS, SHARD_NAME, FileEntry, is_sha256
from stormo.checkpoint.tensors import DTYPE_NAMES, DTYPES

Shape = tuple[int, ...]

MAX_INDEX_BYTES = 512 * 1024 * 1024
_MAX_DIMS = 64  # torch's own limit
_MAX_BYTES = 2**62


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredBox:
    """A box of a tensor in a file."""

    file: str
    key: str  # its name in the safetensors file
    offset: Shape
    shape: Shape
    start: int  # its first byte in the file
    stop: int
    sha256: str | None = None  # of its values; of weights alone


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A whole tensor."""

    dtype: torch.dtype
    shape: Shape
    boxes: tuple[StoredBox, ...]


Index = dict[str, dict[str, Entry]]  # by section and name


def to_json(index: Index) -> dict[str, Any]:
    """The index as JSON-ready values."""
    return {
        section: {
            name: {
                "dtype": DTYPE_NAMES[entry.dtype],
                "shape": entry.shape,
                "boxes": [
                    {
                        "file": box.file,
                        "key": box.key,
                        "offset": box.offset,
                        "shape": box.shape,
                        "bytes": (box.start, box.stop),
                        **({"sha256": box.sha256} if box.sha256 is not None else {}),
                    }
                    for box in entry.boxes
                ],
            }
            for name, entry in sorted(entries.items())
        }
        for section, entries in index.items()
    }


def parse_index(data: bytes, files: Mapping[str, FileEntry]) -> Index:
    """The index in `data`; `ValueError` says in words what is wrong with it.

    Args:
        data: JSON.
        files: of the manifest, in which every box must lie.
    """
    try:
        body = json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"it is not valid JSON ({error})") from error
    index = from_json(body, files)
    require_whole(index)
    return index


def from_json(body: Any, files: Mapping[str, FileEntry]) -> Index:
    """What `to_json` gave, whether the boxes fill their tensors or not."""
    if not isinstance(body, dict) or body.keys() - {LOCAL} != set(SECTIONS):
        raise ValueError(f"it does not hold the sections {' and '.join(SECTIONS)}")
    index: Index = {}
    for section in (*SECTIONS, *([LOCAL] if LOCAL in body else [])):
        if not isinstance(body[section], dict):
            raise ValueError(f"its section {section} is not an object")
        index[section] = {name: _entry(name, value, files) for name, value in body[section].items()}
    return index


def _entry(name: str, value: Any, files: Mapping[str, FileEntry]) -> Entry:
    shown = repr(name[:100])
    dtype = DTYPES.get(str(value.get("dtype"))) if isinstance(value, dict) else None
    if dtype is None:
        raise ValueError(f"its entry for {shown} has no valid dtype")
    shape, listed = _sizes(value.get("shape")), value.get("boxes")
    if shape is None or math.prod(max(size, 1) for size in shape) * dtype.itemsize > _MAX_BYTES:
        raise ValueError(f"its entry for {shown} has no valid shape")
    if not isinstance(listed, list):
        raise ValueError(f"its entry for {shown} has no list of boxes")
    return Entry(dtype=dtype, shape=shape, boxes=tuple(_box(shown, one, dtype, files) for one in listed))


def _box(shown: str, value: Any, dtype: torch.dtype, files: Mapping[str, FileEntry]) -> StoredBox:
    if not isinstance(value, dict):
        raise ValueError(f"a box of {shown} is not an object")
    file, key, sha256 = value.get("file"), value.get("key"), value.get("sha256")
    if not isinstance(file, str) or SHARD_NAME.fullmatch(file) is None or file not in files:
        raise ValueError(
            f"a box of {shown} lies in {str(file)[:100]!r}, which is no file of tensors of this checkpoint"
        )
    offset, shape, span = _sizes(value.get("offset")), _sizes(value.get("shape")), _sizes(value.get("bytes"))
    if not isinstance(key, str) or offset is None or shape is None or span is None or len(span) != 2:
        raise ValueError(f"a box of {shown} has no valid key, offset, shape and bytes")
    if sha256 is not None and not is_sha256(sha256):
        raise ValueError(f"a box of {shown} has no valid SHA-256")
    start, stop = span
    if stop > files[file].size_bytes or stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a box of {shown} of shape {list(shape)} does not lie in bytes {start} to {stop} of {file}")
    return StoredBox(file=file, key=key, offset=offset, shape=shape, start=start, stop=stop, sha256=sha256)


def _sizes(value: Any) -> Shape | None:
    # `type(...) is int`: JSON's true is an int to isinstance.
    if not isinstance(value, list) or len(value) > _MAX_DIMS:
        return None
    if not all(type(size) is int and 0 <= size <= _MAX_BYTES for size in value):
        return None
    return tuple(value)


def require_whole(index: Index) -> None:
    """Refuse boxes that do not fill their tensor, each place once."""
    for entries in index.values():
        for name, entry in entries.items():
            boxes, shown = [(box.offset, box.shape) for box in entry.boxes], repr(name[:100])
            if any(len(offset) != len(entry.shape) or len(size) != len(entry.shape) for offset, size in boxes):
                raise ValueError(f"a box of {shown} has another number of dimensions than it")
            if boxes if 0 in entry.shape else not _fills(boxes, entry.shape, 0):
                raise ValueError(f"the boxes of {shown} do not fill its shape {list(entry.shape)}, each place once")


def _fills(boxes: list[tuple[Shape, Shape]], shape: Shape, dim: int) -> bool:
    """Whether the boxes are slabs along this dimension that follow one another, each filled along the next ones.

    So are those of every mesh, which cuts a dimension in the same places whatever it does with the others. And no
    number of boxes takes long.
    """
    if dim == len(shape):
        return len(boxes) == 1
    slabs: dict[tuple[int, int], list[tuple[Shape, Shape]]] = {}
    for box in boxes:
        slabs.setdefault((box[0][dim], box[1][dim]), []).append(box)
    reached = 0
    for start, size in sorted(slabs):
        if start != reached or not size or not _fills(slabs[start, size], shape, dim + 1):
            return False
        reached += size
    return reached == shape[dim]


def boxes_digest(entries: Mapping[str, Entry]) -> str:
    """SHA-256 over name, dtype, shape and boxes in order of name; the same values cut otherwise give another one.

    Per tensor a line of JSON: `[name, dtype, shape, [[offset, shape, SHA-256 of the values], ...]]`.
    """
    digest = hashlib.sha256()
    for name, entry in sorted(entries.items()):
        boxes = sorted((box.offset, box.shape, box.sha256) for box in entry.boxes)
        digest.update(json.dumps([name, str(entry.dtype), entry.shape, boxes]).encode() + b"\n")
    return digest.hexdigest()


def copy_overlap(source: Tensor, source_offset: Shape, into: Tensor, into_offset: Shape) -> None:
    """Copy what two boxes of one tensor share."""
    for dim, (start, first) in enumerate(zip(source_offset, into_offset, strict=True)):
        low, high = max(start, first), min(start + source.shape[dim], first + into.shape[dim])
        source, into = source.narrow(dim, low - start, high - low), into.narrow(dim, low - first, high - low)
    into.copy_(source)


def overlapping(boxes: Iterable[StoredBox], offset: Shape, shape: Shape) -> list[StoredBox]:
    """Those that share something with a box."""
    ends = [start + size for start, size in zip(offset, shape, strict=True)]
    return [
        box
        for box in boxes
        if all(
            start < end and first < start + size
            for start, size, first, end in zip(box.offset, box.shape, offset, ends, strict=True)
        )
    ]
