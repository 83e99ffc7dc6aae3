"""The indexes of a checkpoint: for every tensor its whole shape, and which box of it lies where.

A box is an offset and a shape. The boxes of a tensor fill it, each place once: a part that is missing or given twice is
refused. A tensor without elements has no box.

`index.json` says which ranks hold which box. Many tensors are cut alike, so each way of cutting stands there once, and
its size grows with the ranks and with the tensors, not with their product. Each rank's own `index-00000.json` says
where in its file a box lies, and the SHA-256 of its values.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stormo.checkpoint.layout import LOCAL, OWN, SECTIONS, SHARD_NAME, FileEntry, is_sha256, part_name, shard_name
from stormo.checkpoint.tensors import DTYPE_NAMES, DTYPES

Shape = tuple[int, ...]

_MAX_DIMS = 64  # torch's own limit
_MAX_BYTES = 2**62


class Place(NamedTuple):
    """A box of a tensor, and the rank that holds it."""

    rank: int
    offset: Shape
    shape: Shape


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredBox:
    """A box of a tensor in a file."""

    file: str
    offset: Shape
    shape: Shape
    start: int  # its first byte in the file
    stop: int
    sha256: str | None = None  # of its values; in version 2 of weights alone


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A whole tensor."""

    dtype: torch.dtype
    shape: Shape
    boxes: tuple[StoredBox, ...] | tuple[Place, ...]
    stored_as: str = ""  # its name in the indexes of the ranks, where it has places


Index = dict[str, dict[str, Entry]]  # by section and name


# What every rank holds (version 3)


def index_json(index: Index) -> bytes:
    """`index.json` of tensors that have places."""
    cuts: dict[int, int] = {}  # by the identity of a tuple of places, which tensors that are cut alike share
    listed: list[tuple[Place, ...]] = []
    sections: dict[str, dict[str, list[Any]]] = {}
    for section, entries in index.items():
        said = sections[section] = {}
        for name, entry in sorted(entries.items()):
            if id(entry.boxes) not in cuts:
                cuts[id(entry.boxes)] = len(listed)
                listed.append(entry.boxes)  # type: ignore[arg-type]
            alias = [entry.stored_as] if entry.stored_as != name else []
            said[name] = [DTYPE_NAMES[entry.dtype], entry.shape, cuts[id(entry.boxes)], *alias]
    return json.dumps({"cuts": listed, **sections}, separators=(",", ":")).encode()


def parse_index(data: bytes, files: Mapping[str, FileEntry]) -> Index:
    """The index in `data`; `ValueError` says in words what is wrong with it.

    Args:
        data: JSON.
        files: of the manifest; every rank that holds something must have its two files there.
    """
    body = _loaded(data)
    if not isinstance(body, dict) or set(body) != {"cuts", *SECTIONS}:
        raise ValueError(f"it does not hold the sections {' and '.join(SECTIONS)}, and how they are cut")
    if not isinstance(body["cuts"], list):
        raise ValueError("its ways of cutting are not a list")
    cuts = [_cut(listed, files) for listed in body["cuts"]]
    checked: dict[tuple[int, Shape], bool] = {}
    index: Index = {}
    for section in SECTIONS:
        if not isinstance(body[section], dict):
            raise ValueError(f"its section {section} is not an object")
        entries = index[section] = {}
        for name, value in body[section].items():
            shown = repr(name[:100])
            if not isinstance(value, list) or len(value) not in (3, 4):
                raise ValueError(f"its entry for {shown} is not a type, a shape and a way of cutting")
            dtype, shape = _dtype_and_shape(shown, value[0], value[1])
            number, stored_as = value[2], value[3] if len(value) == 4 else name
            if type(number) is not int or not 0 <= number < len(cuts) or not isinstance(stored_as, str):
                raise ValueError(f"its entry for {shown} has no valid way of cutting")
            if (number, shape) not in checked:
                _require_filled(shown, [place[1:] for place in cuts[number]], shape)
                checked[number, shape] = True
            entries[name] = Entry(dtype=dtype, shape=shape, boxes=cuts[number], stored_as=stored_as)
    return index


def _cut(listed: Any, files: Mapping[str, FileEntry]) -> tuple[Place, ...]:
    if not isinstance(listed, list):
        raise ValueError("a way of cutting is not a list")
    places = []
    for value in listed:
        rank, offset, shape = value if isinstance(value, list) and len(value) == 3 else (None, None, None)
        offset, shape = _sizes(offset), _sizes(shape)
        if type(rank) is not int or rank < 0 or offset is None or shape is None:
            raise ValueError("a place is not a rank, an offset and a shape")
        if shard_name(rank) not in files or part_name(rank) not in files:
            raise ValueError(f"a box lies in {shard_name(rank)!r}, which is no file of tensors of this checkpoint")
        places.append(Place(rank, offset, shape))
    return tuple(places)


# What one rank holds (version 3)


def part_json(index: Index) -> bytes:
    """A rank's own index."""
    body = {
        section: {
            name: [
                DTYPE_NAMES[entry.dtype],
                entry.shape,
                [[box.offset, box.shape, box.start, box.sha256] for box in _stored(entry)],
            ]
            for name, entry in entries.items()
        }
        for section, entries in index.items()
    }
    return json.dumps(body, separators=(",", ":")).encode()


def parse_part(data: bytes, rank: int, size_bytes: int) -> Index:
    """The index of a rank whose file has so many bytes; `ValueError` says in words what is wrong with it."""
    body = _loaded(data)
    if not isinstance(body, dict) or not body.keys() <= {*SECTIONS, LOCAL, OWN}:
        raise ValueError("it is not an index of a rank")
    index: Index = {}
    for section, listed in body.items():
        if not isinstance(listed, dict):
            raise ValueError(f"its section {section} is not an object")
        index[section] = {name: _part_entry(name, value, rank, size_bytes) for name, value in listed.items()}
    return index


def _part_entry(name: str, value: Any, rank: int, size_bytes: int) -> Entry:
    shown = repr(name[:100])
    if not isinstance(value, list) or len(value) != 3 or not isinstance(value[2], list):
        raise ValueError(f"its entry for {shown} is not a type, a shape and a list of boxes")
    dtype, whole = _dtype_and_shape(shown, value[0], value[1])
    boxes = []
    for one in value[2]:
        if not isinstance(one, list) or len(one) != 4:
            raise ValueError(f"a box of {shown} has no offset, shape, first byte and SHA-256")
        offset, shape, start = _sizes(one[0]), _sizes(one[1]), _sizes([one[2]])
        if offset is None or shape is None or start is None or not len(offset) == len(shape) == len(whole):
            raise ValueError(f"a box of {shown} has no valid offset, shape and first byte")
        if not is_sha256(one[3]):
            raise ValueError(f"a box of {shown} has no valid SHA-256")
        stop = start[0] + math.prod(shape) * dtype.itemsize
        if stop > size_bytes:
            raise ValueError(f"a box of {shown} lies in bytes {start[0]} to {stop} of a file of {size_bytes}")
        boxes.append(
            StoredBox(file=shard_name(rank), offset=offset, shape=shape, start=start[0], stop=stop, sha256=one[3])
        )
    return Entry(dtype=dtype, shape=whole, boxes=tuple(boxes))


def _stored(entry: Entry) -> tuple[StoredBox, ...]:
    return entry.boxes  # type: ignore[return-value]


# One index for all (version 2)


def parse_one_index(data: bytes, files: Mapping[str, FileEntry]) -> Index:
    """The index of a checkpoint of version 2; `ValueError` says in words what is wrong with it."""
    body = _loaded(data)
    if not isinstance(body, dict) or body.keys() - {LOCAL} != set(SECTIONS):
        raise ValueError(f"it does not hold the sections {' and '.join(SECTIONS)}")
    index: Index = {}
    for section in (*SECTIONS, *([LOCAL] if LOCAL in body else [])):
        if not isinstance(body[section], dict):
            raise ValueError(f"its section {section} is not an object")
        index[section] = {name: _entry(name, value, files) for name, value in body[section].items()}
    require_whole(index)
    return index


def _entry(name: str, value: Any, files: Mapping[str, FileEntry]) -> Entry:
    shown = repr(name[:100])
    said = value if isinstance(value, dict) else {}
    dtype, shape = _dtype_and_shape(shown, said.get("dtype"), said.get("shape"))
    if not isinstance(listed := said.get("boxes"), list):
        raise ValueError(f"its entry for {shown} has no list of boxes")
    return Entry(dtype=dtype, shape=shape, boxes=tuple(_box(shown, one, dtype, files) for one in listed))


def _box(shown: str, value: Any, dtype: torch.dtype, files: Mapping[str, FileEntry]) -> StoredBox:
    if not isinstance(value, dict):
        raise ValueError(f"a box of {shown} is not an object")
    file, sha256 = value.get("file"), value.get("sha256")
    if not isinstance(file, str) or SHARD_NAME.fullmatch(file) is None or file not in files:
        raise ValueError(
            f"a box of {shown} lies in {str(file)[:100]!r}, which is no file of tensors of this checkpoint"
        )
    offset, shape, span = _sizes(value.get("offset")), _sizes(value.get("shape")), _sizes(value.get("bytes"))
    if offset is None or shape is None or span is None or len(span) != 2:
        raise ValueError(f"a box of {shown} has no valid offset, shape and bytes")
    if sha256 is not None and not is_sha256(sha256):
        raise ValueError(f"a box of {shown} has no valid SHA-256")
    start, stop = span
    if stop > files[file].size_bytes or stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a box of {shown} of shape {list(shape)} does not lie in bytes {start} to {stop} of {file}")
    return StoredBox(file=file, offset=offset, shape=shape, start=start, stop=stop, sha256=sha256)


# All of them


def _loaded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"it is not valid JSON ({error})") from error


def _dtype_and_shape(shown: str, dtype: Any, shape: Any) -> tuple[torch.dtype, Shape]:
    known, sizes = DTYPES.get(str(dtype)), _sizes(shape)
    if known is None:
        raise ValueError(f"its entry for {shown} has no valid dtype")
    if sizes is None or math.prod(max(size, 1) for size in sizes) * known.itemsize > _MAX_BYTES:
        raise ValueError(f"its entry for {shown} has no valid shape")
    return known, sizes


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
            _require_filled(repr(name[:100]), [(box.offset, box.shape) for box in entry.boxes], entry.shape)


def _require_filled(shown: str, boxes: Sequence[tuple[Shape, Shape]], shape: Shape) -> None:
    if any(len(offset) != len(shape) or len(size) != len(shape) for offset, size in boxes):
        raise ValueError(f"a box of {shown} has another number of dimensions than it")
    if boxes if 0 in shape else not _fills(boxes, shape, 0):
        raise ValueError(f"the boxes of {shown} do not fill its shape {list(shape)}, each place once")


def _fills(boxes: Sequence[tuple[Shape, Shape]], shape: Shape, dim: int) -> bool:
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
        boxes = sorted((box.offset, box.shape, box.sha256) for box in _stored(entry))
        digest.update(json.dumps([name, str(entry.dtype), entry.shape, boxes]).encode() + b"\n")
    return digest.hexdigest()


def digest_of_ranks(digests: Iterable[str]) -> str:
    """SHA-256 over a line for each rank, in their order: the digest of its boxes of the weights."""
    return hashlib.sha256("".join(f"{digest}\n" for digest in digests).encode()).hexdigest()


def copy_overlap(source: Tensor, source_offset: Shape, into: Tensor, into_offset: Shape) -> None:
    """Copy what two boxes of one tensor share."""
    for dim, (start, first) in enumerate(zip(source_offset, into_offset, strict=True)):
        low, high = max(start, first), min(start + source.shape[dim], first + into.shape[dim])
        source, into = source.narrow(dim, low - start, high - low), into.narrow(dim, low - first, high - low)
    into.copy_(source)


def overlapping(boxes: Iterable[StoredBox | Place], offset: Shape, shape: Shape) -> list[StoredBox | Place]:
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
