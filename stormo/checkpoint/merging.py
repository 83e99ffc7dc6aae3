"""Saving boxes of tensors: every worker writes its own file, side by side with the others; one of them publishes.

All write into one hidden folder on a file system that all see. A worker that has finished leaves a note of what lies
where; the one that publishes waits for the notes of all, makes the index of them, and goes on as for whole tensors.
Nothing here talks to other workers but through these files, so it may run in a thread.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor

from stormo.checkpoint.files import AbandonedError, gone_after_failure, write_file
from stormo.checkpoint.index import Entry, Index, boxes_digest, copy_overlap, from_json, require_whole, to_json
from stormo.checkpoint.layout import (
    BOXES,
    INDEX,
    RANKS,
    SECTIONS,
    SHARDED,
    STATE,
    VALUES,
    CheckpointWriteError,
    FileEntry,
    Saved,
    shard_name,
)
from stormo.checkpoint.publishing import Saving, manifest_of, publish, rotate
from stormo.checkpoint.shard import Shard, note_name
from stormo.checkpoint.tensors import Encoded, from_bytes, weights_digest
from stormo.checkpoint.writing import state_bytes

# The digest of whole values takes one process that reads all weights back; above this it is made of the boxes' own.
LARGEST_READ_BACK_BYTES = 1024**3

_LONGEST_PAUSE_S = 0.5
_MOST_OPEN = 200  # files at a time: a process may have few


class Publisher:
    """What makes a checkpoint of the files of all workers."""

    def __init__(self, folder: Path, shard: Shard, saving: Saving, num_workers: int) -> None:
        assert shard.state is not None
        self._folder = folder
        self._saving = saving
        self._num_workers = num_workers
        self._ranks = Encoded(shard.ranks)
        self._state = state_bytes(shard.state)

    def publish(self, temporary: Path, notices: Sequence[str] = (), abandoned: threading.Event | None = None) -> Saved:
        """Wait for every worker's note, then publish and rotate; after a failure the temporary folder is gone."""
        told, folder, saving = list(notices), self._folder, self._saving
        own_bytes = self._ranks.size_bytes + len(self._state)
        with gone_after_failure(temporary, folder, saving.step, own_bytes):
            files = {
                RANKS: write_file(temporary / RANKS, self._ranks, abandoned),
                STATE: write_file(temporary / STATE, (self._state,)),
            }
            self._wait(temporary, abandoned or threading.Event())
            index = self._read_notes(temporary, files)
            files[INDEX] = write_file(temporary / INDEX, (json.dumps(to_json(index), separators=(",", ":")).encode(),))
            weights, digest_of = _weights(temporary, index["model"])
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

    def _read_notes(self, temporary: Path, files: dict[str, FileEntry]) -> Index:
        """The index of what all workers have written, whose files are added to `files`."""
        index: Index = {section: {} for section in SECTIONS}
        aliases: dict[str, str] = {}
        try:
            for rank in range(self._num_workers):
                note = json.loads((temporary / note_name(rank)).read_bytes())
                if note["file"] is not None:
                    name = shard_name(rank)
                    files[name] = FileEntry(**note["file"])
                    if (size := (temporary / name).stat().st_size) != files[name].size_bytes:
                        raise ValueError(f"{name} is {size:,} bytes long here, where rank {rank} has written another")
                _merge(index, from_json(note["index"], files), rank)
                aliases |= note["aliases"]
            for alias, name in aliases.items():
                index["model"][alias] = index["model"][name]
            require_whole(index)
        except (ValueError, KeyError) as error:
            raise CheckpointWriteError(
                f"The checkpoint of step {self._saving.step} was not published, as what the workers have written does "
                f"not make a whole ({error}); checkpoints saved before it are untouched."
            ) from error
        return index


def _merge(index: Index, other: Index, rank: int) -> None:
    for section, entries in other.items():
        for name, entry in entries.items():
            before = index.setdefault(section, {}).setdefault(name, replace(entry, boxes=()))
            if (before.dtype, before.shape) != (entry.dtype, entry.shape):
                raise ValueError(f"{name!r} is of another type or shape on rank {rank}")
            # A state of a layer as a whole may come from several workers where the layer has no element to tell whose.
            is_repeated = before.boxes and all(box.shape == entry.shape for box in (*before.boxes, *entry.boxes))
            if not (is_repeated and section == "optimizer"):
                index[section][name] = replace(before, boxes=before.boxes + entry.boxes)


def _weights(temporary: Path, entries: Mapping[str, Entry]) -> tuple[str, str]:
    """The digest of the weights, and what it is of."""
    num_bytes = sum(box.stop - box.start for entry in entries.values() for box in entry.boxes)
    if num_bytes > LARGEST_READ_BACK_BYTES:
        return boxes_digest(entries), BOXES
    with ExitStack() as stack:
        return weights_digest(_Written(temporary, entries, stack)), VALUES


class _Written(Mapping[str, Tensor]):
    """The whole tensors in files that were just written, each read when it is asked for."""

    def __init__(self, folder: Path, entries: Mapping[str, Entry], stack: ExitStack) -> None:
        self._folder = folder
        self._entries = entries
        self._stack = stack
        self._opened: dict[str, BufferedReader] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        whole = torch.empty(entry.shape, dtype=entry.dtype)
        for box in entry.boxes:
            data, file = bytearray(box.stop - box.start), self._open(box.file)
            file.seek(box.start)
            file.readinto(data)
            copy_overlap(from_bytes(data, entry.dtype, box.shape), box.offset, whole, (0,) * len(entry.shape))
        return whole

    def _open(self, name: str) -> BufferedReader:
        if len(self._opened) > _MOST_OPEN:
            self._stack.close()
            self._opened = {}
        if name not in self._opened:
            self._opened[name] = self._stack.enter_context((self._folder / name).open("rb"))
        return self._opened[name]
