"""The indexes of a checkpoint: the shape of every tensor, and where its chunks lie.

A chunk is an offset and a shape. The chunks of a tensor cover it exactly once: an index with gaps or overlaps is
refused. A tensor without elements has no chunk.

`index.json` says which ranks hold which chunks. Tensors that are sharded alike share one list of chunks, so that the
index grows with the ranks plus the tensors, not with their product. `index-00000.json` of each rank says where in its
shard a chunk lies, and the SHA-256 of its values.
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

from stormo.checkpoint.format import (
    LOCAL,
    OWN,
    SECTIONS,
    FileEntry,
    is_sha256,
    load_json,
    rank_index_name,
    shard_name,
)
from stormo.checkpoint.tensors import DTYPE_NAMES, DTYPES

Shape = tuple[int, ...]

_MAX_DIMS = 64  # torch's own limit
_MAX_BYTES = 2**62


class RankChunk(NamedTuple):
    """A chunk of a tensor, and the rank that holds it."""

    rank: int
    offset: Shape
    shape: Shape


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredChunk:
    """A chunk of a tensor in a file."""

    file: str
    offset: Shape
    shape: Shape
    start: int  # its first byte in the file
    stop: int
    sha256: str | None = None  # of its values; none in version 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """A tensor of the checkpoint."""

    dtype: torch.dtype
    shape: Shape
    chunks: tuple[StoredChunk, ...] | tuple[RankChunk, ...]
    stored_as: str = ""  # its name in the ranks' indexes, where its chunks are `RankChunk`s


Index = dict[str, dict[str, TensorEntry]]  # by section and name


# index.json


def index_json(index: Index) -> bytes:
    """`index.json` of tensors with `RankChunk`s."""
    numbers: dict[int, int] = {}  # by the identity of the tuple of chunks, which tensors that are sharded alike share
    listed: list[tuple[RankChunk, ...]] = []
    sections: dict[str, dict[str, list[Any]]] = {}
    for section, entries in index.items():
        written = sections[section] = {}
        for name, entry in sorted(entries.items()):
            if id(entry.chunks) not in numbers:
                numbers[id(entry.chunks)] = len(listed)
                listed.append(entry.chunks)  # type: ignore[arg-type]
            alias = [entry.stored_as] if entry.stored_as != name else []
            written[name] = [DTYPE_NAMES[entry.dtype], entry.shape, numbers[id(entry.chunks)], *alias]
    return json.dumps({"chunk_lists": listed, **sections}, separators=(",", ":")).encode()


def parse_index(data: bytes, files: Mapping[str, FileEntry]) -> Index:
    """The index in `data`, whose ranks must have both files in the manifest; a `ValueError` says what is wrong."""
    body = load_json(data)
    if not isinstance(body, dict) or set(body) != {"chunk_lists", *SECTIONS}:
        raise ValueError(f"it does not hold the sections {' and '.join(SECTIONS)}, and lists of chunks")
    if not isinstance(body["chunk_lists"], list):
        raise ValueError("its lists of chunks are not a list")
    chunk_lists = [_rank_chunks(listed, files) for listed in body["chunk_lists"]]
    checked: set[tuple[int, Shape]] = set()
    index: Index = {}
    for section in SECTIONS:
        entries = index[section] = {}
        for name, value in _section(body, section).items():
            shown = repr(name[:100])
            if not isinstance(value, list) or len(value) not in (3, 4):
                raise ValueError(f"its entry for {shown} is not a dtype, a shape and a list of chunks")
            dtype, shape = _dtype_and_shape(shown, value[0], value[1])
            number, stored_as = value[2], value[3] if len(value) == 4 else name
            if type(number) is not int or not 0 <= number < len(chunk_lists) or not isinstance(stored_as, str):
                raise ValueError(f"its entry for {shown} has no valid list of chunks")
            if (number, shape) not in checked:
                _require_covered(shown, [chunk[1:] for chunk in chunk_lists[number]], shape)
                checked.add((number, shape))
            entries[name] = TensorEntry(dtype=dtype, shape=shape, chunks=chunk_lists[number], stored_as=stored_as)
    return index


def _rank_chunks(listed: Any, files: Mapping[str, FileEntry]) -> tuple[RankChunk, ...]:
    if not isinstance(listed, list):
        raise ValueError("a list of chunks is not a list")
    chunks = []
    for value in listed:
        rank, offset, shape = value if isinstance(value, list) and len(value) == 3 else (None, None, None)
        offset, shape = _sizes(offset), _sizes(shape)
        if type(rank) is not int or rank < 0 or offset is None or shape is None:
            raise ValueError("a chunk is not a rank, an offset and a shape")
        if shard_name(rank) not in files or rank_index_name(rank) not in files:
            raise ValueError(f"a chunk lies in {shard_name(rank)!r}, which is no tensor file of this checkpoint")
        chunks.append(RankChunk(rank, offset, shape))
    return tuple(chunks)


# index-00000.json


def rank_index_json(index: Index) -> bytes:
    """The index of one rank's shard."""
    body = {
        section: {
            name: [
                DTYPE_NAMES[entry.dtype],
                entry.shape,
                [[chunk.offset, chunk.shape, chunk.start, chunk.sha256] for chunk in _stored(entry)],
            ]
            for name, entry in entries.items()
        }
        for section, entries in index.items()
    }
    return json.dumps(body, separators=(",", ":")).encode()


def parse_rank_index(data: bytes, rank: int, size_bytes: int) -> Index:
    """The index of a rank whose shard has so many bytes; a `ValueError` says what is wrong with it."""
    body = load_json(data)
    if not isinstance(body, dict) or not body.keys() <= {*SECTIONS, LOCAL, OWN}:
        raise ValueError("it is not an index of a rank")
    return {
        section: {
            name: _rank_entry(name, value, shard_name(rank), size_bytes)
            for name, value in _section(body, section).items()
        }
        for section in body
    }


def _rank_entry(name: str, value: Any, file: str, size_bytes: int) -> TensorEntry:
    shown = repr(name[:100])
    if not isinstance(value, list) or len(value) != 3 or not isinstance(value[2], list):
        raise ValueError(f"its entry for {shown} is not a dtype, a shape and a list of chunks")
    dtype, whole = _dtype_and_shape(shown, value[0], value[1])
    chunks = []
    for one in value[2]:
        if not isinstance(one, list) or len(one) != 4:
            raise ValueError(f"a chunk of {shown} has no offset, shape, first byte and SHA-256")
        offset, shape, start = _sizes(one[0]), _sizes(one[1]), _sizes([one[2]])
        if offset is None or shape is None or start is None or not len(offset) == len(shape) == len(whole):
            raise ValueError(f"a chunk of {shown} has no valid offset, shape and first byte")
        if not is_sha256(one[3]):
            raise ValueError(f"a chunk of {shown} has no valid SHA-256")
        stop = start[0] + math.prod(shape) * dtype.itemsize
        if stop > size_bytes:
            raise ValueError(f"a chunk of {shown} lies in bytes {start[0]} to {stop} of a file of {size_bytes}")
        chunks.append(StoredChunk(file=file, offset=offset, shape=shape, start=start[0], stop=stop, sha256=one[3]))
    return TensorEntry(dtype=dtype, shape=whole, chunks=tuple(chunks))


def _stored(entry: TensorEntry) -> tuple[StoredChunk, ...]:
    return entry.chunks  # type: ignore[return-value]


# Both indexes


def _section(body: Mapping[str, Any], section: str) -> dict[str, Any]:
    listed = body[section]
    if not isinstance(listed, dict):
        raise ValueError(f"its section {section} is not an object")
    return listed


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


def _require_covered(shown: str, chunks: Sequence[tuple[Shape, Shape]], shape: Shape) -> None:
    if any(len(offset) != len(shape) or len(size) != len(shape) for offset, size in chunks):
        raise ValueError(f"a chunk of {shown} has another number of dimensions than it")
    if chunks if 0 in shape else not _covers(chunks, shape, 0):
        raise ValueError(f"the chunks of {shown} do not cover its shape {list(shape)} exactly once")


def _covers(chunks: Sequence[tuple[Shape, Shape]], shape: Shape, dim: int) -> bool:
    """Whether the chunks are consecutive slabs along this dimension, each covered along the next ones.

    Every mesh splits a dimension at the same indices, whatever it does with the others. The time is linear in the
    number of chunks.
    """
    if dim == len(shape):
        return len(chunks) == 1
    slabs: dict[tuple[int, int], list[tuple[Shape, Shape]]] = {}
    for chunk in chunks:
        slabs.setdefault((chunk[0][dim], chunk[1][dim]), []).append(chunk)
    reached = 0
    for start, size in sorted(slabs):
        if start != reached or not size or not _covers(slabs[start, size], shape, dim + 1):
            return False
        reached += size
    return reached == shape[dim]


def chunks_digest(entries: Mapping[str, TensorEntry]) -> str:
    """SHA-256 over name, dtype, shape and chunks in order of name; it depends on how the values are sharded.

    Per tensor a line of JSON: `[name, dtype, shape, [[offset, shape, SHA-256 of the values], ...]]`.
    """
    digest = hashlib.sha256()
    for name, entry in sorted(entries.items()):
        chunks = sorted((chunk.offset, chunk.shape, chunk.sha256) for chunk in _stored(entry))
        digest.update(json.dumps([name, str(entry.dtype), entry.shape, chunks]).encode() + b"\n")
    return digest.hexdigest()


def digest_of_ranks(digests: Iterable[str]) -> str:
    """SHA-256 over one line a rank, in their order: the digest of its chunks of the weights."""
    return hashlib.sha256("".join(f"{digest}\n" for digest in digests).encode()).hexdigest()


def copy_overlap(source: Tensor, source_offset: Shape, into: Tensor, into_offset: Shape) -> None:
    """Copy what two chunks of one tensor share."""
    for dim, (start, first) in enumerate(zip(source_offset, into_offset, strict=True)):
        low, high = max(start, first), min(start + source.shape[dim], first + into.shape[dim])
        source, into = source.narrow(dim, low - start, high - low), into.narrow(dim, low - first, high - low)
    into.copy_(source)


def overlapping(
    chunks: Iterable[StoredChunk | RankChunk], offset: Shape, shape: Shape
) -> list[StoredChunk | RankChunk]:
    """The chunks that share something with this one."""
    ends = [start + size for start, size in zip(offset, shape, strict=True)]
    return [
        chunk
        for chunk in chunks
        if all(
            start < end and first < start + size
            for start, size, first, end in zip(chunk.offset, chunk.shape, offset, ends, strict=True)
        )
    ]
