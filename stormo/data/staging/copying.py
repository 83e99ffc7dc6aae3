"""Copies files in pieces, by several threads.

Large files are cut, so that one file is copied by all threads too. A file has its own name only when it is whole.
"""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stormo.errors import EXIT_INTERRUPTED, EXIT_RESUMABLE, SettingError, StormoError

PIECE_BYTES = 64 << 20
_BLOCK_BYTES = 8 << 20
_NUM_THREADS = 8  # a parallel file system answers several readers faster than one, whatever the number of cores
Check = Callable[[], None]  # raises where there is nothing more to be done


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """One file, of a data set or of its copy, by its path inside; that of a data set of one file is empty."""

    name: str
    num_bytes: int
    mtime_ns: int


class StoppedError(StormoError):
    """The user, or a scheduler, ended the job while data was copied."""

    def __init__(self, signal_number: int) -> None:
        name = signal.Signals(signal_number).name
        super().__init__(f"stopped by {name} while the data was copied; nothing was trained.")
        self.signal_number = signal_number
        self.exit_code = EXIT_INTERRUPTED if signal_number == signal.SIGINT else EXIT_RESUMABLE


def copy_files(tree: Tree, target: Path, partial: Path, check: Check) -> list[File]:
    """Copy a data set to where its root is `target`, over what is there; what is not whole lies in `partial`.

    `check` is called all the time, and ends it by raising.
    """
    under_way = [_File(tree, file, target, partial / str(number)) for number, file in enumerate(tree.files)]
    pieces = (functools.partial(file.copy, piece) for file in under_way for piece in range(file.num_pieces))
    _in_parallel(pieces, check)
    return [file.copied for file in under_way]


class _File:
    """One file while it is copied."""

    def __init__(self, tree: Tree, file: File, target: Path, partial: Path) -> None:
        self._tree, self._file = tree, file
        self._source, self._path = tree.root / file.name, target / file.name
        self._partial = partial
        self.num_pieces = max(1, -(-file.num_bytes // PIECE_BYTES))
        self._num_left = self.num_pieces
        self._lock = threading.Lock()
        self.copied: File

    def copy(self, number: int, check: Check) -> None:
        """Copy one piece and, with the last one, give the file its name; `check` may end it in between."""
        offset = number * PIECE_BYTES
        num_bytes = min(PIECE_BYTES, self._file.num_bytes - offset)
        out = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._send(out, offset, num_bytes, check)
        finally:
            os.close(out)
        with self._lock:
            self._num_left -= 1
            is_last = self._num_left == 0
        if is_last:
            self._finish()

    def _send(self, out: int, offset: int, num_bytes: int, check: Check) -> None:
        done, view = 0, memoryview(bytearray(min(_BLOCK_BYTES, max(num_bytes, 1))))
        try:
            source = os.open(self._source, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise unreadable(self._tree.root, self._source, error) from None
        try:
            while done < num_bytes:
                check()  # a slow file system takes long for a whole piece
                try:
                    read = os.preadv(source, [view[: num_bytes - done]], offset + done)
                except OSError as error:
                    raise unreadable(self._tree.root, self._source, error) from None
                if read == 0:
                    raise self._changed()
                _write(out, view[:read], offset + done)
                done += read
        finally:
            os.close(source)

    def _finish(self) -> None:
        status = self._source.stat()
        if (status.st_size, status.st_mtime_ns) != (self._file.num_bytes, self._file.mtime_ns):
            raise self._changed()
        os.utime(self._partial, ns=(status.st_mtime_ns, status.st_mtime_ns))
        self._partial.replace(self._path)
        # As the file system of the copy keeps the time.
        self.copied = replace(self._file, mtime_ns=self._path.stat().st_mtime_ns)

    def _changed(self) -> SettingError:
        return SettingError(
            f"{self._tree.root} is to be copied to this node",
            f"{self._source} was changed while it was copied",
            "let nothing write there while a job starts",
        )


def is_whole(target: Path, files: Iterable[File], check: Check) -> bool:
    """Whether the files of a copy are as they were, by size and time."""
    for file in files:
        check()
        try:
            status = (target / file.name).lstat()
        except OSError:
            return False
        if (status.st_size, status.st_mtime_ns) != (file.num_bytes, file.mtime_ns):
            return False
    return True


def _write(out: int, block: memoryview[Any], offset: int) -> None:
    while block:
        written = os.pwrite(out, block, offset)
        block, offset = block[written:], offset + written


def _in_parallel(jobs: Iterator[Callable[[Check], None]], check: Check) -> None:
    """Do every job on some thread; the first error ends all, and is raised when no thread is left."""
    turn, failed = threading.Lock(), threading.Event()

    def check_all() -> None:
        check()
        if failed.is_set():
            raise _OtherFailedError

    def pull() -> None:
        while not failed.is_set():
            with turn:
                job = next(jobs, None)
            if job is None:
                return
            try:
                check_all()
                job(check_all)
            except _OtherFailedError:
                return
            except BaseException:
                failed.set()
                raise

    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="stormo-staging") as threads:
        try:
            started = [threads.submit(pull) for _ in range(_NUM_THREADS)]
            wait(started)
        except BaseException:  # Ctrl-C, which comes to this thread alone
            failed.set()
            raise
    for thread in started:
        thread.result()


class _OtherFailedError(Exception):
    """Another thread has failed, which ends this one."""


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A data set as it was when it was listed."""

    root: Path
    files: list[File] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)  # path inside the data set → what the link says

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.num_bytes for file in self.files)

    @property
    def sha256(self) -> str:
        """Stands for the place, the names, the sizes and the times, not for the content."""
        digest = hashlib.sha256(os.fsencode(self.root.resolve()))
        for entry in self._entries():
            digest.update(b"\0\0" + os.fsencode(entry))
        return digest.hexdigest()

    def _entries(self) -> Iterator[str]:
        yield from (f"file\0{file.name}\0{file.num_bytes}\0{file.mtime_ns}" for file in self.files)
        yield from (f"folder\0{name}" for name in self.folders)
        yield from (f"link\0{name}\0{target}" for name, target in self.links.items())


def list_tree(source: Path, check: Callable[[], None] = lambda: None) -> Tree:
    """List a folder with all that is in it, or a single file; `check` is called for each, and ends it by raising."""
    tree = Tree(root=source)
    try:
        status = source.stat()
    except OSError as error:
        raise unreadable(source, source, error) from None
    if stat.S_ISDIR(status.st_mode):
        _list_folder(tree, source, "", {(status.st_dev, status.st_ino)}, check)
    else:
        _add(tree, source, "", status)
    return tree


def _list_folder(
    tree: Tree, folder: Path, inside: str, around: set[tuple[int, int]], check: Callable[[], None]
) -> None:
    try:
        with os.scandir(folder) as listing:
            entries = sorted(listing, key=lambda entry: os.fsencode(entry.name))
        for entry in entries:
            check()
            name = f"{inside}{entry.name}"
            if entry.is_symlink() and (target := _link_inside(tree.root, Path(entry.path))) is not None:
                tree.links[name] = target
                continue
            status = entry.stat()
            if not stat.S_ISDIR(status.st_mode):
                _add(tree, Path(entry.path), name, status)
                continue
            key = status.st_dev, status.st_ino
            if key in around:
                raise SettingError(
                    f"{tree.root} is to be copied to this node",
                    f"the link {entry.path} leads to a folder that it lies in",
                    "remove that link, or name a folder without it",
                )
            tree.folders.append(name)
            _list_folder(tree, Path(entry.path), f"{name}/", around | {key}, check)
    except OSError as error:
        raise unreadable(tree.root, Path(error.filename or folder), error) from None


def _link_inside(root: Path, link: Path) -> str | None:
    """What a link says that leads to something inside the data set, or nowhere; None for one that leads out of it."""
    target, top = os.readlink(link), os.path.realpath(root)  # noqa: PTH115 - as it is, a Path would tidy it
    real = os.path.realpath(link)
    if not os.path.lexists(real):
        return target
    here = os.path.realpath(link.parent)
    is_inside = all(path == top or path.startswith(f"{top.rstrip('/')}/") for path in (real, here))
    return os.path.relpath(real, here) if is_inside else None


def _add(tree: Tree, path: Path, name: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise SettingError(
            f"{tree.root} is to be copied to this node",
            f"{path} is neither a file nor a folder",
            "remove it, or name a folder without it",
        )
    tree.files.append(File(name=name, num_bytes=status.st_size, mtime_ns=status.st_mtime_ns))


def unreadable(root: Path, path: Path, error: OSError) -> SettingError:
    """What to say where something of a data set cannot be read."""
    return SettingError(
        f"{root} is to be copied to this node",
        f"{path} cannot be read there ({error.strerror or error})",
        "fix that, or leave staging out",
    )
