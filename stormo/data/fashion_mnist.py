"""Finds, fetches, verifies and reads Fashion-MNIST (Xiao, Rasul, Vollgraf 2017, arXiv:1708.07747).

Checksums are of the uncompressed content, since the copies in circulation are compressed differently. A fetched file
appears under its name only when it is complete, verified and on disk, so a killed or a concurrent fetch does no harm.
Whoever reads a file verifies its content; the search for a copy only looks at names and lengths.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import http.client
import math
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from stormo.errors import EXIT_USAGE, SettingError, StormoError
from stormo.system.files import data_cache

if TYPE_CHECKING:
    import torch

_CHUNK_BYTES = 1 << 20
_PARTIAL = ".fetch-"  # starts the name of everything that is not complete yet
_ABANDONED_AFTER_S = 24 * 3600.0


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
    splits: Mapping[str, tuple[IdxFile, IdxFile]]

    @property
    def files(self) -> tuple[IdxFile, ...]:
        """All files."""
        return tuple(file for pair in self.splits.values() for file in pair)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """Where a release can be downloaded."""

    mirrors: tuple[str, ...]
    package: str  # a Debian package
    package_folder: Path  # where it installs its files
    stall_timeout_s: float = 15.0  # without a single byte
    command_timeout_s: float = 180.0  # each of apt-get and dpkg-deb


FASHION_MNIST = Release(
    title="Fashion-MNIST",
    splits={
        "train": (
            IdxFile(
                name="train-images-idx3-ubyte",
                sha256="c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                shape=(60_000, 28, 28),
            ),
            IdxFile(
                name="train-labels-idx1-ubyte",
                sha256="bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                shape=(60_000,),
            ),
        ),
        "validation": (
            IdxFile(
                name="t10k-images-idx3-ubyte",
                sha256="5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                shape=(10_000, 28, 28),
            ),
            IdxFile(
                name="t10k-labels-idx1-ubyte",
                sha256="0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
                shape=(10_000,),
            ),
        ),
    },
)
PUBLIC_SOURCES = Sources(
    mirrors=(
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        # This one has no https; its content is trusted no further than the checksum.
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
    package="dataset-fashion-mnist",
    package_folder=Path("/usr/share/datasets/fashion-mnist"),
)


class DataNotFoundError(StormoError):
    """No source has a usable copy of the data set; the text lists what was tried."""

    exit_code = EXIT_USAGE


class UnusableError(Exception):
    """A file or a source cannot be used; the text continues a sentence that begins with its name."""


def read(
    folder: Path, split: Literal["train", "validation"], *, release: Release = FASHION_MNIST
) -> tuple[torch.Tensor, torch.Tensor]:
    """One split of the files in `folder`, which `find_or_fetch` gave: images [n, 28, 28] of uint8, labels of int64."""
    import torch

    tensors: list[torch.Tensor] = []
    for file in release.splits[split]:
        path = _locate(folder, file) or folder / file.name
        try:
            content = bytearray(b"".join(_verified(_content_of(path), file)))
        except UnusableError as error:
            raise SettingError(
                f"the data set is read from {path}", f"it {error}", "replace or remove that file and start again"
            ) from error
        # torch takes over the writable buffer without a copy; `reshape` of it stays a contiguous view.
        tensors.append(torch.frombuffer(content, dtype=torch.uint8, offset=len(file.header)).reshape(file.shape))
    images, labels = tensors
    return images, labels.to(torch.int64)


def find_or_fetch(
    folder: Path | None,
    *,
    cache: Path | None = None,
    offline: bool = False,
    release: Release = FASHION_MNIST,
    sources: Sources = PUBLIC_SOURCES,
    tell: Callable[[str], None] | None = None,
) -> Path:
    """The folder of the files; to be called by one process per node.

    A given `folder` is the only one looked at. `tell` gets a sentence when there is something to wait for.
    """
    if folder is not None:
        folder = folder.expanduser().absolute()
        if flaws := _flaws_in(folder, release):
            names = ", ".join(file.name for file in release.files)
            raise SettingError(
                f"the data folder is {folder}",
                "; ".join(flaws),
                f"put {names} of {release.title} there, each with or without .gz, "
                "or leave --task.data-folder out to have them fetched",
            )
        return folder

    home = _cache_folder(cache)
    tried: list[str] = []
    for source, candidate in (("cache", home), (f"Debian package {sources.package}", sources.package_folder)):
        if not (flaws := _flaws_in(candidate, release)):
            return candidate
        tried.append(f"{source}, {candidate}: {'; '.join(flaws)}")
    if offline:
        tried.append("network: not asked, since offline was set")
    else:
        try:
            is_found = _fetch(home, release, sources, tell or (lambda _: None), tried)
        except OSError as error:
            num_mb = math.ceil(sum(file.num_bytes for file in release.files) / 1e6)
            raise SettingError(
                f"{release.title} is fetched into {home}",
                f"that folder cannot be written to ({_reason(error)})",
                f"set STORMO_DATA to a folder with {num_mb} MB of free space",
            ) from error
        if is_found:
            return home
    lines = [f"{release.title} was asked for, but no usable copy was found; tried, in this order:"]
    lines += [f"  - {line}" for line in tried]
    lines.append("On a machine with a network, download these files:")
    lines += [f"    {sources.mirrors[0]}{file.name}.gz" for file in release.files if sources.mirrors]
    lines.append("Put them into a folder that every node can read, and give --task.data-folder FOLDER.")
    raise DataNotFoundError("\n".join(lines))


def _cache_folder(cache: Path | None) -> Path:
    root = data_cache(os.environ) if cache is None else cache
    try:
        return root.expanduser().absolute() / "fashion-mnist"
    except RuntimeError as error:  # a container whose user id has no entry in /etc/passwd
        raise SettingError(
            f"the data cache is {root}", "this user has no home folder", "set STORMO_DATA to a folder for data"
        ) from error


def _locate(folder: Path, file: IdxFile) -> Path | None:
    """The uncompressed file if it is there, as it loads faster; else the compressed one."""
    return next((path for path in (folder / file.name, folder / f"{file.name}.gz") if path.is_file()), None)


def _flaws_in(folder: Path, release: Release) -> list[str]:
    """What is wrong with the files of a folder, as far as names and lengths tell."""
    try:
        if not folder.is_dir():
            return ["there is no such folder"]
        return [flaw for file in release.files if (flaw := _flaw_of(folder, file))]
    except OSError as error:
        return [_reason(error)]


def _flaw_of(folder: Path, file: IdxFile) -> str | None:
    path = _locate(folder, file)
    if path is None:
        return f"{file.name} is missing, with and without .gz"
    num_bytes = path.stat().st_size
    if path.suffix == ".gz" or num_bytes == file.num_bytes:
        return None
    return f"{path.name} has {num_bytes} bytes instead of {file.num_bytes}"


def _content_of(path: Path) -> Iterator[bytes]:
    """The uncompressed content of a file, in chunks."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                yield chunk
    except (OSError, EOFError, zlib.error) as error:
        raise UnusableError(f"cannot be read ({_reason(error)})") from error


def _verified(content: Iterable[bytes], file: IdxFile) -> Iterator[bytes]:
    """Passes the chunks on; the end is reached only if all of them together are the file."""
    digest, num_bytes = hashlib.sha256(), 0
    for chunk in content:
        num_bytes += len(chunk)
        if num_bytes > file.num_bytes:
            raise UnusableError(f"has more than its {file.num_bytes} bytes (uncompressed)")
        digest.update(chunk)
        yield chunk
    if num_bytes < file.num_bytes:
        raise UnusableError(f"has {num_bytes} of its {file.num_bytes} bytes (uncompressed)")
    if digest.hexdigest() != file.sha256:
        raise UnusableError(f"has the sha256 {digest.hexdigest()}, not {file.sha256} (uncompressed)")


def _fetch(home: Path, release: Release, sources: Sources, tell: Callable[[str], None], tried: list[str]) -> bool:
    """Whether the cache has every file afterwards; each source that failed adds a line to `tried`."""
    home.mkdir(parents=True, exist_ok=True)
    # The processes of a node, and nodes that share a home folder, fetch one after the other. Closing the file, or the
    # death of the process, lets the next one in. Without locks, fetching twice does no harm.
    tell(f"Fetching {release.title}, or waiting for a process that does.")
    with (home / ".fetch.lock").open("ab") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        for path in home.glob(f"{_PARTIAL}*"):  # left by a fetch that was killed
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_AFTER_S:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        for mirror in (*sources.mirrors, None):
            missing = [file for file in release.files if _flaw_of(home, file)]
            if not missing:
                break
            source = mirror or f"apt-get download {sources.package}"
            tell(f"Fetching {release.title}: {source}")
            try:
                if mirror is not None:
                    for file in sorted(missing, key=lambda file: file.num_bytes):
                        _store(_download(f"{mirror}{file.name}.gz", sources.stall_timeout_s), file, home)
                else:
                    _from_package(home, missing, sources)
            except UnusableError as error:
                tried.append(f"{source}: {error}")
    return not _flaws_in(home, release)


def _download(url: str, stall_timeout_s: float) -> Iterator[bytes]:
    """The uncompressed content behind an address, in chunks; a few bytes never become more than one chunk at once."""
    opener = urllib.request.build_opener()  # not the global one, which keeps the proxies of its first use
    try:
        with opener.open(url, timeout=stall_timeout_s) as response, gzip.GzipFile(fileobj=response) as stream:
            while chunk := stream.read1(_CHUNK_BYTES):
                yield chunk
    except (OSError, EOFError, zlib.error, http.client.HTTPException) as error:
        raise UnusableError(f"failed ({_reason(error)})") from error


def _from_package(home: Path, files: list[IdxFile], sources: Sources) -> None:
    """Download and unpack the Debian package, neither of which needs root."""
    with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=home) as folder:
        _command(["apt-get", "download", sources.package], folder, sources.command_timeout_s)
        archives = [str(path) for path in Path(folder).glob("*.deb")]
        _command(["dpkg-deb", "-x", *archives, "unpacked"], folder, sources.command_timeout_s)
        unpacked = Path(folder) / "unpacked" / sources.package_folder.relative_to("/")
        for file in files:
            path = _locate(unpacked, file)
            if path is None:
                raise UnusableError(f"{file.name} is not in the package")
            _store(_content_of(path), file, home)


def _store(content: Iterable[bytes], file: IdxFile, home: Path) -> None:
    """Write under a temporary name and rename once everything is verified and on disk."""
    descriptor, name = tempfile.mkstemp(prefix=_PARTIAL, dir=home)
    try:
        with os.fdopen(descriptor, "wb") as out:
            for chunk in _verified(content, file):
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())  # before the rename: after a power cut the name must not lead to a hole
        Path(name).replace(home / file.name)
    except BaseException as error:
        Path(name).unlink()
        if isinstance(error, UnusableError):
            raise UnusableError(f"{file.name} {error}") from error
        raise


def _command(arguments: list[str], folder: str, timeout_s: float) -> None:
    if shutil.which(arguments[0]) is None:
        raise UnusableError(f"{arguments[0]} is not on PATH")
    try:
        done = subprocess.run(
            arguments,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UnusableError(f"{arguments[0]} did not end within {timeout_s:g} s") from None
    if done.returncode:
        last = (done.stderr or done.stdout).strip().rpartition("\n")[2] or "no output"
        raise UnusableError(f"{arguments[0]} ended with code {done.returncode} ({last})")


def _reason(error: BaseException) -> str:
    """Why something failed, in as few words as the error has."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, BaseException):
        return _reason(error.reason)
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__
