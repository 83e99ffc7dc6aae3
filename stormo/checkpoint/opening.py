"""Opening the files of a checkpoint: without following links, with the size and SHA-256 that the manifest says."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from stormo.checkpoint.layout import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    CorruptCheckpointError,
    FileEntry,
    Manifest,
    parse_manifest,
)

PIECE_BYTES = 4 * 1024 * 1024
_MOST_HOLE_BYTES = 4 << 30


def manifest_in(path: Path, folder_fd: int) -> Manifest:
    """The manifest of an open folder."""
    with opened_file(path, folder_fd, MANIFEST, None) as file:
        data = file.read(MAX_MANIFEST_BYTES + 1)
    if len(data) > MAX_MANIFEST_BYTES:
        raise CorruptCheckpointError(path / MANIFEST, f"it is longer than {MAX_MANIFEST_BYTES:,} bytes")
    try:
        return parse_manifest(data)
    except ValueError as error:
        raise CorruptCheckpointError(path / MANIFEST, str(error)) from error


def read_file(path: Path, folder_fd: int, name: str, entry: FileEntry) -> bytes:
    """All bytes of a file, which are those that were written."""
    require_memory(path / name, entry.size_bytes)
    with opened_file(path, folder_fd, name, entry) as file:
        data = file.read(entry.size_bytes)
    compare(path / name, hashlib.sha256(data).hexdigest(), entry)
    return data


def require_memory(file: Path, size_bytes: int) -> None:
    """Refuse what cannot fit, before memory is asked for: a sparse file of any length costs nothing to make."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size_bytes > memory_bytes:
        raise CorruptCheckpointError(
            file, f"it is {size_bytes:,} bytes long, this machine has {memory_bytes:,} bytes of memory"
        )


@contextmanager
def opened(path: Path) -> Iterator[int]:
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
def opened_file(path: Path, folder_fd: int, name: str, entry: FileEntry | None) -> Iterator[BufferedReader]:
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
            if entry is not None:
                _require_written(file_path, file, status.st_size)
            yield file
    except FileNotFoundError as error:
        raise CorruptCheckpointError(file_path, "it is missing") from error
    except MemoryError as error:
        raise CorruptCheckpointError(file_path, "it does not fit into the memory that is free") from error
    except OSError as error:
        problem = "it is a symbolic link" if error.errno == errno.ELOOP else f"it cannot be read ({error.strerror})"
        raise CorruptCheckpointError(file_path, problem) from error


def _require_written(path: Path, file: BufferedReader, size_bytes: int) -> None:
    """Refuse a file of nearly nothing but holes: it takes no disk, and hashing it would take hours."""
    at = written = 0
    while size_bytes > _MOST_HOLE_BYTES and at < size_bytes and written <= size_bytes // 8:
        try:
            start = os.lseek(file.fileno(), at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                return  # a file system that cannot tell
            start = size_bytes  # nothing but a hole follows
        at = os.lseek(file.fileno(), start, os.SEEK_HOLE) if start < size_bytes else size_bytes
        written += at - start
    if size_bytes - written > _MOST_HOLE_BYTES and written <= size_bytes // 8:
        raise CorruptCheckpointError(
            path, f"{size_bytes - written:,} of its {size_bytes:,} bytes are a hole that nothing was written into"
        )
    os.lseek(file.fileno(), 0, os.SEEK_SET)


def compare(file: Path, sha256: str, entry: FileEntry) -> None:
    """Refuse a file whose sum is not the manifest's."""
    if sha256 != entry.sha256:
        raise CorruptCheckpointError(
            file,
            f"its SHA-256 is {short(sha256)}, the manifest says {short(entry.sha256)}: "
            "at least one byte changed since it was written",
        )


def short(sha256: str) -> str:
    """A digest as it is shown in sentences."""
    return f"{sha256[:12]}…"
