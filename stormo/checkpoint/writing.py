"""Saving whole tensors: written aside by one process, made durable, published by one rename, then rotated."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stormo.checkpoint import leftovers
from stormo.checkpoint.files import gone_after_failure, make_folder, write_error, write_file
from stormo.checkpoint.layout import STATE, TENSOR_FILES, Saved, Snapshot
from stormo.checkpoint.publishing import Saving, manifest_of, publish, rotate
from stormo.checkpoint.reading import read_manifest
from stormo.checkpoint.tensors import Encoded, weights_digest

# What a file system answers that has no hard links, or no more of them for this file.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.EACCES)


def save(
    folder: Path | str,
    snapshot: Snapshot,
    *,
    step: int,
    identity: str,
    keep_last: int,
    keep_best: int,
    metric: float | None,
    higher_is_better: bool = True,
    keep_steps: Collection[int] = (),
) -> Saved:
    """Make `folder/step-…` durable, then remove older checkpoints of the same identity that need not be kept.

    See `Saving` for what is kept. The tensors must not change before it returns.
    """
    saving = Saving(
        step=step,
        identity=identity,
        keep_last=keep_last,
        keep_best=keep_best,
        metric=metric,
        higher_is_better=higher_is_better,
        keep_steps=keep_steps,
    )
    return WholeSave(Path(folder), snapshot, saving).write()


class WholeSave:
    """A checkpoint to be written; everything that can be refused is refused when it is made."""

    def __init__(self, folder: Path, snapshot: Snapshot, saving: Saving) -> None:
        self._folder = folder
        self._saving = saving
        self._model = snapshot.model
        tensors = (snapshot.model, snapshot.optimizer, snapshot.ranks)
        self._encoded = {name: Encoded(each) for name, each in zip(TENSOR_FILES, tensors, strict=True)}
        self._state = state_bytes(snapshot.state)

    def write(self, abandoned: threading.Event | None = None) -> Saved:
        """Write, publish and rotate."""
        folder, saving = self._folder, self._saving
        num_bytes = sum(encoded.size_bytes for encoded in self._encoded.values()) + len(self._state)
        weights = weights_digest(self._model)
        new = make_new_folder(folder, saving.step, num_bytes)
        with gone_after_failure(new.path, folder, saving.step, num_bytes):
            files = {name: write_file(new.path / name, each, abandoned) for name, each in self._encoded.items()}
            files[STATE] = write_file(new.path / STATE, (self._state,))
            manifest = manifest_of(folder, saving, weights, files)
            path = publish(new.path, folder, manifest, new.notices)
        return rotate(path, manifest, saving, new.notices)


@dataclass(frozen=True)
class NewFolder:
    """A hidden folder to write into, and what is to be told of its neighbours."""

    path: Path
    notices: list[str]


def make_new_folder(folder: Path, step: int, num_bytes: int) -> NewFolder:
    """A hidden folder beside the checkpoints, from which what dead processes left there is cleaned away."""
    try:
        make_folder(folder)
        temporary = leftovers.new_temporary(folder, step)
    except OSError as error:
        raise write_error("The checkpoint", folder, step, num_bytes, error) from error
    with gone_after_failure(temporary, folder, step, num_bytes):
        return NewFolder(temporary, leftovers.clean(folder, temporary))


def replace_state(path: Path, state: dict[str, Any]) -> Path:
    """Publish a checkpoint anew with other plain values; its tensors stay the files that they are."""
    manifest, folder, content = read_manifest(path), path.parent, state_bytes(state)
    new = make_new_folder(folder, manifest.step, len(content))
    with gone_after_failure(new.path, folder, manifest.step, len(content)):
        for name in manifest.files:
            if name != STATE:
                _take_over(path / name, new.path / name)
        files = {**manifest.files, STATE: write_file(new.path / STATE, (content,))}
        return publish(new.path, folder, replace(manifest, files=files), new.notices)


def _take_over(file: Path, name: Path) -> None:
    """The same file under another name, or a copy where the file system allows no second name."""
    try:
        os.link(file, name, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with file.open("rb") as source:
            write_file(name, iter(lambda: source.read(1024 * 1024), b""))


def state_bytes(state: dict[str, Any]) -> bytes:
    """Plain values as `state.json` holds them; what JSON would change without a word is refused."""
    _require_json(state, "state")
    # NaN and infinity (a diverged loss, a best value not reached yet) come back as they are.
    return (json.dumps(state, indent=1) + "\n").encode()


def _require_json(value: object, where: str) -> None:
    """Refuse what JSON would change without a word, such as a number as a key."""
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
