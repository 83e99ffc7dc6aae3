"""Finds, fetches, verifies and reads Fashion-MNIST (Xiao, Rasul, Vollgraf 2017, arXiv:1708.07747).

Check sums are of the uncompressed content, since the copies in circulation are compressed differently. A marker
remembers what was verified, so that later starts only compare sizes and times. A file appears under its name only when
it is complete, verified and on disk, so a killed or a concurrent fetch does no harm.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import http.client
import json
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
from typing import IO, TYPE_CHECKING, Any, Literal

from stormo.errors import EXIT_USAGE, SettingError, StormoError, unknown_name
from stormo.system.cache import data_cache

if TYPE_CHECKING:
    import torch

_CHUNK_BYTES = 1 << 20
_STAGED = ".fetch-"  # starts the name of everything that is not complete yet
_ABANDONED_AFTER_S = 24 * 3600.0
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """Where a release can be had, and how long each place may take."""

    mirrors: tuple[str, ...]
    package: str  # a Debian package
    package_folder: Path  # where it installs its files
    stall_timeout_s: float = 15.0  # without a single byte
    file_timeout_s: float = 600.0
    command_timeout_s: float = 180.0  # each of apt-get and dpkg-deb


FASHION_MNIST = Release(
    title="Fashion-MNIST",
    num_classes=10,
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
        # This one has no https; what it sends is trusted no further than its check sum.
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
    package="dataset-fashion-mnist",
    package_folder=Path("/usr/share/datasets/fashion-mnist"),
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Arrays:
    """One split in memory: images [n, 28, 28] of uint8, labels [n] of int64, both contiguous."""

    images: torch.Tensor
    labels: torch.Tensor


class DataNotFoundError(StormoError):
    """No place has a usable copy of the data set; the text lists what was tried."""

    exit_code = EXIT_USAGE


class UnusableError(Exception):
    """A file or a place cannot be used; the text goes on where the name of the file or place ends."""


def read(folder: Path, split: Literal["train", "validation"], *, release: Release = FASHION_MNIST) -> Arrays:
    """One split of the files in `folder`, which `find_or_fetch` gave."""
    import torch

    if split not in release.splits:
        raise unknown_name("split", split, release.splits)
    tensors: list[torch.Tensor] = []
    for file in release.splits[split]:
        path = _locate(folder, file) or folder / file.name
        content = bytearray()
        try:
            for chunk in _sized(_content_of(path), file):
                content += chunk
        except UnusableError as error:
            raise _corrupt(path, str(error)) from error
        if not content.startswith(file.header):
            raise _corrupt(path, f"has not the header of unsigned bytes of shape {list(file.shape)}")
        # torch takes over the writable buffer without a copy; `reshape` of it stays a contiguous view.
        flat = torch.frombuffer(content, dtype=torch.uint8, offset=len(file.header))
        tensors.append(flat.reshape(file.shape))
    images, labels = tensors
    if int(labels.max()) >= release.num_classes:
        why = f"has a label {int(labels.max())} where 0 to {release.num_classes - 1} are possible"
        raise _corrupt(path, why)
    return Arrays(images=images, labels=labels.to(torch.int64))


def _corrupt(path: Path, why: str) -> SettingError:
    return SettingError(f"the data set is read from {path}", f"it {why}", "replace or remove that file and start again")


def find_or_fetch(
    folder: Path | None,
    *,
    cache: Path | None = None,
    offline: bool = False,
    release: Release = FASHION_MNIST,
    sources: Sources = PUBLIC_SOURCES,
    tell: Callable[[str], None] | None = None,
) -> Path:
    """The folder of verified files; to be called by one process per node.

    A given `folder` is the only place looked at. `tell` gets a sentence when there is something to wait for.
    """
    if folder is not None:
        folder = folder.expanduser().absolute()
        marker_folder: Path | None = None
        with contextlib.suppress(SettingError):  # no home folder: then every start hashes the files again
            marker_folder = _cache_folder(cache)
        flaws = _find_flaws(folder, release, marker_folder)
        if flaws:
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
    for place, candidate in (("cache", home), (f"Debian package {sources.package}", sources.package_folder)):
        flaws = _find_flaws(candidate, release, home)
        if not flaws:
            return candidate
        tried.append(f"{place}, {candidate}: {'; '.join(flaws)}")
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
    plain = folder / file.name
    try:
        return next((path for path in (plain, folder / f"{file.name}.gz") if path.is_file()), None)
    except OSError:  # a folder without access: opening the file will say so
        return plain


def _find_flaws(folder: Path, release: Release, marker_folder: Path | None) -> list[str]:
    """What keeps the files of a folder from being used; files as the marker knows them are not hashed again."""
    known = {} if marker_folder is None else _read_marker(marker_folder)
    before = dict(known)
    try:
        if not folder.is_dir():
            return ["there is no such folder"]
        flaws = [flaw for file in release.files if (flaw := _flaw_of(folder, file, known))]
    except OSError as error:
        return [_reason(error)]
    if marker_folder is not None and known != before:
        _write_marker(marker_folder, known)
    return flaws


def _flaw_of(folder: Path, file: IdxFile, known: dict[str, Any]) -> str | None:
    path = _locate(folder, file)
    if path is None:
        return f"{file.name} is missing, with and without .gz"
    stat = path.stat()  # before the content: a change while it is hashed shows at the next start
    entry = {"size_bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": file.sha256}
    if known.get(str(path)) == entry:
        return None
    try:
        for _ in _verified(_content_of(path), file):
            pass
    except UnusableError as error:
        return f"{path.name} {error}"
    known[str(path)] = entry
    return None


def _read_marker(folder: Path) -> dict[str, Any]:
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
        _publish([json.dumps(present, indent=1, sort_keys=True).encode()], folder / _MARKER)


def _publish(content: Iterable[bytes], path: Path) -> None:
    """Write under a temporary name and rename once everything is on disk."""
    descriptor, name = tempfile.mkstemp(prefix=_STAGED, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as out:
            for chunk in content:
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())  # before the rename: after a power cut the name must not lead to a hole
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink()
        raise


def _content_of(path: Path) -> Iterator[bytes]:
    """The uncompressed content of a file, in chunks."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                yield chunk
    except (OSError, EOFError, zlib.error) as error:
        raise UnusableError(f"cannot be read ({_reason(error)})") from error


def _sized(content: Iterable[bytes], file: IdxFile) -> Iterator[bytes]:
    num_bytes = 0
    for chunk in content:
        num_bytes += len(chunk)
        if num_bytes > file.num_bytes:
            raise UnusableError(f"has more than its {file.num_bytes} bytes (uncompressed)")
        yield chunk
    if num_bytes < file.num_bytes:
        raise UnusableError(f"has {num_bytes} of its {file.num_bytes} bytes (uncompressed)")


def _verified(content: Iterable[bytes], file: IdxFile) -> Iterator[bytes]:
    """Passes the chunks on; the end is reached only if all of them together are the file."""
    digest = hashlib.sha256()
    for chunk in _sized(content, file):
        digest.update(chunk)
        yield chunk
    if digest.hexdigest() != file.sha256:
        raise UnusableError(f"has the sha256 {digest.hexdigest()}, not {file.sha256} (uncompressed)")


def _fetch(home: Path, release: Release, sources: Sources, tell: Callable[[str], None], tried: list[str]) -> bool:
    """Whether the cache has every file afterwards; each place that did not help adds a line to `tried`."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / ".fetch.lock").open("ab") as lock:  # closing it, or the death of the process, lets the next one in
        _await_turn(lock, lambda: tell(f"Waiting for another process that fetches {release.title}."))
        for path in home.glob(f"{_STAGED}*"):  # left by a fetch that was killed
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_AFTER_S:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        for mirror in (*sources.mirrors, None):
            if not _find_flaws(home, release, home):
                break
            place = mirror or f"apt-get download {sources.package}"
            tell(f"Fetching {release.title}: {place}")
            try:
                if mirror is not None:
                    _from_mirror(mirror, home, release, sources)
                else:
                    _from_package(home, release, sources)
            except UnusableError as error:
                tried.append(f"{place}: {error}")
    return not _find_flaws(home, release, home)


def _await_turn(lock: IO[bytes], tell: Callable[[], None]) -> None:
    """The processes of a node, and nodes that share a home folder, fetch one after the other, where locks exist."""
    with contextlib.suppress(OSError):  # a file system without locks: fetching twice does no harm
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell()
            fcntl.flock(lock, fcntl.LOCK_EX)


def _missing(home: Path, release: Release) -> list[IdxFile]:
    known = _read_marker(home)
    return [file for file in release.files if _flaw_of(home, file, known)]


def _from_mirror(mirror: str, home: Path, release: Release, sources: Sources) -> None:
    for file in sorted(_missing(home, release), key=lambda file: file.num_bytes):
        _store(_download(f"{mirror}{file.name}.gz", sources), file, home)


def _download(url: str, sources: Sources) -> Iterator[bytes]:
    """The uncompressed content behind an address, in chunks; a few bytes never become more than one chunk at once."""
    deadline_s = time.monotonic() + sources.file_timeout_s
    opener = urllib.request.build_opener()  # not the global one, which keeps the proxies of its first use
    try:
        with opener.open(url, timeout=sources.stall_timeout_s) as response, gzip.GzipFile(fileobj=response) as stream:
            while chunk := stream.read1(_CHUNK_BYTES):
                if time.monotonic() > deadline_s:
                    raise UnusableError(f"was not complete after {sources.file_timeout_s:g} s")
                yield chunk
    except (OSError, EOFError, zlib.error, http.client.HTTPException) as error:
        raise UnusableError(f"failed ({_reason(error)})") from error


def _from_package(home: Path, release: Release, sources: Sources) -> None:
    """Download and unpack the Debian package, neither of which needs root."""
    with tempfile.TemporaryDirectory(prefix=_STAGED, dir=home) as box:
        _command(["apt-get", "download", sources.package], box, sources.command_timeout_s)
        archives = [str(path) for path in Path(box).glob("*.deb")]
        _command(["dpkg-deb", "-x", *archives, "unpacked"], box, sources.command_timeout_s)
        unpacked = Path(box) / "unpacked" / sources.package_folder.relative_to("/")
        for file in _missing(home, release):
            path = _locate(unpacked, file)
            if path is None:
                raise UnusableError(f"{file.name} is not in the package")
            _store(_content_of(path), file, home)


def _store(content: Iterable[bytes], file: IdxFile, home: Path) -> None:
    try:
        _publish(_verified(content, file), home / file.name)
    except UnusableError as error:
        raise UnusableError(f"{file.name} {error}") from error


def _command(words: list[str], folder: str, timeout_s: float) -> None:
    if shutil.which(words[0]) is None:
        raise UnusableError(f"{words[0]} is not on PATH")
    try:
        done = subprocess.run(
            words, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise UnusableError(f"{words[0]} did not end within {timeout_s:g} s") from None
    if done.returncode:
        last = (done.stderr or done.stdout).strip().rpartition("\n")[2] or "no output"
        raise UnusableError(f"{words[0]} ended with code {done.returncode} ({last})")


def _reason(error: BaseException) -> str:
    """Why something failed, in as few words as the error has."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, BaseException):
        return _reason(error.reason)
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__
