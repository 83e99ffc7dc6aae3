"""Writing files so that they stay: through to the disk, their names too, and what to say where that fails."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stormo.checkpoint.layout import CheckpointWriteError, FileEntry
from stormo.errors import full_disk


class AbandonedError(Exception):
    """A save was given up from outside while it was under way."""


def write_file(
    file: Path, content: Iterable[bytes | memoryview], abandoned: threading.Event | None = None
) -> FileEntry:
    """Write a new file through to the disk; the sum is that of the bytes handed to the system."""
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


def make_folder(folder: Path) -> None:
    """Create the folder, each new level made durable in the one above it."""
    missing = [folder, *folder.parents]
    missing = missing[: next(i for i, level in enumerate(missing) if level.is_dir())]
    for level in reversed(missing):
        level.mkdir(exist_ok=True)
        sync_folder(level.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder_fd)
    except OSError as error:
        # Some network and user-space file systems make names durable by themselves and know no such call.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(folder_fd)


@contextmanager
def gone_after_failure(temporary: Path, folder: Path, step: int, num_bytes: int) -> Iterator[None]:
    """Remove a folder that has not become a checkpoint; what the system refused is said in one sentence."""
    try:
        yield
    except BaseException as error:
        # Before the temporary folder goes: afterwards there is room again for what has failed for want of it.
        told = write_error("The checkpoint", folder, step, num_bytes, error) if isinstance(error, OSError) else None
        shutil.rmtree(temporary, ignore_errors=True)
        if told is not None:
            raise told from error
        raise


def write_error(who: str, folder: Path, step: int, num_bytes: int, error: OSError) -> CheckpointWriteError:
    """What to say of a checkpoint, or of a worker's part of it (`who`), that could not be written."""
    try:
        existing = next(level for level in (folder, *folder.parents) if level.is_dir())
        free = f"{shutil.disk_usage(existing).free:,} bytes were free there when it failed"
    except OSError as unknown:
        free = f"how much is free there is unknown ({unknown.strerror})"
    at = f" at {error.filename}" if error.filename else ""
    mend = ": make room, then go on (a run: with --resume)" if full_disk(error) else ""
    return CheckpointWriteError(
        f"{who} of step {step} could not be written to {folder} ({error.strerror}{at}): "
        f"it needs {num_bytes:,} bytes, {free}; checkpoints saved before it are untouched{mend}."
    )
