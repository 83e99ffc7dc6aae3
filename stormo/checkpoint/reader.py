"""Reads boxes of tensors out of a checkpoint of either version, whatever boxes it was saved in.

A file is read once, from its beginning to its end, while its SHA-256 is taken: what has been filled in is to be used
only when the reader returns. At most one box of a file is held in memory besides.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from stormo.checkpoint.index import (
    MAX_INDEX_BYTES,
    Entry,
    Index,
    Shape,
    StoredBox,
    copy_overlap,
    overlapping,
    parse_index,
)
from stormo.checkpoint.layout import INDEX, SHARDED, STATE, CorruptCheckpointError
from stormo.checkpoint.opening import PIECE_BYTES, compare, manifest_in, opened, opened_file, read_file, require_memory
from stormo.checkpoint.tensors import DTYPES, decode, from_bytes, header_length

_MOST_NAMES = 64  # of one tensor: layers that share their weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A box of a tensor of the checkpoint, and where to put it; the type is that of the place."""

    section: str
    name: str
    offset: Shape
    into: Tensor


class Reader:
    """A checkpoint that is open; `CorruptCheckpointError` says which file is not as it was written."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        with ExitStack() as stack:
            self._folder_fd = stack.enter_context(opened(self.path))
            self.manifest = manifest_in(self.path, self._folder_fd)
            self._index: Index = self._read_index() if self.manifest.version == SHARDED else {}
            self._require_apart(self._index.values(), INDEX)
            self._stack = stack.pop_all()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the folder."""
        self._stack.close()

    def entries(self, section: str) -> Mapping[str, Entry]:
        """The tensors of a section (`model`, `optimizer`) by name."""
        if section not in self._index:
            self._index[section] = self._whole_entries(f"{section}.safetensors")
        return self._index[section]

    def names(self, section: str) -> list[str]:
        """The names of a section."""
        return list(self.entries(section))

    def state(self) -> dict[str, Any]:
        """The plain values."""
        return parse_state(self.path / STATE, self._read(STATE))

    def tensors(self, file: str) -> dict[str, Tensor]:
        """All tensors of one file by the names that they have in it."""
        try:
            return decode(self._read(file))
        except ValueError as error:
            raise CorruptCheckpointError(self.path / file, str(error)) from error

    def whole(self, section: str, name: str) -> Tensor:
        """A whole tensor."""
        entry = self.entries(section)[name]
        return self.box(section, name, (0,) * len(entry.shape), entry.shape)

    def wholes(self, *sections: str) -> list[dict[str, Tensor]]:
        """All tensors of each section, whole; every file is read once."""
        places: dict[Entry, Tensor] = {}  # tensors of several names are read into memory once
        wanted = {
            section: [self._place(section, name, entry, places) for name, entry in self.entries(section).items()]
            for section in sections
        }
        self.fill(one for each in wanted.values() for one in each)
        return [{one.name: one.into for one in each} for each in wanted.values()]

    def box(self, section: str, name: str, offset: Shape, shape: Shape) -> Tensor:
        """A box of a tensor; for several, `fill` reads no file twice."""
        into = torch.empty(shape, dtype=self.entries(section)[name].dtype)
        self.fill([Wanted(section=section, name=name, offset=offset, into=into)])
        return into

    @torch.no_grad()
    def fill(self, wanted: Iterable[Wanted]) -> None:
        """Read boxes into their places: only the files that hold something of them, each of them once."""
        by_file: dict[str, dict[tuple[int, int], list[tuple[Entry, StoredBox, Wanted]]]] = {}
        for one in wanted:
            entry, shape = self.entries(one.section)[one.name], tuple(one.into.shape)
            if any(first + size > whole for first, size, whole in zip(one.offset, shape, entry.shape, strict=True)):
                raise ValueError(f"{one.name} has shape {entry.shape}, which has no box {shape} at {one.offset}")
            for box in overlapping(entry.boxes, one.offset, shape) if one.into.numel() else ():
                spans = by_file.setdefault(box.file, {})
                spans.setdefault((box.start, box.stop), []).append((entry, box, one))
        for file, spans in sorted(by_file.items()):
            self._read_boxes(file, spans)

    def _read_boxes(self, name: str, spans: Mapping[tuple[int, int], list[tuple[Entry, StoredBox, Wanted]]]) -> None:
        entry, digest, at = self.manifest.files[name], hashlib.sha256(), 0
        with opened_file(self.path, self._folder_fd, name, entry) as file:
            for start, stop in sorted(spans):
                if start < at:
                    raise CorruptCheckpointError(self.path / INDEX, f"two of its boxes share bytes of {name}")
                require_memory(self.path / name, stop - start)
                _pass_over(file, start - at, digest)
                data = bytearray(stop - start)
                file.readinto(data)
                digest.update(data)
                for whole, box, one in spans[start, stop]:
                    copy_overlap(from_bytes(data, whole.dtype, box.shape), box.offset, one.into, one.offset)
                at = stop
            _pass_over(file, entry.size_bytes - at, digest)
        compare(self.path / name, digest.hexdigest(), entry)

    def _read(self, name: str) -> bytes:
        return read_file(self.path, self._folder_fd, name, self.manifest.files[name])

    def _read_index(self) -> Index:
        size_bytes = self.manifest.files[INDEX].size_bytes
        if size_bytes > MAX_INDEX_BYTES:
            raise CorruptCheckpointError(
                self.path / INDEX, f"it is {size_bytes:,} bytes long, of which {MAX_INDEX_BYTES:,} are allowed"
            )
        try:
            return parse_index(self._read(INDEX), self.manifest.files)
        except ValueError as error:
            raise CorruptCheckpointError(self.path / INDEX, str(error)) from error

    def _whole_entries(self, name: str) -> dict[str, Entry]:
        """The tensors of a file of whole ones, whose header is parsed when all of it has been verified."""
        entry, digest = self.manifest.files[name], hashlib.sha256()
        with opened_file(self.path, self._folder_fd, name, entry) as file:
            first = file.read(8)
            try:
                head = file.read(header_length(first, entry.size_bytes))
            except ValueError as error:
                raise CorruptCheckpointError(self.path / name, str(error)) from error
            digest.update(first + head)
            _pass_over(file, entry.size_bytes - len(first) - len(head), digest)
        compare(self.path / name, digest.hexdigest(), entry)
        try:
            entries = _entries_of(name, json.loads(head), len(first) + len(head), entry.size_bytes)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptCheckpointError(self.path / name, "it is not a valid safetensors file") from error
        self._require_apart([entries], name)
        return entries

    def _require_apart(self, sections: Iterable[Mapping[str, Entry]], file: str) -> None:
        """Refuse tensors that share bytes, which expand a small file beyond all memory.

        Only tied weights do: whole tensors of one section, type and shape, under a few names.
        """
        spans: dict[tuple[str, int, int], tuple[int, Entry]] = {}
        num_names: dict[tuple[str, int, int], int] = {}
        for number, entries in enumerate(sections):
            for name, entry in entries.items():
                for box in entry.boxes:
                    span = (box.file, box.start, box.stop)
                    is_tied = spans.setdefault(span, (number, entry)) == (number, entry)
                    num_names[span] = num_names.get(span, 0) + 1
                    if not is_tied or num_names[span] > _MOST_NAMES:
                        raise CorruptCheckpointError(self.path / file, f"{name[:100]!r} shares its bytes with another")
        ordered = sorted(spans)
        for before, after in itertools.pairwise(ordered):
            if before[0] == after[0] and after[1] < before[2]:
                raise CorruptCheckpointError(self.path / file, f"two of its boxes share bytes of {after[0]}")

    def _place(self, section: str, name: str, entry: Entry, places: dict[Entry, Tensor]) -> Wanted:
        into = places[entry] if entry.boxes and entry in places else self._empty(name, entry, places)
        return Wanted(section=section, name=name, offset=(0,) * len(entry.shape), into=into)

    def _empty(self, name: str, entry: Entry, places: dict[Entry, Tensor]) -> Tensor:
        size_bytes = math.prod(entry.shape) * entry.dtype.itemsize
        require_memory(self.path, size_bytes + sum(place.nbytes for place in places.values()))
        try:
            into = torch.empty(entry.shape, dtype=entry.dtype)
        except RuntimeError as error:  # it has no memory left, or the shape is beyond all memory
            raise CorruptCheckpointError(
                self.path, f"{name} of shape {list(entry.shape)} does not fit into the memory that is free"
            ) from error
        if entry.boxes:
            places[entry] = into
        return into


def parse_state(file: Path, data: bytes) -> dict[str, Any]:
    """The JSON object of `state.json`."""
    try:
        state = json.loads(data)
    except RecursionError as error:
        raise CorruptCheckpointError(file, "it is nested too deeply") from error
    except ValueError as error:
        raise CorruptCheckpointError(file, f"it is not valid JSON ({error})") from error
    if not isinstance(state, dict):
        raise CorruptCheckpointError(file, "it does not hold a JSON object")
    return state


def _entries_of(name: str, header: Any, begin: int, size_bytes: int) -> dict[str, Entry]:
    """What the header of a safetensors file says; `ValueError` and the like where it makes no sense."""
    entries = {}
    for key, said in header.items():
        if key == "__metadata__":
            continue
        shape, dtype = tuple(map(int, said["shape"])), DTYPES[said["dtype"]]
        start, stop = (begin + int(place) for place in said["data_offsets"])
        num_elements = torch.Size(shape).numel()
        if (
            min((*shape, start - begin), default=0) < 0
            or stop > size_bytes
            or stop - start != num_elements * dtype.itemsize
        ):
            raise ValueError(key)
        box = StoredBox(file=name, key=key, offset=(0,) * len(shape), shape=shape, start=start, stop=stop)
        entries[key] = Entry(dtype=dtype, shape=shape, boxes=(box,) if num_elements else ())
    return entries


def _pass_over(file: BufferedReader, num_bytes: int, digest: Any) -> None:
    """Read on and hash; a file that ends before is told by its sum."""
    while num_bytes > 0 and (piece := file.read(min(num_bytes, PIECE_BYTES))):
        digest.update(piece)
        num_bytes -= len(piece)
