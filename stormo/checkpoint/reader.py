"""Reads boxes of tensors out of a checkpoint of any version, whatever boxes it was saved in.

Where every box that is wanted of a file has a SHA-256 of its own, these boxes alone are read and compared. Otherwise
the file is read once, from its beginning to its end, while the SHA-256 of all of it is taken: what has been filled in
is to be used only when the reader returns. At most one box of a file is held in memory besides.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Any, TypeGuard

import torch
from torch import Tensor

from stormo.checkpoint.index import (
    Entry,
    Index,
    Place,
    Shape,
    StoredBox,
    copy_overlap,
    overlapping,
    parse_index,
    parse_one_index,
    parse_part,
)
from stormo.checkpoint.layout import (
    INDEX,
    LOCAL,
    MAX_INDEX_BYTES,
    ONE_INDEX,
    OWN,
    PART_NAME,
    RANKS,
    SHARDED,
    STATE,
    WHOLE,
    CorruptCheckpointError,
    FileEntry,
    Manifest,
    part_name,
    shard_name,
)
from stormo.checkpoint.opening import (
    PIECE_BYTES,
    compare,
    manifest_in,
    opened,
    opened_file,
    read_file,
    require_memory,
    short,
)
from stormo.checkpoint.tensors import DTYPES, decode, from_bytes, header_length

_MOST_NAMES = 64  # of one tensor: layers that share their weights
_Spans = Mapping[tuple[int, int], list[tuple[Entry, StoredBox, "Wanted"]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A box of a tensor of the checkpoint, and where to put it; the type is that of the place."""

    section: str
    name: str
    offset: Shape
    into: Tensor


class Reader:
    """A checkpoint that is open; `CorruptCheckpointError` says which file is not as it was written.

    Args:
        path: its folder.
        manifest: of a folder that has none yet.
    """

    def __init__(self, path: Path | str, manifest: Manifest | None = None) -> None:
        self.path = Path(path)
        self._parts: dict[int, Index] = {}
        with ExitStack() as stack:
            self._folder_fd = stack.enter_context(opened(self.path))
            self.manifest = manifest or manifest_in(self.path, self._folder_fd)
            self._index: Index = self._read_index() if self.manifest.version != WHOLE else {}
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

    def ranks(self) -> list[int]:
        """The ranks that have an index of their own."""
        found = (PART_NAME.fullmatch(name) for name in self.manifest.files)
        return sorted(int(match[1]) for match in found if match)

    def part(self, rank: int) -> Index:
        """What one rank holds, of all sections; in version 3 alone."""
        if rank not in self._parts:
            name, size_bytes = part_name(rank), self.manifest.files[shard_name(rank)].size_bytes
            part = self._parsed(name, lambda data, _: parse_part(data, rank, size_bytes))
            self._require_apart(part.values(), name)
            self._parts[rank] = part
        return self._parts[rank]

    def local(self, rank: int) -> Mapping[str, Entry]:
        """What workers have stored that stepped by themselves: at least what is this rank's."""
        if self.manifest.version == SHARDED:
            return self.part(rank).get(LOCAL, {}) if part_name(rank) in self.manifest.files else {}
        return self._index.get(LOCAL, {})

    def own(self, rank: int, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """What a rank had of its own (generators, buffers): all of it, or what has these names."""
        if self.manifest.version != SHARDED:
            prefix, found = f"{rank}/", self.tensors(RANKS)
            own = {name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)}
            return {name: tensor for name, tensor in own.items() if names is None or name in names}
        if part_name(rank) not in self.manifest.files:
            return {}
        entries = self.part(rank).get(OWN, {})
        chosen = {name: entry for name, entry in entries.items() if names is None or name in names}
        wanted = {name: self._place(OWN, name, entry, {}) for name, entry in chosen.items()}
        self._fill((entries[name], one) for name, one in wanted.items())
        return {name: one.into for name, one in wanted.items()}

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

    def fill(self, wanted: Iterable[Wanted]) -> None:
        """Read boxes into their places: only the files that hold something of them."""
        self._fill((self._entry(one.section, one.name), one) for one in wanted)

    def _entry(self, section: str, name: str) -> Entry:
        if section != LOCAL:
            return self.entries(section)[name]
        first = name.partition("/")[0]
        return self.local(int(first) if first.isdecimal() else 0)[name]

    @torch.no_grad()
    def _fill(self, wanted: Iterable[tuple[Entry, Wanted]]) -> None:
        by_file: dict[str, dict[tuple[int, int], list[tuple[Entry, StoredBox, Wanted]]]] = {}
        shared: dict[tuple[int, Shape, Shape], list[StoredBox | Place]] = {}  # of tensors that are cut alike
        for entry, one in wanted:
            shape = tuple(one.into.shape)
            if any(first + size > whole for first, size, whole in zip(one.offset, shape, entry.shape, strict=True)):
                raise ValueError(f"{one.name} has shape {entry.shape}, which has no box {shape} at {one.offset}")
            key = id(entry.boxes), one.offset, shape
            if key not in shared:
                shared[key] = overlapping(entry.boxes, one.offset, shape) if one.into.numel() else []
            for found in shared[key]:
                box = self._stored(one.section, entry, found) if isinstance(found, Place) else found
                spans = by_file.setdefault(box.file, {})
                spans.setdefault((box.start, box.stop), []).append((entry, box, one))
        for file, spans in sorted(by_file.items()):
            if all(box.sha256 is not None for each in spans.values() for _, box, _ in each):
                self._read_boxes(file, spans)
            else:
                self._read_through(file, spans)

    def _stored(self, section: str, entry: Entry, place: Place) -> StoredBox:
        """Where a rank has a box."""
        found = self.part(place.rank).get(section, {}).get(entry.stored_as)
        if found is not None and (found.dtype, found.shape) == (entry.dtype, entry.shape):
            for box in found.boxes:
                if isinstance(box, StoredBox) and (box.offset, box.shape) == place[1:]:
                    return box
        raise CorruptCheckpointError(
            self.path / part_name(place.rank),
            f"it lacks the box of {entry.stored_as!r} of shape {list(place.shape)} at {list(place.offset)} that "
            f"{INDEX} names",
        )

    def _read_boxes(self, name: str, spans: _Spans) -> None:
        """Read single boxes of a file, each compared with its own SHA-256 before anything of it is used."""
        with opened_file(self.path, self._folder_fd, name, self.manifest.files[name]) as file:
            for start, stop in sorted(spans):
                require_memory(self.path / name, stop - start)
                data = bytearray(stop - start)
                file.seek(start)
                file.readinto(data)
                sha256 = hashlib.sha256(data).hexdigest()
                for whole, box, one in spans[start, stop]:
                    if sha256 != box.sha256:
                        raise CorruptCheckpointError(
                            self.path / name,
                            f"the SHA-256 of its bytes {start:,} to {stop:,} is {short(sha256)}, the index says "
                            f"{short(str(box.sha256))}: at least one byte changed since it was written",
                        )
                    copy_overlap(from_bytes(data, whole.dtype, box.shape), box.offset, one.into, one.offset)

    def _read_through(self, name: str, spans: _Spans) -> None:
        """Read all of a file, and take boxes out of it."""
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
        return self._parsed(INDEX, parse_one_index if self.manifest.version == ONE_INDEX else parse_index)

    def _parsed(self, name: str, parse: Callable[[bytes, Mapping[str, FileEntry]], Index]) -> Index:
        size_bytes = self.manifest.files[name].size_bytes
        if size_bytes > MAX_INDEX_BYTES:
            raise CorruptCheckpointError(
                self.path / name, f"it is {size_bytes:,} bytes long, of which {MAX_INDEX_BYTES:,} are allowed"
            )
        try:
            return parse(self._read(name), self.manifest.files)
        except ValueError as error:
            raise CorruptCheckpointError(self.path / name, str(error)) from error

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
        num_names: Counter[object] = Counter()
        for number, entries in enumerate(sections):
            for name, entry in entries.items():
                boxes = [box for box in entry.boxes if box.start < box.stop] if _is_stored(entry.boxes) else []
                places = [(box.file, box.start, box.stop) for box in boxes]
                is_tied = all(spans.setdefault(place, (number, entry)) == (number, entry) for place in places)
                shared: list[object] = [*places] if places else [(number, entry.stored_as)] * bool(entry.stored_as)
                num_names.update(shared)
                if not is_tied or any(num_names[one] > _MOST_NAMES for one in shared):
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


def _is_stored(boxes: tuple[StoredBox, ...] | tuple[Place, ...]) -> TypeGuard[tuple[StoredBox, ...]]:
    return bool(boxes) and isinstance(boxes[0], StoredBox)


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
        box = StoredBox(file=name, offset=(0,) * len(shape), shape=shape, start=start, stop=stop)
        entries[key] = Entry(dtype=dtype, shape=shape, boxes=(box,) if num_elements else ())
    return entries


def _pass_over(file: BufferedReader, num_bytes: int, digest: Any) -> None:
    """Read on and hash; a file that ends before is told by its sum."""
    while num_bytes > 0 and (piece := file.read(min(num_bytes, PIECE_BYTES))):
        digest.update(piece)
        num_bytes -= len(piece)
