"""Data sets of IDX files: where a file is, whether its content is what its check sum says, and its raw bytes.

Check sums are of the uncompressed content, since the copies in circulation are compressed differently. A marker
remembers what was verified, so that later starts only compare sizes and times.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import math
import os
import secrets
import socket
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stormo.errors import SettingError

CHUNK_BYTES = 1 << 20
STAGING = ".fetch-"  # starts the name of everything that is not complete yet
_MARKER = "verified.json"  # absolute path of a file → its size, mtime and sha256 when its content was last hashed


@dataclass(frozen=True, kw_only=True, slots=True)
class IdxFile:
    """One file of unsigned bytes in the IDX format, as it is when uncompressed."""

    name: str  # without .gz
    sha256: str
    shape: tuple[int, ...]

    @property
    def header(self) -> bytes:
        """Two zero bytes, the type (8: unsigned byte), the number of dimensions, each dimension in 32 bits."""
        dims = b"".join(dim.to_bytes(4, "big") for dim in self.shape)
        return bytes((0, 0, 8, len(self.shape))) + dims

    @property
    def num_bytes(self) -> int:
        """Length of the whole file."""
        return len(self.header) + math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """The files of a data set: for each split its images and its labels."""

    title: str
    num_classes: int
    splits: Mapping[str, tuple[IdxFile, IdxFile]]

    @property
    def files(self) -> tuple[IdxFile, ...]:
        """All files."""
        return tuple(file for pair in self.splits.values() for file in pair)


class UnusableError(Exception):
    """A file or a place cannot be used; the text goes on where the name of the file or place ends."""


def locate(folder: Path, file: IdxFile) -> Path | None:
    """The uncompressed file if it is there, as it loads faster; else the compressed one."""
    plain = folder / file.name
    try:
        return next((path for path in (plain, folder / f"{file.name}.gz") if path.is_file()), None)
    except OSError:  # a folder without access: opening the file will say so
        return plain


def find_flaws(folder: Path, release: Release, marker_folder: Path | None) -> list[str]:
    """What keeps the files of a folder from being used; files as the marker knows them are not hashed again."""
    known = {} if marker_folder is None else read_marker(marker_folder)
    before = dict(known)
    try:
        if not folder.is_dir():
            return ["there is no such folder"]
        flaws = [flaw for file in release.files if (flaw := flaw_of(folder, file, known))]
    except OSError as error:
        return [reason_of(error)]
    if marker_folder is not None and known != before:
        _write_marker(marker_folder, known)
    return flaws


def flaw_of(folder: Path, file: IdxFile, known: dict[str, Any]) -> str | None:
    """What is wrong with one file, or None; what the marker vouches for is not hashed again."""
    path = locate(folder, file)
    if path is None:
        return f"{file.name} is missing, with and without .gz"
    stat = path.stat()  # before the content: a change while it is hashed shows at the next start
    entry = {"size_bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": file.sha256}
    if known.get(str(path)) == entry:
        return None
    try:
        for _ in verified_content(content_of(path), file):
            pass
    except UnusableError as error:
        return f"{path.name} {error}"
    known[str(path)] = entry
    return None


def staging_suffix() -> str:
    """Ends the name of everything this process has not completed yet."""
    return f"@{socket.gethostname()}"


def read_marker(folder: Path) -> dict[str, Any]:
    """What was verified before; nothing where the marker cannot be read."""
    try:
        entries = json.loads((folder / _MARKER).read_bytes())
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _write_marker(folder: Path, known: Mapping[str, Any]) -> None:
    # Only saves time at the next start: where it cannot be written, the files are hashed again.
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        present = {path: entry for path, entry in known.items() if Path(path).exists()}
        staged = folder / f"{STAGING}{secrets.token_hex(4)}{staging_suffix()}"
        staged.write_text(json.dumps(present, indent=1, sort_keys=True) + "\n")
        staged.replace(folder / _MARKER)


def content_of(path: Path) -> Iterator[bytes]:
    """The uncompressed content of a file, in chunks."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                yield chunk
    except (OSError, EOFError, zlib.error) as error:
        raise UnusableError(f"cannot be read ({reason_of(error)})") from error


def _sized(content: Iterable[bytes], file: IdxFile) -> Iterator[bytes]:
    num_bytes = 0
    for chunk in content:
        num_bytes += len(chunk)
        if num_bytes > file.num_bytes:
            raise UnusableError(f"has more than its {file.num_bytes} bytes (uncompressed)")
        yield chunk
    if num_bytes < file.num_bytes:
        raise UnusableError(f"has {num_bytes} of its {file.num_bytes} bytes (uncompressed)")


def verified_content(content: Iterable[bytes], file: IdxFile) -> Iterator[bytes]:
    """Passes the chunks on; the end is reached only if all of them together are the file."""
    digest = hashlib.sha256()
    for chunk in _sized(content, file):
        digest.update(chunk)
        yield chunk
    if digest.hexdigest() != file.sha256:
        raise UnusableError(f"has the sha256 {digest.hexdigest()}, not {file.sha256} (uncompressed)")


def load_file(path: Path, file: IdxFile) -> bytearray:
    """The whole file; checked are its length, the shape in its header and, where compressed, its CRC."""
    content = bytearray(file.num_bytes)
    end = 0
    for chunk in _sized(content_of(path), file):
        start, end = end, end + len(chunk)
        content[start:end] = chunk
    if not content.startswith(file.header):
        raise UnusableError(f"has not the header of unsigned bytes of shape {list(file.shape)}")
    return content


def corrupt_error(path: Path, why: str) -> SettingError:
    """The sentence for a file that cannot be read."""
    return SettingError(f"the data set is read from {path}", f"it {why}", "replace or remove that file and start again")


def reason_of(error: BaseException) -> str:
    """Why something failed, in as few words as the error has."""
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, BaseException):
        return reason_of(error.reason)
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
