"""Writes checkpoints: into a temporary folder, synced to the disk, published by one rename.

Whenever the process or the machine dies, every published checkpoint is complete. One process at a time publishes into a
folder. A snapshot of whole tensors is written by one process. Chunks are written by all ranks at once into one
temporary folder on a shared file system. Each rank writes a rank manifest last. Rank 0 waits for all of these, writes
the index, reads it back and publishes. Ranks exchange nothing but files here, so this may run in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stormo.checkpoint.format import (
    CHUNKS,
    INDEX,
    MANIFEST,
    MAX_INDEX_BYTES,
    MAX_MANIFEST_BYTES,
    SECTIONS,
    SHARDED,
    STATE,
    TENSOR_FILES,
    VALUES,
    CheckpointWriteError,
    CorruptCheckpointError,
    FileEntry,
    Manifest,
    Saved,
    Snapshot,
    rank_index_name,
    require_readable,
    shard_name,
    step_name,
)
from stormo.checkpoint.index import (
    Index,
    RankChunk,
    Shape,
    StoredChunk,
    TensorEntry,
    chunks_digest,
    digest_of_ranks,
    index_json,
    parse_rank_index,
    rank_index_json,
)
from stormo.checkpoint.reader import Reader, published, read_manifest
from stormo.checkpoint.retention import RetentionPolicy, new_temp_dir, remove, remove_stale_temp_dirs, rotate
from stormo.checkpoint.tensors import DTYPE_NAMES, DTYPES, Encoded, weights_digest
from stormo.errors import full_disk
from stormo.system.files import BadFileError, printable, read_bytes, read_object, sync_folder

# Up to this size, one process reads all weights back to hash their values. Larger models get a digest of their chunks'
# digests.
LARGEST_READ_BACK_BYTES = 1024**3

_MAX_PAUSE_S = 0.5
_UNKNOWN_DIGEST = "0" * 64
# The errors of a file system without hard links, or without more of them for this file.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.EACCES)


class AbandonedError(Exception):
    """A save was abandoned while it was under way."""


# Files


def write_file(
    file: Path, content: Iterable[bytes | memoryview], abandoned: threading.Event | None = None
) -> FileEntry:
    """Write a new file, sync it to the disk, and hash its bytes."""
    digest = hashlib.sha256()
    size_bytes = 0
    with file.open("xb", buffering=1024 * 1024) as stream:
        for piece in content:
            if abandoned is not None and abandoned.is_set():
                raise AbandonedError
            stream.write(piece)
            digest.update(piece)
            size_bytes += len(piece)
        stream.flush()
        os.fsync(stream.fileno())
    return FileEntry(size_bytes=size_bytes, sha256=digest.hexdigest())


@dataclass(frozen=True)
class TempDir:
    """A hidden folder to write into, and notices about its neighbours."""

    path: Path
    notices: list[str]


def make_temp_dir(folder: Path, step: int, num_bytes: int) -> TempDir:
    """Make a hidden folder beside the checkpoints, and remove the stale ones there."""
    try:
        missing = [folder, *folder.parents]
        missing = missing[: next(i for i, level in enumerate(missing) if level.is_dir())]
        for level in reversed(missing):
            level.mkdir(exist_ok=True)
            sync_folder(level.parent)
        temporary = new_temp_dir(folder, step)
    except OSError as error:
        raise _write_error("The checkpoint", folder, step, num_bytes, error) from error
    with _removed_on_failure(temporary, folder, step, num_bytes):
        return TempDir(temporary, remove_stale_temp_dirs(folder, temporary))


@contextlib.contextmanager
def _removed_on_failure(temporary: Path, folder: Path, step: int, num_bytes: int) -> Iterator[None]:
    """Remove a folder that did not become a checkpoint; an `OSError` becomes one sentence."""
    try:
        yield
    except BaseException as error:
        # Made before the folder is removed, which frees space.
        explained: BaseException = error
        if isinstance(error, OSError):
            explained = _write_error("The checkpoint", folder, step, num_bytes, error)
        shutil.rmtree(temporary, ignore_errors=True)
        if explained is not error:
            raise explained from error
        raise


def _write_error(who: str, folder: Path, step: int, num_bytes: int, error: OSError) -> CheckpointWriteError:
    """The error for a checkpoint, or a rank's part of it (`who`), that could not be written."""
    try:
        existing = next(level for level in (folder, *folder.parents) if level.is_dir())
        free = f"{shutil.disk_usage(existing).free:,} bytes were free there when it failed"
    except OSError as unknown:
        free = f"how much is free there is unknown ({unknown.strerror})"
    at = f" at {error.filename}" if error.filename else ""
    fix = ": make room, then resume (a run: with --resume)" if full_disk(error) else ""
    return CheckpointWriteError(
        f"{who} of step {step} could not be written to {folder} ({error.strerror}{at}): "
        f"it needs {num_bytes:,} bytes, {free}; older checkpoints are untouched{fix}."
    )


def _state_bytes(state: dict[str, Any]) -> bytes:
    """The content of `state.json`; values that JSON would change silently are refused."""
    _require_json(state, "state")
    # NaN and infinity (a diverged loss, a best value not reached yet) come back as they are.
    return (json.dumps(state, indent=1) + "\n").encode()


def _require_json(value: object, where: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}; the keys of a checkpoint's state are strings")
            _require_json(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _require_json(item, f"{where}[{index}]")
    elif value is not None and not isinstance(value, str | int | float):
        raise TypeError(f"{where} is a {type(value).__name__}, which JSON cannot hold; tensors go into the other parts")


# Publishing


def _metric_to_store(folder: Path, policy: RetentionPolicy, weights_sha256: str) -> float | None:
    """The metric, or that of the checkpoint being replaced if it holds the same weights."""
    if policy.metric is not None:
        return float(policy.metric) if math.isfinite(policy.metric) else None
    for path in published(folder).get(policy.step, []):
        try:
            replaced = read_manifest(path)
        except CorruptCheckpointError:
            continue  # nothing in it can be trusted; it is about to be replaced
        if replaced.weights_sha256 == weights_sha256:
            return replaced.metric
    return None


def publish(temporary: Path, folder: Path, manifest: Manifest, notices: list[str]) -> Path:
    """Write the manifest into a folder, and give the folder its public name."""
    content = manifest.to_bytes()
    require_readable(MANIFEST, len(content), MAX_MANIFEST_BYTES)
    write_file(temporary / MANIFEST, (content,))
    # The names inside must be durable before the folder gets its public name.
    sync_folder(temporary)
    return _rename(temporary, folder, manifest.step, notices)


def _rename(temporary: Path, folder: Path, step: int, notices: list[str]) -> Path:
    """Give the folder its public name; while a step is replaced, one of its two versions is always published."""
    final = folder / step_name(step)
    old = published(folder).get(step, [])
    if not old:
        temporary.rename(final)
        sync_folder(folder)
        return final
    # A folder cannot be renamed onto a full one. So: publish beside it, unpublish the old, take over its name.
    highest = max(int(path.suffix[1:] or 0) for path in old)
    beside = folder / f"{final.name}.{highest + 1}"
    temporary.rename(beside)
    sync_folder(folder)
    try:
        for path in old:
            remove(path)
        beside.rename(final)
        sync_folder(folder)
    except OSError as error:
        # The new one is durable and counts: the higher number wins. Only its name is not the plain one.
        notices.append(f"The checkpoint {final} could not be removed ({error.strerror}); {beside} is the newer one.")
        return beside if beside.exists() else final
    return final


# Whole tensors, by one process


def save(folder: Path | str, snapshot: Snapshot, policy: RetentionPolicy) -> Saved:
    """Publish `folder/step-…`, then remove superseded checkpoints; meanwhile no tensor may change."""
    return SnapshotWriter(Path(folder), snapshot, policy).write()


class SnapshotWriter:
    """Writes whole tensors; the constructor refuses what cannot be stored."""

    def __init__(self, folder: Path, snapshot: Snapshot, policy: RetentionPolicy) -> None:
        self._folder = folder
        self._policy = policy
        self._model = snapshot.model
        tensors = (snapshot.model, snapshot.optimizer, snapshot.ranks)
        self._encoded = {name: Encoded(each) for name, each in zip(TENSOR_FILES, tensors, strict=True)}
        self._state = _state_bytes(snapshot.state)

    def write(self, abandoned: threading.Event | None = None) -> Saved:
        """Write, publish and rotate."""
        folder, policy = self._folder, self._policy
        num_bytes = sum(encoded.size_bytes for encoded in self._encoded.values()) + len(self._state)
        weights = weights_digest(self._model)
        temporary = make_temp_dir(folder, policy.step, num_bytes)
        with _removed_on_failure(temporary.path, folder, policy.step, num_bytes):
            files = {name: write_file(temporary.path / name, each, abandoned) for name, each in self._encoded.items()}
            files[STATE] = write_file(temporary.path / STATE, (self._state,))
            manifest = Manifest(
                step=policy.step,
                identity=policy.identity,
                metric=_metric_to_store(folder, policy, weights),
                weights_sha256=weights,
                files=files,
            )
            path = publish(temporary.path, folder, manifest, temporary.notices)
        return rotate(path, manifest, policy, temporary.notices)


def replace_state(path: Path, state: dict[str, Any]) -> None:
    """Publish a checkpoint again with other plain values; its tensor files stay as they are."""
    manifest, folder, content = read_manifest(path), path.parent, _state_bytes(state)
    temporary = make_temp_dir(folder, manifest.step, len(content))
    with _removed_on_failure(temporary.path, folder, manifest.step, len(content)):
        for name in manifest.files:
            if name != STATE:
                _link_or_copy(path / name, temporary.path / name)
        files = {**manifest.files, STATE: write_file(temporary.path / STATE, (content,))}
        publish(temporary.path, folder, replace(manifest, files=files), temporary.notices)


def _link_or_copy(file: Path, name: Path) -> None:
    try:
        os.link(file, name, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with file.open("rb") as source:
            write_file(name, iter(lambda: source.read(1024 * 1024), b""))


# Chunks of tensors, by all ranks


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A chunk of a tensor, to be stored."""

    section: str  # `model`, `optimizer`, `local` or `own`
    name: str
    whole_shape: Shape
    offset: Shape
    tensor: Tensor

    @property
    def key(self) -> str:
        """Its name in the file."""
        return f"{self.section}/{self.name}"


def whole_chunk(section: str, name: str, tensor: Tensor) -> Chunk:
    """All of a tensor as one chunk."""
    shape = tuple(tensor.shape)
    return Chunk(section=section, name=name, whole_shape=shape, offset=(0,) * len(shape), tensor=tensor)


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What one rank gives to a checkpoint."""

    chunks: Sequence[Chunk]
    aliases: Mapping[str, str] = field(default_factory=dict)  # further names of tied weights
    state: dict[str, Any] | None = None  # the plain values, on the rank that publishes


class ShardWriter:
    """Writes one rank's part of a checkpoint; the constructor refuses what cannot be stored."""

    def __init__(self, rank: int, shard: Shard) -> None:
        self._rank = rank
        self._aliases = dict(shard.aliases)
        self._chunks = shard.chunks
        assert len({chunk.key for chunk in shard.chunks}) == len(shard.chunks), "two chunks of one tensor"
        self._tensors = {chunk.key: chunk.tensor for chunk in shard.chunks if chunk.tensor.numel()}
        self._encoded = Encoded(self._tensors)

    def write(self, temporary: Path, step: int, abandoned: threading.Event | None = None) -> None:
        """Write this rank's shard and its index, if it has any tensor, then its rank manifest."""
        file = temporary / shard_name(self._rank)
        try:
            files = self._write_files(temporary, abandoned) if self._tensors else {}
            # Renamed, so that others see it complete or not at all.
            manifest = temporary / rank_manifest_name(self._rank)
            unfinished = manifest.with_suffix(".tmp")
            write_file(unfinished, (json.dumps(self._rank_manifest(files)).encode(),))
            unfinished.rename(manifest)
            sync_folder(temporary)
        except BaseException as error:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)  # free its space
            if isinstance(error, OSError):
                who = f"Rank {self._rank}'s part of the checkpoint"
                raise _write_error(who, temporary.parent, step, self._encoded.size_bytes, error) from error
            raise

    def _write_files(self, temporary: Path, abandoned: threading.Event | None) -> dict[str, FileEntry]:
        self._encoded.digests = {}
        entry = write_file(temporary / shard_name(self._rank), self._encoded, abandoned)
        content, index = rank_index_json(self._index()), temporary / rank_index_name(self._rank)
        require_readable(f"index of rank {self._rank}", len(content), MAX_INDEX_BYTES)
        files = {shard_name(self._rank): entry, index.name: write_file(index, (content,))}
        parse_rank_index(read_bytes(index, MAX_INDEX_BYTES), self._rank, entry.size_bytes)  # as every reader will
        return files

    def _index(self) -> Index:
        index: Index = {section: {} for section in SECTIONS}
        for chunk in self._chunks:
            stored: tuple[StoredChunk, ...] = ()
            if chunk.key in self._tensors:
                assert self._encoded.digests is not None
                start, stop = self._encoded.spans[chunk.key]
                stored = (
                    StoredChunk(
                        file=shard_name(self._rank),
                        offset=chunk.offset,
                        shape=tuple(chunk.tensor.shape),
                        start=start,
                        stop=stop,
                        sha256=self._encoded.digests[chunk.key],
                    ),
                )
            entry = TensorEntry(dtype=chunk.tensor.dtype, shape=chunk.whole_shape, chunks=stored)
            index.setdefault(chunk.section, {})[chunk.name] = entry
        return index

    def _rank_manifest(self, files: Mapping[str, FileEntry]) -> dict[str, Any]:
        """What the publishing rank must know: this rank's files, and its tensors, those sharded alike together."""
        index, alike = self._index(), dict[tuple[Any, ...], dict[str, list[str]]]()
        for section in SECTIONS:
            for name, entry in index[section].items():
                key = (DTYPE_NAMES[entry.dtype], entry.shape, tuple((c.offset, c.shape) for c in entry.chunks))
                alike.setdefault(key, {}).setdefault(section, []).append(name)
        return {
            "files": {name: asdict(entry) for name, entry in files.items()},
            "weights": chunks_digest(index["model"]),
            "aliases": self._aliases,
            "chunk_lists": [[*key, names] for key, names in alike.items()],
        }


def rank_manifest_name(rank: int) -> str:
    """The file that a rank writes last; it is removed before the checkpoint is published."""
    return f"manifest-{rank:05d}.json"


class Publisher:
    """Publishes the files of all ranks as one checkpoint."""

    def __init__(self, folder: Path, shard: Shard, policy: RetentionPolicy, num_ranks: int) -> None:
        assert shard.state is not None
        self._folder = folder
        self._policy = policy
        self._num_ranks = num_ranks
        self._state = _state_bytes(shard.state)

    def publish(self, temporary: Path, notices: Sequence[str] = (), abandoned: threading.Event | None = None) -> Saved:
        """Wait for every rank manifest, then publish and rotate; after a failure the temporary folder is gone."""
        notices, folder, policy = list(notices), self._folder, self._policy
        with _removed_on_failure(temporary, folder, policy.step, len(self._state)):
            files = {STATE: write_file(temporary / STATE, (self._state,))}
            self._wait(temporary, abandoned or threading.Event())
            try:
                found = _read_rank_manifests(temporary, self._num_ranks)
                files |= found.files
                content = index_json(found.index())
                require_readable(INDEX, len(content), MAX_INDEX_BYTES)
                files[INDEX] = write_file(temporary / INDEX, (content,))
                manifest = self._manifest(temporary, files, found.digests)
            except (ValueError, KeyError, TypeError, CorruptCheckpointError, BadFileError) as error:
                problem = error.problem if isinstance(error, CorruptCheckpointError | BadFileError) else error
                raise CheckpointWriteError(
                    f"The checkpoint of step {policy.step} was not published, as the files of the workers are "
                    f"incomplete ({problem}); older checkpoints are untouched."
                ) from error
            for rank in range(self._num_ranks):
                (temporary / rank_manifest_name(rank)).unlink()
            path = publish(temporary, folder, manifest, notices)
        return rotate(path, manifest, policy, notices)

    def _wait(self, temporary: Path, abandoned: threading.Event) -> None:
        missing, pause_s = list(range(self._num_ranks)), 0.005
        while missing := [rank for rank in missing if not (temporary / rank_manifest_name(rank)).exists()]:
            temporary.stat()  # raises if the folder was taken away
            if abandoned.wait(pause_s):
                raise AbandonedError
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _manifest(self, temporary: Path, files: dict[str, FileEntry], digests: Sequence[str]) -> Manifest:
        """The manifest with the digest of the weights, for which the index is read back as every reader will."""
        manifest = Manifest(
            step=self._policy.step,
            identity=self._policy.identity,
            metric=None,
            weights_sha256=_UNKNOWN_DIGEST,
            files=files,
            version=SHARDED,
        )
        with Reader(temporary, manifest) as reader:
            entries = reader.entries("model").values()
            if sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in entries) > LARGEST_READ_BACK_BYTES:
                weights, digest_of = digest_of_ranks(digests), CHUNKS
            else:
                weights, digest_of = weights_digest(reader.read_sections("model")[0]), VALUES
        metric = _metric_to_store(self._folder, self._policy, weights)
        return replace(manifest, metric=metric, weights_sha256=weights, digest_of=digest_of)


@dataclass
class _FoundTensor:
    """One tensor in the rank manifests read so far."""

    dtype: torch.dtype
    shape: Shape
    pieces: list[int] = field(default_factory=list)  # indices of the chunks of single ranks
    is_replicated: bool = True  # every rank with a chunk of it has all of it


class _RankManifests:
    """The merged manifests of all ranks."""

    def __init__(self) -> None:
        self.files: dict[str, FileEntry] = {}
        self.digests: list[str] = []
        self._tensors: dict[str, dict[str, _FoundTensor]] = {section: {} for section in SECTIONS}
        self._pieces: list[tuple[RankChunk, ...]] = []
        self._aliases: dict[str, str] = {}

    def add(self, rank: int, manifest: Mapping[str, Any]) -> None:
        """The manifest of one rank."""
        if manifest["files"]:
            self.files |= {name: FileEntry(**entry) for name, entry in manifest["files"].items()}
            self.digests.append(manifest["weights"])
        self._aliases |= manifest["aliases"]
        for dtype_name, listed, chunks, names in manifest["chunk_lists"]:
            dtype, shape = DTYPES[dtype_name], tuple(listed)
            piece = tuple(RankChunk(rank, tuple(offset), tuple(size)) for offset, size in chunks)
            is_whole = all(chunk.shape == shape for chunk in piece)
            self._pieces.append(piece)
            for section, each in names.items():
                tensors = self._tensors[section]
                for name in each:
                    found = tensors.get(name)
                    if found is None:
                        found = tensors[name] = _FoundTensor(dtype, shape)
                    elif found.dtype != dtype or found.shape != shape:
                        raise ValueError(f"{name!r} is of another dtype or shape on rank {rank}")
                    # Several ranks may store the whole state of a layer of which no element belongs to one of them.
                    is_repeated = section == "optimizer" and found.pieces and found.is_replicated and is_whole
                    if piece and not is_repeated:
                        found.is_replicated = found.is_replicated and is_whole
                        found.pieces.append(len(self._pieces) - 1)

    def index(self) -> Index:
        """The tensors with their chunks; tensors that are sharded alike share one tuple of chunks."""
        chunk_lists: dict[tuple[int, ...], tuple[RankChunk, ...]] = {}
        alike: dict[tuple[RankChunk, ...], tuple[RankChunk, ...]] = {}
        index: Index = {section: {} for section in SECTIONS}
        for section, tensors in self._tensors.items():
            for name, found in tensors.items():
                pieces = tuple(found.pieces)
                if pieces not in chunk_lists:
                    chunks = tuple(chunk for number in pieces for chunk in self._pieces[number])
                    chunk_lists[pieces] = alike.setdefault(chunks, chunks)
                index[section][name] = TensorEntry(
                    dtype=found.dtype, shape=found.shape, chunks=chunk_lists[pieces], stored_as=name
                )
        for alias, name in self._aliases.items():
            index["model"][alias] = index["model"][name]
        return index


def _read_rank_manifests(temporary: Path, num_ranks: int) -> _RankManifests:
    found = _RankManifests()
    for rank in range(num_ranks):
        manifest = read_object(temporary / rank_manifest_name(rank), max_bytes=MAX_INDEX_BYTES)
        for name, entry in manifest["files"].items():
            if name not in (shard_name(rank), rank_index_name(rank)):
                raise ValueError(f"{printable(name)} is no file of rank {rank}")
            if (size := (temporary / name).lstat().st_size) != entry["size_bytes"]:
                raise ValueError(f"{name} is {size:,} bytes long here, rank {rank} has written another size")
        found.add(rank, manifest)
    return found
