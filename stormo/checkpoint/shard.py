"""One worker's part of a checkpoint: a file of boxes, the index of it, and a note for the one that publishes."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from stormo.checkpoint.files import sync_folder, write_error, write_file
from stormo.checkpoint.index import Entry, Index, Shape, StoredBox, boxes_digest, parse_part, part_json
from stormo.checkpoint.layout import MAX_INDEX_BYTES, SECTIONS, FileEntry, part_name, require_readable, shard_name
from stormo.checkpoint.tensors import DTYPE_NAMES, Encoded
from stormo.system.files import read_bytes


@dataclass(frozen=True, kw_only=True)
class Box:
    """A box of a whole tensor, to be stored."""

    section: str  # `model`, `optimizer`, `local` or `own`
    name: str
    whole_shape: Shape
    offset: Shape
    tensor: Tensor


def whole_box(section: str, name: str, tensor: Tensor) -> Box:
    """All of a tensor as one box."""
    shape = tuple(tensor.shape)
    return Box(section=section, name=name, whole_shape=shape, offset=(0,) * len(shape), tensor=tensor)


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What one worker gives to a checkpoint."""

    boxes: Sequence[Box]
    aliases: Mapping[str, str] = field(default_factory=dict)  # further names of weights that are tied to another
    state: dict[str, Any] | None = None  # the plain values, on the worker that publishes


class ShardSave:
    """One worker's part of a checkpoint; everything that can be refused is refused when it is made."""

    def __init__(self, rank: int, shard: Shard) -> None:
        self._rank = rank
        self._aliases = dict(shard.aliases)
        self._tensors: dict[str, Tensor] = {}
        self._keys: list[tuple[str | None, Box]] = []
        for box in shard.boxes:
            self._keys.append((self._key(box) if box.tensor.numel() else None, box))
        self._encoded = Encoded(self._tensors)

    def _key(self, box: Box) -> str:
        """Its name in the file, with a number where the worker has several boxes of one tensor."""
        plain = key = f"{box.section}/{box.name}"
        number = 1
        while key in self._tensors:
            number += 1
            key = f"{plain}#{number}"
        self._tensors[key] = box.tensor
        return key

    def write(self, temporary: Path, step: int, abandoned: threading.Event | None = None) -> None:
        """Write this worker's file and its index, if it has any tensor, then its note."""
        file = temporary / shard_name(self._rank)
        try:
            files = self._write_files(temporary, abandoned) if self._tensors else {}
            # Under its name it is there as a whole.
            unfinished = temporary / f"{note_name(self._rank)}.tmp"
            write_file(unfinished, (json.dumps(self._note(files)).encode(),))
            unfinished.rename(temporary / note_name(self._rank))
            sync_folder(temporary)
        except BaseException as error:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)  # its space may be what is lacking
            if isinstance(error, OSError):
                who = f"Rank {self._rank}'s part of the checkpoint"
                raise write_error(who, temporary.parent, step, self._encoded.size_bytes, error) from error
            raise

    def _write_files(self, temporary: Path, abandoned: threading.Event | None) -> dict[str, FileEntry]:
        self._encoded.digests = {}
        entry = write_file(temporary / shard_name(self._rank), self._encoded, abandoned)
        content, index = part_json(self._index()), temporary / part_name(self._rank)
        require_readable(f"index of rank {self._rank}", len(content), MAX_INDEX_BYTES)
        files = {shard_name(self._rank): entry, index.name: write_file(index, (content,))}
        parse_part(read_bytes(index, MAX_INDEX_BYTES), self._rank, entry.size_bytes)  # as every reader will
        return files

    def _index(self) -> Index:
        index: Index = {section: {} for section in SECTIONS}
        for key, box in self._keys:
            entries, stored = index.setdefault(box.section, {}), list[StoredBox]()
            if key is not None:
                assert self._encoded.digests is not None
                start, stop = self._encoded.spans[key]
                stored.append(
                    StoredBox(
                        file=shard_name(self._rank),
                        offset=box.offset,
                        shape=tuple(box.tensor.shape),
                        start=start,
                        stop=stop,
                        sha256=self._encoded.digests[key],
                    )
                )
            before = entries[box.name].boxes if box.name in entries else ()
            entries[box.name] = Entry(dtype=box.tensor.dtype, shape=box.whole_shape, boxes=(*before, *stored))
        return index

    def _note(self, files: Mapping[str, FileEntry]) -> dict[str, Any]:
        """What the one that publishes must know: this worker's files, and the tensors that are cut alike together."""
        index, alike = self._index(), dict[tuple[Any, ...], dict[str, list[str]]]()
        for section in SECTIONS:
            for name, entry in index[section].items():
                cut = (DTYPE_NAMES[entry.dtype], entry.shape, tuple((box.offset, box.shape) for box in entry.boxes))
                alike.setdefault(cut, {}).setdefault(section, []).append(name)
        return {
            "files": {name: asdict(entry) for name, entry in files.items()},
            "weights": boxes_digest(index["model"]),
            "aliases": self._aliases,
            "cuts": [[*cut, names] for cut, names in alike.items()],
        }


def note_name(rank: int) -> str:
    """The note that a worker leaves when its files are finished."""
    return f"note-{rank:05d}.json"
