"""Finding, verifying and loading checkpoints.

A file is opened without following links, read once, compared with its size and SHA-256, and parsed only then;
nothing in it is ever run. There is no pointer file: the newest published folder is the latest checkpoint.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from stormo.checkpoint.layout import (
    FILES,
    MANIFEST,
    STATE,
    STEP_NAME,
    TENSOR_FILES,
    CorruptCheckpointError,
    FileEntry,
    Found,
    Manifest,
    Snapshot,
    parse_manifest,
)
from stormo.checkpoint.tensors import decode, weights_digest

_MAX_MANIFEST_BYTES = 1024 * 1024
_PIECE_BYTES = 4 * 1024 * 1024


def find(folder: Path | str) -> list[Found]:
    """The published checkpoints of a folder, newest first; names only, nothing is verified."""
    return [Found(path=revisions[0], step=step) for step, revisions in published(Path(folder)).items()]


def published(folder: Path) -> dict[int, list[Path]]:
    """Step to its published folders, newest first on both levels; two of one step mean a replacement was cut off."""
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
    """The newest checkpoint of which every byte is as written, or None, and what is wrong with those newer than it."""
    problems: list[CorruptCheckpointError] = []
    # A replaced one of the same step is as good as it ever was: it counts until it is gone.
    for step, revisions in published(Path(folder)).items():
        for path in revisions:
            try:
                verify(path)
            except CorruptCheckpointError as error:
                problems.append(error)
            else:
                return Found(path=path, step=step), tuple(problems)
    return None, tuple(problems)


def verify(path: Path | str) -> Manifest:
    """Compare every file with its size and SHA-256, without holding any in memory."""
    path = Path(path)
    with _opened(path) as folder_fd:
        manifest = _manifest(path, folder_fd)
        for name, entry in manifest.files.items():
            digest = hashlib.sha256()
            with _opened_file(path, folder_fd, name, entry) as file:
                while piece := file.read(_PIECE_BYTES):
                    digest.update(piece)
            _compare(path / name, digest.hexdigest(), entry)
    return manifest


def read_manifest(path: Path | str) -> Manifest:
    """The manifest of a checkpoint; every file it lists is there with the right size, the content is not read."""
    path = Path(path)
    with _opened(path) as folder_fd:
        manifest = _manifest(path, folder_fd)
        for name, entry in manifest.files.items():
            with _opened_file(path, folder_fd, name, entry):
                pass
    return manifest


def read_state(path: Path | str) -> dict[str, Any]:
    """The plain values of a checkpoint, verified; its tensors are not read."""
    path = Path(path)
    with _opened(path) as folder_fd:
        entry = _manifest(path, folder_fd).files[STATE]
        state: dict[str, Any] = _parsed(path / STATE, _read(path, folder_fd, STATE, entry))
    return state


def load(path: Path | str) -> Snapshot:
    """Verify and read a checkpoint; the error for a bad one names the newest good one next to it."""
    path = Path(path)
    try:
        return _load(path)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(error.path, error.problem, _offer(path)) from error


def _offer(path: Path) -> str:
    folder = path.parent
    good, _ = newest_good(folder)
    if good is None:
        return f"there is no good checkpoint in {folder}"
    return f"the newest good checkpoint is that of step {good.step}: --resume {good.path}"


def _load(path: Path) -> Snapshot:
    with _opened(path) as folder_fd:
        manifest = _manifest(path, folder_fd)
        parsed: dict[str, Any] = {}
        for name in FILES:
            parsed[name] = _parsed(path / name, _read(path, folder_fd, name, manifest.files[name]))
    model, optimizer, ranks = (parsed[name] for name in TENSOR_FILES)
    digest = weights_digest(model)
    if digest != manifest.weights_sha256:
        raise CorruptCheckpointError(
            path / TENSOR_FILES[0],
            f"the digest of its weights is {_short(digest)}, the manifest says {_short(manifest.weights_sha256)}: "
            "the two were not written together",
        )
    return Snapshot(model=model, optimizer=optimizer, ranks=ranks, state=parsed[STATE])


def _parsed(file: Path, data: bytes) -> Any:
    try:
        if file.name != STATE:
            return decode(data)
        state = json.loads(data)
    except RecursionError as error:
        raise CorruptCheckpointError(file, "it is nested too deeply") from error
    except ValueError as error:
        problem = f"it is not valid JSON ({error})" if file.name == STATE else str(error)
        raise CorruptCheckpointError(file, problem) from error
    if not isinstance(state, dict):
        raise CorruptCheckpointError(file, "it does not hold a JSON object")
    return state


def _manifest(path: Path, folder_fd: int) -> Manifest:
    with _opened_file(path, folder_fd, MANIFEST, None) as file:
        data = file.read(_MAX_MANIFEST_BYTES + 1)
    if len(data) > _MAX_MANIFEST_BYTES:
        raise CorruptCheckpointError(path / MANIFEST, f"it is longer than {_MAX_MANIFEST_BYTES:,} bytes")
    try:
        return parse_manifest(data)
    except ValueError as error:
        raise CorruptCheckpointError(path / MANIFEST, str(error)) from error


def _read(path: Path, folder_fd: int, name: str, entry: FileEntry) -> bytes:
    # A sparse file of any length costs nothing to make; one that cannot fit is refused before memory is asked for.
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if entry.size_bytes > memory_bytes:
        raise CorruptCheckpointError(
            path / name, f"it is {entry.size_bytes:,} bytes long, this machine has {memory_bytes:,} bytes of memory"
        )
    with _opened_file(path, folder_fd, name, entry) as file:
        data = file.read(entry.size_bytes)
    _compare(path / name, hashlib.sha256(data).hexdigest(), entry)
    return data


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor of the folder: every file is then read from one and the same folder, even if it is renamed."""
    try:
        folder_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise CorruptCheckpointError(path, "there is no such folder") from error
    except OSError as error:
        raise CorruptCheckpointError(path, f"it cannot be opened as a folder ({error.strerror})") from error
    try:
        yield folder_fd
    finally:
        os.close(folder_fd)


@contextmanager
def _opened_file(path: Path, folder_fd: int, name: str, entry: FileEntry | None) -> Iterator[BinaryIO]:
    """A regular file of the folder, its size compared with the manifest's; read errors name the file."""
    file_path = path / name
    try:
        # O_NONBLOCK: opening a pipe put in the place of a file would otherwise wait for ever.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(name, flags, dir_fd=folder_fd), "rb") as file:  # noqa: PTH123 - a descriptor, not a path
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CorruptCheckpointError(file_path, "it is not a regular file")
            if entry is not None and status.st_size != entry.size_bytes:
                what = "it was cut short" if status.st_size < entry.size_bytes else "something was added to it"
                raise CorruptCheckpointError(
                    file_path,
                    f"it is {status.st_size:,} bytes long, the manifest says {entry.size_bytes:,}: {what}",
                )
            yield file
    except FileNotFoundError as error:
        raise CorruptCheckpointError(file_path, "it is missing") from error
    except MemoryError as error:
        raise CorruptCheckpointError(file_path, "it does not fit into the memory that is free") from error
    except OSError as error:
        problem = "it is a symbolic link" if error.errno == errno.ELOOP else f"it cannot be read ({error.strerror})"
        raise CorruptCheckpointError(file_path, problem) from error


def _compare(file: Path, sha256: str, entry: FileEntry) -> None:
    if sha256 != entry.sha256:
        raise CorruptCheckpointError(
            file,
            f"its SHA-256 is {_short(sha256)}, the manifest says {_short(entry.sha256)}: "
            "at least one byte changed since it was written",
        )


def _short(sha256: str) -> str:
    return f"{sha256[:12]}…"
