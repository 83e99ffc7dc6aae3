"""Saving boxes of tensors: every worker writes its own file, side by side with the others; one of them publishes.

All write into one hidden folder on a file system that all see. A worker that has finished leaves a note of what it
holds; the one that publishes waits for the notes of all, makes the index of them, reads it back, and goes on as for
whole tensors. Nothing here talks to other workers but through these files, so it may run in a thread.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stormo.checkpoint.files import AbandonedError, gone_after_failure, write_file
from stormo.checkpoint.index import Entry, Index, Place, Shape, digest_of_ranks, index_json
from stormo.checkpoint.layout import (
    BOXES,
    INDEX,
    MAX_INDEX_BYTES,
    SECTIONS,
    SHARDED,
    STATE,
    VALUES,
    CheckpointWriteError,
    CorruptCheckpointError,
    FileEntry,
    Manifest,
    Saved,
    part_name,
    require_readable,
    shard_name,
)
from stormo.checkpoint.publishing import Saving, manifest_of, publish, rotate
from stormo.checkpoint.reader import Reader
from stormo.checkpoint.shard import Shard, note_name
from stormo.checkpoint.tensors import DTYPES, weights_digest
from stormo.checkpoint.writing import state_bytes
from stormo.system.files import BadFileError, printable, read_object

# The digest of whole values takes one process that reads all weights back; above this it is made of the boxes' own.
LARGEST_READ_BACK_BYTES = 1024**3

_LONGEST_PAUSE_S = 0.5
_NOT_KNOWN = "0" * 64


class Publisher:
    """What makes a checkpoint of the files of all workers."""

    def __init__(self, folder: Path, shard: Shard, saving: Saving, num_workers: int) -> None:
        assert shard.state is not None
        self._folder = folder
        self._saving = saving
        self._num_workers = num_workers
        self._state = state_bytes(shard.state)

    def publish(self, temporary: Path, notices: Sequence[str] = (), abandoned: threading.Event | None = None) -> Saved:
        """Wait for every worker's note, then publish and rotate; after a failure the temporary folder is gone."""
        told, folder, saving = list(notices), self._folder, self._saving
        with gone_after_failure(temporary, folder, saving.step, len(self._state)):
            files = {STATE: write_file(temporary / STATE, (self._state,))}
            self._wait(temporary, abandoned or threading.Event())
            try:
                found = _read_notes(temporary, self._num_workers)
                files |= found.files
                content = index_json(found.index())
                require_readable(INDEX, len(content), MAX_INDEX_BYTES)
                files[INDEX] = write_file(temporary / INDEX, (content,))
                weights, digest_of = self._weights(temporary, files, found.digests)
            except (ValueError, KeyError, TypeError, CorruptCheckpointError, BadFileError) as error:
                problem = error.problem if isinstance(error, CorruptCheckpointError | BadFileError) else error
                raise CheckpointWriteError(
                    f"The checkpoint of step {saving.step} was not published, as what the workers have written does "
                    f"not make a whole ({problem}); checkpoints saved before it are untouched."
                ) from error
            for rank in range(self._num_workers):
                (temporary / note_name(rank)).unlink()
            manifest = manifest_of(folder, saving, weights, files, version=SHARDED, digest_of=digest_of)
            path = publish(temporary, folder, manifest, told)
        return rotate(path, manifest, saving, told)

    def _wait(self, temporary: Path, abandoned: threading.Event) -> None:
        missing, pause_s = list(range(self._num_workers)), 0.005
        while missing := [rank for rank in missing if not (temporary / note_name(rank)).exists()]:
            temporary.stat()  # a folder that was taken away gets no more notes
            if abandoned.wait(pause_s):
                raise AbandonedError
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _weights(self, temporary: Path, files: dict[str, FileEntry], digests: Sequence[str]) -> tuple[str, str]:
        """The digest of the weights, and what it is of; the index is read back for it as every reader will."""
        manifest = Manifest(
            step=self._saving.step, identity="", metric=None, weights_sha256=_NOT_KNOWN, files=files, version=SHARDED
        )
        with Reader(temporary, manifest) as reader:
            entries = reader.entries("model").values()
            if sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in entries) > LARGEST_READ_BACK_BYTES:
                return digest_of_ranks(digests), BOXES
            return weights_digest(reader.wholes("model")[0]), VALUES


@dataclass
class _Found:
    """One tensor, as far as the notes tell."""

    dtype: torch.dtype
    shape: Shape
    pieces: list[int] = field(default_factory=list)  # numbers of what single ranks hold of it
    is_repeatable: bool = True  # whether whoever holds something of it holds all of it


class _Notes:
    """What all workers have written, put together."""

    def __init__(self) -> None:
        self.files: dict[str, FileEntry] = {}
        self.digests: list[str] = []
        self._tensors: dict[str, dict[str, _Found]] = {section: {} for section in SECTIONS}
        self._pieces: list[tuple[Place, ...]] = []
        self._aliases: dict[str, str] = {}

    def add(self, rank: int, note: Mapping[str, Any]) -> None:
        """A worker's note."""
        if note["files"]:
            self.files |= {name: FileEntry(**entry) for name, entry in note["files"].items()}
            self.digests.append(note["weights"])
        self._aliases |= note["aliases"]
        for dtype_name, listed, boxes, names in note["cuts"]:
            dtype, shape = DTYPES[dtype_name], tuple(listed)
            piece = tuple(Place(rank, tuple(offset), tuple(size)) for offset, size in boxes)
            is_whole = all(place.shape == shape for place in piece)
            self._pieces.append(piece)
            for section, each in names.items():
                tensors = self._tensors[section]
                for name in each:
                    found = tensors.get(name)
                    if found is None:
                        found = tensors[name] = _Found(dtype, shape)
                    elif found.dtype != dtype or found.shape != shape:
                        raise ValueError(f"{name!r} is of another type or shape on rank {rank}")
                    # A state of a layer as a whole may come from several workers where the layer has no element to
                    # tell whose.
                    is_repeated = section == "optimizer" and found.pieces and found.is_repeatable and is_whole
                    if piece and not is_repeated:
                        found.is_repeatable = found.is_repeatable and is_whole
                        found.pieces.append(len(self._pieces) - 1)

    def index(self) -> Index:
        """The tensors with their places; those that are cut alike share one tuple of them."""
        cuts: dict[tuple[int, ...], tuple[Place, ...]] = {}
        alike: dict[tuple[Place, ...], tuple[Place, ...]] = {}
        index: Index = {section: {} for section in SECTIONS}
        for section, tensors in self._tensors.items():
            for name, found in tensors.items():
                pieces = tuple(found.pieces)
                if pieces not in cuts:
                    places = tuple(place for number in pieces for place in self._pieces[number])
                    cuts[pieces] = alike.setdefault(places, places)
                index[section][name] = Entry(dtype=found.dtype, shape=found.shape, boxes=cuts[pieces], stored_as=name)
        for alias, name in self._aliases.items():
            index["model"][alias] = index["model"][name]
        return index


def _read_notes(temporary: Path, num_workers: int) -> _Notes:
    notes = _Notes()
    for rank in range(num_workers):
        note = read_object(temporary / note_name(rank), max_bytes=MAX_INDEX_BYTES)
        for name, entry in note["files"].items():
            if name not in (shard_name(rank), part_name(rank)):
                raise ValueError(f"{printable(name)} is no file of rank {rank}")
            if (size := (temporary / name).lstat().st_size) != entry["size_bytes"]:
                raise ValueError(f"{name} is {size:,} bytes long here, where rank {rank} has written another")
        notes.add(rank, note)
    return notes
