"""Saving checkpoints: written aside, made durable, published by one rename, then rotated.

Whatever moment the process or the machine dies at, every published checkpoint is whole. One process at a time
saves into a folder; what a killed one left behind is cleaned by the next save. Saving is synchronous: the
tensors must not change before `save` returns.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from stormo.checkpoint import leftovers
from stormo.checkpoint.layout import (
    MANIFEST,
    STATE,
    TENSOR_FILES,
    CheckpointWriteError,
    CorruptCheckpointError,
    FileEntry,
    Manifest,
    Saved,
    Snapshot,
    step_name,
)
from stormo.checkpoint.reading import published, read_manifest
from stormo.checkpoint.tensors import Encoded, weights_digest
from stormo.errors import SettingError


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

    Kept are the newest `keep_last` up to this step, of those with a metric the best `keep_best`, and those of
    `keep_steps`. A step that is already there is replaced. A metric that is not finite counts as none.
    """
    _check_settings(step=step, keep_last=keep_last, keep_best=keep_best)
    folder = Path(folder)
    # Everything that can be refused is refused before the first byte is written.
    contents: dict[str, Encoded | tuple[bytes]] = {
        name: Encoded(tensors)
        for name, tensors in zip(TENSOR_FILES, (snapshot.model, snapshot.optimizer, snapshot.ranks), strict=True)
    }
    state = _state_bytes(snapshot.state)
    contents[STATE] = (state,)
    num_bytes = sum(c.size_bytes if isinstance(c, Encoded) else len(state) for c in contents.values())
    weights = weights_digest(snapshot.model)
    try:
        _make_folder(folder)
        temporary = leftovers.new_temporary(folder, step)
        try:
            notices = leftovers.clean(folder, temporary)
            files = {name: _write(temporary / name, content) for name, content in contents.items()}
            manifest = Manifest(
                step=step,
                identity=identity,
                metric=_metric_to_store(folder, step, metric, weights),
                weights_sha256=weights,
                files=files,
            )
            _write(temporary / MANIFEST, (manifest.to_bytes(),))
            # The names inside must be durable before the folder gets its public name.
            _sync_folder(temporary)
            path = _publish(temporary, folder, step, notices)
        except BaseException as error:
            # Before the temporary folder goes: afterwards there is room again for what has failed for want of it.
            told = _write_error(folder, step, num_bytes, error) if isinstance(error, OSError) else None
            shutil.rmtree(temporary, ignore_errors=True)
            if told is not None:
                raise told from error
            raise
    except OSError as error:
        raise _write_error(folder, step, num_bytes, error) from error
    removed = _rotate(
        folder,
        manifest,
        notices,
        keep_last=keep_last,
        keep_best=keep_best,
        higher_is_better=higher_is_better,
        keep_steps=keep_steps,
    )
    return Saved(path=path, weights_sha256=weights, num_bytes=num_bytes, removed=tuple(removed), notices=tuple(notices))


def _check_settings(*, step: int, keep_last: int, keep_best: int) -> None:
    if step < 0:
        raise SettingError(f"step is {step}", "steps are counted from 0", "give the number of optimizer steps done")
    if keep_last < 1:
        raise SettingError(
            f"keep_last is {keep_last}", "the newest checkpoint is the one to resume from", "set it to 1 or more"
        )
    if keep_best < 0:
        raise SettingError(f"keep_best is {keep_best}", "it is a count", "set it to 0 or more")


def _state_bytes(state: dict[str, Any]) -> bytes:
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


def _metric_to_store(folder: Path, step: int, metric: float | None, weights: str) -> float | None:
    """The metric, or that of the checkpoint being replaced where it holds the same weights."""
    if metric is not None:
        return float(metric) if math.isfinite(metric) else None
    for path in published(folder).get(step, []):
        try:
            replaced = read_manifest(path)
        except CorruptCheckpointError:
            continue  # nothing in it can be trusted; it is about to be replaced
        if replaced.weights_sha256 == weights:
            return replaced.metric
    return None


def _write(file: Path, content: Iterable[bytes | memoryview]) -> FileEntry:
    """Write a new file through to the disk; the sum is that of the bytes handed to the system."""
    digest = hashlib.sha256()
    size_bytes = 0
    with file.open("xb", buffering=1024 * 1024) as stream:
        for piece in content:
            stream.write(piece)
            digest.update(piece)
            size_bytes += len(piece)
        stream.flush()
        os.fsync(stream.fileno())
    return FileEntry(size_bytes=size_bytes, sha256=digest.hexdigest())


def _publish(temporary: Path, folder: Path, step: int, notices: list[str]) -> Path:
    """Give the folder its public name; while a step is replaced, one of its two versions is always published."""
    final = folder / step_name(step)
    old = published(folder).get(step, [])
    if not old:
        temporary.rename(final)
        _sync_folder(folder)
        return final
    # A folder cannot be renamed onto a full one. So: publish beside it, unpublish the old, take over its name.
    highest = max(int(path.suffix[1:] or 0) for path in old)
    beside = folder / f"{final.name}.{highest + 1}"
    temporary.rename(beside)
    _sync_folder(folder)
    try:
        for path in old:
            leftovers.remove(path)
        beside.rename(final)
        _sync_folder(folder)
    except OSError as error:
        # The new one is durable and counts: the higher number wins. Only its name is not the plain one.
        notices.append(f"The checkpoint {final} could not be removed ({error.strerror}); {beside} is the newer one.")
        return beside if beside.exists() else final
    return final


def _rotate(
    folder: Path,
    saved: Manifest,
    notices: list[str],
    *,
    keep_last: int,
    keep_best: int,
    higher_is_better: bool,
    keep_steps: Collection[int],
) -> list[Path]:
    """Remove what the checkpoint just saved has superseded; what cannot be removed is told, and costs only space."""
    whole: list[tuple[Path, Manifest]] = []
    surplus: list[Path] = []
    try:
        steps = published(folder)
    except OSError as error:
        notices.append(f"Old checkpoints were not removed: {folder} cannot be listed ({error.strerror}).")
        return []
    for step, revisions in steps.items():
        # Later steps belong to a future that was left by resuming from an earlier one: not superseded.
        if step > saved.step:
            continue
        try:
            manifest = read_manifest(revisions[0])
        except CorruptCheckpointError:
            continue  # damaged, or of a later format: it does not count as kept, and a person may want to look
        if manifest.identity == saved.identity:
            whole.append((revisions[0], manifest))
            surplus.extend(revisions[1:])
    if not whole or whole[0][1] != saved:
        notices.append(f"Old checkpoints were not removed: that of step {saved.step} does not read back as written.")
        return []
    ranked = sorted(
        ((m.metric if higher_is_better else -m.metric, m.step, path) for path, m in whole if m.metric is not None),
        reverse=True,  # of equals, the later one
    )
    kept = {path for path, _ in whole[:keep_last]} | {path for _, _, path in ranked[:keep_best]}
    kept |= {path for path, m in whole if m.step in keep_steps}
    removed: list[Path] = []
    for path in [*(path for path, _ in whole if path not in kept), *surplus]:
        try:
            leftovers.remove(path)
            removed.append(path)
        except OSError as error:
            notices.append(f"The old checkpoint {path} could not be removed ({error.strerror}); it takes up space.")
    return removed


def _make_folder(folder: Path) -> None:
    """Create the folder, each new level made durable in the one above it."""
    missing = [folder, *folder.parents]
    missing = missing[: next(i for i, level in enumerate(missing) if level.is_dir())]
    for level in reversed(missing):
        level.mkdir(exist_ok=True)
        _sync_folder(level.parent)


def _sync_folder(folder: Path) -> None:
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder_fd)
    except OSError as error:
        # Some network and user-space file systems make names durable by themselves and know no such call.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(folder_fd)


def _write_error(folder: Path, step: int, num_bytes: int, error: OSError) -> CheckpointWriteError:
    try:
        existing = next(level for level in (folder, *folder.parents) if level.is_dir())
        free = f"{shutil.disk_usage(existing).free:,} bytes were free there when it failed"
    except OSError as unknown:
        free = f"how much is free there is unknown ({unknown.strerror})"
    at = f" at {error.filename}" if error.filename else ""
    return CheckpointWriteError(
        f"The checkpoint of step {step} could not be written to {folder} ({error.strerror}{at}): "
        f"it needs {num_bytes:,} bytes, {free}; checkpoints saved before it are untouched."
    )
