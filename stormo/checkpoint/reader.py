"""Finds, verifies and reads checkpoints of any version, whatever mesh has saved them.

Files are opened without following links and compared with the size and SHA-256 of the manifest; nothing in them is ever
run. There is no pointer file: the newest published folder is the latest checkpoint.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import itertools
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Self, TypeGuard

import torch
from torch import Tensor

from stormo.checkpoint.format import (
    INDEX,
    LOCAL,
    MANIFEST,
    MAX_INDEX_BYTES,
    MAX_MANIFEST_BYTES,
    OWN,
    RANK_INDEX_NAME,
    RANKS,
    SECTIONS,
    STATE,
    STEP_NAME,
    TENSOR_FILES,
    VALUES,
    WHOLE,
    CorruptCheckpointError,
    Found,
    Manifest,
    Snapshot,
    load_json,
    parse_manifest,
    rank_index_name,
    shard_name,
)
from stormo.checkpoint.index import (
    Index,
    RankChunk,
    Shape,
    StoredChunk,
    TensorEntry,
    chunks_digest,
    copy_overlap,
    digest_of_ranks,
    overlapping,
    parse_index,
    parse_rank_index,
)
from stormo.checkpoint.tensors import DTYPES, decode, from_bytes, header_length, weights_digest

_PIECE_BYTES = 4 * 1024 * 1024
_MAX_HOLE_BYTES = 4 << 30
_MAX_NAMES = 64  # of one tensor: layers that share their weights
_Spans = Mapping[tuple[int, int], list[tuple[TensorEntry, StoredChunk, "ReadItem"]]]


def find(folder: Path | str) -> list[Found]:
    """The published checkpoints of a folder, newest first; nothing is verified."""
    return [Found(path=revisions[0], step=step) for step, revisions in published(Path(folder)).items()]


def published(folder: Path) -> dict[int, list[Path]]:
    """The published folders by step, newest first on both levels; a step has two if its replacement was cut off."""
    listed: list[tuple[int, int, Path]] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                match = STEP_NAME.fullmatch(entry.name)
                if match and entry.is_dir(follow_symlinks=False):
                    listed.append((int(match[1]), int(match[2] or 0), folder / entry.name))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    by_step: dict[int, list[Path]] = {}
    for step, _, path in sorted(listed, reverse=True):
        by_step.setdefault(step, []).append(path)
    return by_step


def newest_good(folder: Path | str) -> tuple[Found | None, tuple[CorruptCheckpointError, ...]]:
    """The newest undamaged checkpoint, or None, and what is wrong with the newer ones."""
    problems: list[CorruptCheckpointError] = []
    # A replaced folder of the same step counts until it is removed.
    for step, revisions in published(Path(folder)).items():
        for path in revisions:
            try:
                verify(path)
            except CorruptCheckpointError as error:
                problems.append(error)
            else:
                return Found(path=path, step=step), tuple(problems)
    return None, tuple(problems)


def with_newest_good(error: CorruptCheckpointError, path: Path) -> CorruptCheckpointError:
    """The same error, which also names the newest good checkpoint beside `path`."""
    good, _ = newest_good(path.parent)
    if good is None:
        return CorruptCheckpointError(error.path, error.problem, f"there is no good checkpoint in {path.parent}")
    offer = f"the newest good checkpoint is that of step {good.step}: --resume {good.path}"
    return CorruptCheckpointError(error.path, error.problem, offer)


def verify(path: Path | str) -> Manifest:
    """Compare every file with its size and SHA-256, without holding any in memory."""
    with Reader(path) as reader:
        for name in reader.manifest.files:
            with reader.open_file(name) as file:
                reader.compare(name, hashlib.file_digest(file, "sha256").hexdigest())
        return reader.manifest


def read_manifest(path: Path | str) -> Manifest:
    """The manifest of a checkpoint whose files all have their sizes; their content is not read."""
    with Reader(path) as reader:
        for name in reader.manifest.files:
            with reader.open_file(name):
                pass
        return reader.manifest


def read_state(path: Path | str) -> dict[str, Any]:
    """The plain values of a checkpoint, verified; its tensors are not read."""
    with Reader(path) as reader:
        return reader.state()


def load(path: Path | str) -> Snapshot:
    """Verify and read a checkpoint, its tensors whole; the error for a bad one names the newest good one beside it."""
    try:
        with Reader(path) as reader:
            state = reader.state()
            if reader.manifest.version == WHOLE:
                model, optimizer, ranks = (reader.tensors(name) for name in TENSOR_FILES)
            else:
                model, optimizer = reader.read_sections(*SECTIONS)
                ranks = {f"{rank}/{n}": t for rank in reader.ranks() for n, t in reader.rank_tensors(rank).items()}
            check_digest(reader, model)
    except CorruptCheckpointError as error:
        raise with_newest_good(error, Path(path)) from error
    return Snapshot(model=model, optimizer=optimizer, ranks=ranks, state=state)


def check_digest(reader: Reader, model: Mapping[str, Tensor]) -> None:
    """Refuse weights that are not those the manifest was written for."""
    manifest = reader.manifest
    if manifest.digest_of == VALUES:
        digest = weights_digest(model)
    else:
        digest = digest_of_ranks(chunks_digest(reader.rank_index(rank).get("model", {})) for rank in reader.ranks())
    if digest != manifest.weights_sha256:
        raise CorruptCheckpointError(
            reader.path / (TENSOR_FILES[0] if manifest.version == WHOLE else INDEX),
            f"the digest of its weights is {_short(digest)}, the manifest says {_short(manifest.weights_sha256)}: "
            "the two were not written together",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadItem:
    """A chunk of a stored tensor, and the tensor to read it into, which also sets the dtype."""

    section: str
    name: str
    offset: Shape
    into: Tensor


class Reader:
    """An open checkpoint. A `CorruptCheckpointError` names the damaged file.

    Of a shard only the wanted chunks are read, each compared with its own SHA-256. Of version 1 all of a file is read
    and hashed: use the values only when the call has returned. At most one chunk is held in memory besides. A folder
    that is not published yet has no manifest: it is given.
    """

    def __init__(self, path: Path | str, manifest: Manifest | None = None) -> None:
        self.path = Path(path)
        self._rank_indexes: dict[int, Index] = {}
        try:
            # All files are read from this one folder, even if it is renamed meanwhile.
            self._folder_fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise CorruptCheckpointError(self.path, "there is no such folder") from error
        except OSError as error:
            raise CorruptCheckpointError(self.path, f"it cannot be opened as a folder ({error.strerror})") from error
        try:
            self.manifest = manifest or self._read_manifest()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the folder."""
        os.close(self._folder_fd)

    # Files

    @contextmanager
    def open_file(self, name: str) -> Iterator[BufferedReader]:
        """A regular file of the folder, of the size that the manifest says; read errors name the file."""
        path, entry = self.path / name, self.manifest.files[name] if name != MANIFEST else None
        try:
            # O_NONBLOCK: opening a pipe instead of a file would otherwise wait for ever.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with open(os.open(name, flags, dir_fd=self._folder_fd), "rb") as file:  # noqa: PTH123 - a descriptor
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise CorruptCheckpointError(path, "it is not a regular file")
                if entry is not None and status.st_size != entry.size_bytes:
                    what = "it was cut short" if status.st_size < entry.size_bytes else "something was added to it"
                    raise CorruptCheckpointError(
                        path, f"it is {status.st_size:,} bytes long, the manifest says {entry.size_bytes:,}: {what}"
                    )
                if entry is not None:
                    _require_written(path, file, status.st_size)
                yield file
        except FileNotFoundError as error:
            raise CorruptCheckpointError(path, "it is missing") from error
        except MemoryError as error:
            raise CorruptCheckpointError(path, "it does not fit into the memory that is free") from error
        except OSError as error:
            problem = "it is a symbolic link" if error.errno == errno.ELOOP else f"it cannot be read ({error.strerror})"
            raise CorruptCheckpointError(path, problem) from error

    def compare(self, name: str, sha256: str) -> None:
        """Refuse a file whose SHA-256 is not that of the manifest."""
        expected = self.manifest.files[name].sha256
        if sha256 != expected:
            raise CorruptCheckpointError(
                self.path / name,
                f"its SHA-256 is {_short(sha256)}, the manifest says {_short(expected)}: "
                "at least one byte changed since it was written",
            )

    def _read(self, name: str) -> bytes:
        """All bytes of a file, verified."""
        size_bytes = self.manifest.files[name].size_bytes
        _require_memory(self.path / name, size_bytes)
        with self.open_file(name) as file:
            data = file.read(size_bytes)
        self.compare(name, hashlib.sha256(data).hexdigest())
        return data

    def _read_manifest(self) -> Manifest:
        with self.open_file(MANIFEST) as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
        if len(data) > MAX_MANIFEST_BYTES:
            raise CorruptCheckpointError(self.path / MANIFEST, f"it is longer than {MAX_MANIFEST_BYTES:,} bytes")
        try:
            return parse_manifest(data)
        except ValueError as error:
            raise CorruptCheckpointError(self.path / MANIFEST, str(error)) from error

    def state(self) -> dict[str, Any]:
        """The plain values of `state.json`."""
        try:
            state = load_json(self._read(STATE))
            if not isinstance(state, dict):
                raise ValueError("it does not hold a JSON object")
        except ValueError as error:
            raise CorruptCheckpointError(self.path / STATE, str(error)) from error
        return state

    def tensors(self, file: str) -> dict[str, Tensor]:
        """All tensors of one file, by their names in it."""
        try:
            return decode(self._read(file))
        except ValueError as error:
            raise CorruptCheckpointError(self.path / file, str(error)) from error

    # Indexes

    def entries(self, section: str) -> Mapping[str, TensorEntry]:
        """The tensors of a section (`model`, `optimizer`) by name."""
        if section not in self.index:
            self.index[section] = self._whole_entries(f"{section}.safetensors")
        return self.index[section]

    def ranks(self) -> list[int]:
        """The ranks that have an index."""
        found = (RANK_INDEX_NAME.fullmatch(name) for name in self.manifest.files)
        return sorted(int(match[1]) for match in found if match)

    @functools.cached_property
    def index(self) -> Index:
        """`index.json`; of version 1, which has none, the sections read so far."""
        if self.manifest.version == WHOLE:
            return {}
        return self._parsed(INDEX, lambda data: parse_index(data, self.manifest.files))

    def rank_index(self, rank: int) -> Index:
        """What one rank holds of all sections; in version 4 alone."""
        if rank not in self._rank_indexes:
            size_bytes = self.manifest.files[shard_name(rank)].size_bytes
            index = self._parsed(rank_index_name(rank), lambda data: parse_rank_index(data, rank, size_bytes))
            self._rank_indexes[rank] = index
        return self._rank_indexes[rank]

    def local_entries(self, rank: int) -> Mapping[str, TensorEntry]:
        """This rank's tensors of the section `local`."""
        return self.rank_index(rank).get(LOCAL, {}) if rank_index_name(rank) in self.manifest.files else {}

    def _parsed(self, name: str, parse: Callable[[bytes], Index]) -> Index:
        size_bytes = self.manifest.files[name].size_bytes
        if size_bytes > MAX_INDEX_BYTES:
            raise CorruptCheckpointError(
                self.path / name, f"it is {size_bytes:,} bytes long, of which {MAX_INDEX_BYTES:,} are allowed"
            )
        try:
            index = parse(self._read(name))
        except ValueError as error:
            raise CorruptCheckpointError(self.path / name, str(error)) from error
        self._require_disjoint(index.values(), name)
        return index

    def _whole_entries(self, name: str) -> dict[str, TensorEntry]:
        """The tensors of a file of version 1; its header is parsed after all of the file is verified."""
        size_bytes, digest = self.manifest.files[name].size_bytes, hashlib.sha256()
        with self.open_file(name) as file:
            first = file.read(8)
            try:
                head = file.read(header_length(first, size_bytes))
            except ValueError as error:
                raise CorruptCheckpointError(self.path / name, str(error)) from error
            digest.update(first + head)
            _hash_on(file, size_bytes - len(first) - len(head), digest)
        self.compare(name, digest.hexdigest())
        try:
            entries = _header_entries(name, json.loads(head), len(first) + len(head), size_bytes)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptCheckpointError(self.path / name, "it is not a valid safetensors file") from error
        self._require_disjoint([entries], name)
        return entries

    def _require_disjoint(self, sections: Iterable[Mapping[str, TensorEntry]], file: str) -> None:
        """Refuse tensors that share bytes: a small file could expand beyond all memory.

        Only tied weights may: whole tensors of one section, dtype and shape, under a few names.
        """
        spans: dict[tuple[str, int, int], tuple[int, TensorEntry]] = {}
        num_names: Counter[object] = Counter()
        for number, entries in enumerate(sections):
            for name, entry in entries.items():
                stored = entry.chunks if _is_stored(entry.chunks) else ()
                own = [(chunk.file, chunk.start, chunk.stop) for chunk in stored if chunk.start < chunk.stop]
                is_tied = all(spans.setdefault(span, (number, entry)) == (number, entry) for span in own)
                shared: list[object] = [*own] if own else [(number, entry.stored_as)] * bool(entry.stored_as)
                num_names.update(shared)
                if not is_tied or any(num_names[one] > _MAX_NAMES for one in shared):
                    raise CorruptCheckpointError(self.path / file, f"{name[:100]!r} shares its bytes with another")
        for before, after in itertools.pairwise(sorted(spans)):
            if before[0] == after[0] and after[1] < before[2]:
                raise CorruptCheckpointError(self.path / file, f"two of its chunks share bytes of {after[0]}")

    # Tensors

    def read_sections(self, *sections: str) -> list[dict[str, Tensor]]:
        """All tensors of each section, whole; every file is read once."""
        tied: dict[TensorEntry, Tensor] = {}  # tied tensors are read into memory once
        items = {
            section: [self._item(section, name, entry, tied) for name, entry in self.entries(section).items()]
            for section in sections
        }
        self.fill(item for each in items.values() for item in each)
        return [{item.name: item.into for item in each} for each in items.values()]

    def rank_tensors(self, rank: int, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """The generators and buffers of a rank: all of them, or only these names."""
        if self.manifest.version == WHOLE:
            prefix = f"{rank}/"
            own = {n.removeprefix(prefix): t for n, t in self.tensors(RANKS).items() if n.startswith(prefix)}
            return {name: tensor for name, tensor in own.items() if names is None or name in names}
        if rank_index_name(rank) not in self.manifest.files:
            return {}
        entries = self.rank_index(rank).get(OWN, {})
        items = [self._item(OWN, n, entry, {}) for n, entry in entries.items() if names is None or n in names]
        self._fill((entries[item.name], item) for item in items)
        return {item.name: item.into for item in items}

    def fill(self, items: Iterable[ReadItem]) -> None:
        """Read chunks into their tensors; only the files that hold something of them are opened."""
        self._fill((self._entry(item.section, item.name), item) for item in items)

    def _entry(self, section: str, name: str) -> TensorEntry:
        if section != LOCAL:
            return self.entries(section)[name]
        first = name.partition("/")[0]
        return self.local_entries(int(first) if first.isdecimal() else 0)[name]

    @torch.no_grad()
    def _fill(self, items: Iterable[tuple[TensorEntry, ReadItem]]) -> None:
        by_file: dict[str, dict[tuple[int, int], list[tuple[TensorEntry, StoredChunk, ReadItem]]]] = {}
        overlaps: dict[tuple[int, Shape, Shape], list[StoredChunk | RankChunk]] = {}  # of tensors sharded alike
        for entry, item in items:
            shape = tuple(item.into.shape)
            if any(first + size > whole for first, size, whole in zip(item.offset, shape, entry.shape, strict=True)):
                raise ValueError(f"{item.name} has shape {entry.shape}, which has no chunk {shape} at {item.offset}")
            key = id(entry.chunks), item.offset, shape
            if key not in overlaps:
                overlaps[key] = overlapping(entry.chunks, item.offset, shape) if item.into.numel() else []
            for found in overlaps[key]:
                chunk = self._stored(item.section, entry, found) if isinstance(found, RankChunk) else found
                spans = by_file.setdefault(chunk.file, {})
                spans.setdefault((chunk.start, chunk.stop), []).append((entry, chunk, item))
        read = self._read_through if self.manifest.version == WHOLE else self._read_chunks
        for file, spans in sorted(by_file.items()):
            read(file, spans)

    def _stored(self, section: str, entry: TensorEntry, wanted: RankChunk) -> StoredChunk:
        """Where a rank has a chunk."""
        found = self.rank_index(wanted.rank).get(section, {}).get(entry.stored_as)
        if found is not None and (found.dtype, found.shape) == (entry.dtype, entry.shape):
            for chunk in found.chunks:
                if isinstance(chunk, StoredChunk) and (chunk.offset, chunk.shape) == wanted[1:]:
                    return chunk
        raise CorruptCheckpointError(
            self.path / rank_index_name(wanted.rank),
            f"it lacks the chunk of {entry.stored_as!r} of shape {list(wanted.shape)} at {list(wanted.offset)} that "
            f"{INDEX} names",
        )

    def _read_chunks(self, name: str, spans: _Spans) -> None:
        """Read single chunks of a file, each compared with its own SHA-256 before it is used."""
        with self.open_file(name) as file:
            for start, stop in sorted(spans):
                _require_memory(self.path / name, stop - start)
                data = bytearray(stop - start)
                file.seek(start)
                file.readinto(data)
                sha256 = hashlib.sha256(data).hexdigest()
                for entry, chunk, item in spans[start, stop]:
                    if sha256 != chunk.sha256:
                        raise CorruptCheckpointError(
                            self.path / name,
                            f"the SHA-256 of its bytes {start:,} to {stop:,} is {_short(sha256)}, the index says "
                            f"{_short(str(chunk.sha256))}: at least one byte changed since it was written",
                        )
                    copy_overlap(from_bytes(data, entry.dtype, chunk.shape), chunk.offset, item.into, item.offset)

    def _read_through(self, name: str, spans: _Spans) -> None:
        """Read and hash all of a file, and take chunks out of it."""
        size_bytes, digest, at = self.manifest.files[name].size_bytes, hashlib.sha256(), 0
        with self.open_file(name) as file:
            for start, stop in sorted(spans):
                if start < at:
                    raise CorruptCheckpointError(self.path / name, "two of its tensors share bytes")
                _require_memory(self.path / name, stop - start)
                _hash_on(file, start - at, digest)
                data = bytearray(stop - start)
                file.readinto(data)
                digest.update(data)
                for entry, chunk, item in spans[start, stop]:
                    copy_overlap(from_bytes(data, entry.dtype, chunk.shape), chunk.offset, item.into, item.offset)
                at = stop
            _hash_on(file, size_bytes - at, digest)
        self.compare(name, digest.hexdigest())

    def _item(self, section: str, name: str, entry: TensorEntry, tied: dict[TensorEntry, Tensor]) -> ReadItem:
        into = tied[entry] if entry.chunks and entry in tied else self._empty(name, entry, tied)
        return ReadItem(section=section, name=name, offset=(0,) * len(entry.shape), into=into)

    def _empty(self, name: str, entry: TensorEntry, tied: dict[TensorEntry, Tensor]) -> Tensor:
        size_bytes = math.prod(entry.shape) * entry.dtype.itemsize
        _require_memory(self.path, size_bytes + sum(tensor.nbytes for tensor in tied.values()))
        try:
            into = torch.empty(entry.shape, dtype=entry.dtype)
        except RuntimeError as error:  # no memory is left, or the shape is beyond all memory
            raise CorruptCheckpointError(
                self.path, f"{name} of shape {list(entry.shape)} does not fit into the memory that is free"
            ) from error
        if entry.chunks:
            tied[entry] = into
        return into


def _is_stored(chunks: tuple[StoredChunk, ...] | tuple[RankChunk, ...]) -> TypeGuard[tuple[StoredChunk, ...]]:
    return bool(chunks) and isinstance(chunks[0], StoredChunk)


def _header_entries(name: str, header: Any, begin: int, size_bytes: int) -> dict[str, TensorEntry]:
    """The tensors in the header of a safetensors file; raises `ValueError` and the like where it makes no sense."""
    entries = {}
    for key, fields in header.items():
        if key == "__metadata__":
            continue
        shape, dtype = tuple(map(int, fields["shape"])), DTYPES[fields["dtype"]]
        start, stop = (begin + int(at) for at in fields["data_offsets"])
        num_elements = torch.Size(shape).numel()
        is_inside = min((*shape, start - begin), default=0) >= 0 and stop <= size_bytes
        if not is_inside or stop - start != num_elements * dtype.itemsize:
            raise ValueError(key)
        chunk = StoredChunk(file=name, offset=(0,) * len(shape), shape=shape, start=start, stop=stop)
        entries[key] = TensorEntry(dtype=dtype, shape=shape, chunks=(chunk,) if num_elements else ())
    return entries


def _hash_on(file: BufferedReader, num_bytes: int, digest: Any) -> None:
    """Read and hash so many bytes; a file that ends before has another SHA-256."""
    while num_bytes > 0 and (piece := file.read(min(num_bytes, _PIECE_BYTES))):
        digest.update(piece)
        num_bytes -= len(piece)


def _require_memory(file: Path, size_bytes: int) -> None:
    """Refuse what cannot fit before memory is asked for: a sparse file of any length costs nothing to make."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size_bytes > memory_bytes:
        raise CorruptCheckpointError(
            file, f"it is {size_bytes:,} bytes long, this machine has {memory_bytes:,} bytes of memory"
        )


def _require_written(path: Path, file: BufferedReader, size_bytes: int) -> None:
    """Refuse a file that is nearly all holes: it takes no disk, and hashing it would take hours."""
    at = written = 0
    while size_bytes > _MAX_HOLE_BYTES and at < size_bytes and written <= size_bytes // 8:
        try:
            start = os.lseek(file.fileno(), at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                return  # a file system that cannot tell
            start = size_bytes  # nothing but a hole follows
        at = os.lseek(file.fileno(), start, os.SEEK_HOLE) if start < size_bytes else size_bytes
        written += at - start
    if size_bytes - written > _MAX_HOLE_BYTES and written <= size_bytes // 8:
        raise CorruptCheckpointError(
            path, f"{size_bytes - written:,} of its {size_bytes:,} bytes are a hole that nothing was written into"
        )
    os.lseek(file.fileno(), 0, os.SEEK_SET)


def _short(sha256: str) -> str:
    return f"{sha256[:12]}…"
