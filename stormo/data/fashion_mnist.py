"""Finds, fetches, verifies and reads Fashion-MNIST (Xiao, Rasul, Vollgraf 2017, arXiv:1708.07747).

Check sums are of the uncompressed content, since the copies in circulation are compressed differently.
A file appears under its name only when it is complete, verified and on disk, so a killed or a concurrent fetch
does no harm. Does not normalise, shuffle or distribute anything.
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
import queue
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from stormo.errors import EXIT_USAGE, SettingError, StormoError, unknown_name

if TYPE_CHECKING:
    import torch

_CHUNK_BYTES = 1 << 20
_MARKER = "verified.json"  # absolute path of a file → its size, mtime and sha256 when its content was last hashed
_STAGING = ".fetch-"  # starts the name of everything that is not complete yet
_ABANDONED_AFTER_S = 24 * 3600.0  # far beyond the sum of all time limits of one fetch


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
    connect_timeout_s: float = 5.0
    answer_timeout_s: float = 15.0  # for the smallest file, name lookup and retries included
    stall_timeout_s: float = 30.0  # without a single byte
    files_timeout_s: float = 600.0  # for the other files, all together
    command_timeout_s: float = 180.0  # each of apt-get and dpkg-deb
    turn_timeout_s: float = 600.0  # waiting for another process that fetches the same files
    num_attempts: int = 3
    retry_pause_s: float = 0.5  # doubles with each further attempt


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


class _UnusableError(Exception):
    """A file or a place cannot be used; the text goes on where the name of the file or place ends."""


def read(folder: Path, split: Literal["train", "validation"], *, release: Release = FASHION_MNIST) -> Arrays:
    """One split of the files in `folder`, which `find_or_fetch` gave."""
    import torch

    if split not in release.splits:
        raise unknown_name("split", split, release.splits)
    tensors: list[torch.Tensor] = []
    for file in release.splits[split]:
        path = _locate(folder, file) or folder / file.name
        try:
            content = _load(path, file)
        except _UnusableError as error:
            raise _corrupt(path, str(error)) from error
        # torch takes over the writable buffer without a copy; `reshape` of it stays a contiguous view.
        flat = torch.frombuffer(content, dtype=torch.uint8, offset=len(file.header))
        tensors.append(flat.reshape(file.shape))
    images, labels = tensors
    if int(labels.max()) >= release.num_classes:
        why = f"has a label {int(labels.max())} where 0 to {release.num_classes - 1} are possible"
        raise _corrupt(path, why)
    return Arrays(images=images, labels=labels.to(torch.int64))


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
        flaws = _flaws(folder, release, marker_folder)
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
        flaws = _flaws(candidate, release, home)
        if not flaws:
            return candidate
        tried.append(f"{place}, {candidate}: {'; '.join(flaws)}")
    if offline:
        tried.append("network: not asked, since offline was set")
    elif _Fetch(home=home, release=release, sources=sources, tell=tell or (lambda _: None)).run(tried):
        return home
    raise DataNotFoundError(_not_found_text(release, sources, tried))


def _not_found_text(release: Release, sources: Sources, tried: Iterable[str]) -> str:
    lines = [f"{release.title} was asked for, but no usable copy was found; tried, in this order:"]
    lines += [f"  - {line}" for line in tried]
    lines.append("On a machine with a network, download these files:")
    lines += [f"    {sources.mirrors[0]}{file.name}.gz" for file in release.files if sources.mirrors]
    lines.append("Put them into a folder that every node can read, and give --task.data-folder FOLDER.")
    return "\n".join(lines)


# Folders and what is known about their files


def _cache_folder(cache: Path | None) -> Path:
    if cache is not None:
        root = cache
    elif os.environ.get("STORMO_DATA"):
        root = Path(os.environ["STORMO_DATA"])
    elif os.environ.get("XDG_CACHE_HOME"):
        root = Path(os.environ["XDG_CACHE_HOME"]) / "stormo"
    else:
        root = Path("~/.cache/stormo")
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


def _flaws(folder: Path, release: Release, marker_folder: Path | None) -> list[str]:
    """What keeps the files of a folder from being used; files as the marker knows them are not hashed again."""
    known = {} if marker_folder is None else _read_marker(marker_folder)
    before = dict(known)
    try:
        if not folder.is_dir():
            return ["there is no such folder"]
        flaws = [flaw for file in release.files if (flaw := _flaw(folder, file, known))]
    except OSError as error:
        return [_reason(error)]
    if marker_folder is not None and known != before:
        _write_marker(marker_folder, known)
    return flaws


def _flaw(folder: Path, file: IdxFile, known: dict[str, Any]) -> str | None:
    path = _locate(folder, file)
    if path is None:
        return f"{file.name} is missing, with and without .gz"
    stat = path.stat()  # before the content: a change while it is hashed shows at the next start
    entry = {"size_bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": file.sha256}
    if known.get(str(path)) == entry:
        return None
    try:
        for _ in _verified(_content(path), file):
            pass
    except _UnusableError as error:
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
        staged = folder / f"{_STAGING}{secrets.token_hex(4)}{_staging_suffix()}"
        staged.write_text(json.dumps(present, indent=1, sort_keys=True) + "\n")
        staged.replace(folder / _MARKER)


# Content of a file: iterators of uncompressed chunks, which raise nothing but _UnusableError


def _content(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                yield chunk
    except (OSError, EOFError, zlib.error) as error:
        raise _UnusableError(f"cannot be read ({_reason(error)})") from error


def _body(response: http.client.HTTPResponse, stop: threading.Event) -> Iterator[bytes]:
    inflater = zlib.decompressobj(wbits=31)  # 31: a gzip header and trailer, whose CRC is checked
    is_first = True
    try:
        # read1, unlike read, returns what has come; an early end of the connection shows in the inflater.
        while piece := response.read1(_CHUNK_BYTES):
            if stop.is_set():
                raise _UnusableError("was given up")
            if is_first and not piece.startswith(b"\x1f"):
                kind = response.headers.get_content_type()
                raise _UnusableError(f"came as something else than gzip data ({kind})")
            is_first = False
            yield inflater.decompress(piece)
    except (OSError, http.client.HTTPException, zlib.error) as error:
        raise _UnusableError(f"failed ({_reason(error)})") from error
    if not inflater.eof:
        raise _UnusableError("came truncated")


def _sized(content: Iterable[bytes], file: IdxFile) -> Iterator[bytes]:
    num_bytes = 0
    for chunk in content:
        num_bytes += len(chunk)
        if num_bytes > file.num_bytes:
            raise _UnusableError(f"has more than its {file.num_bytes} bytes (uncompressed)")
        yield chunk
    if num_bytes < file.num_bytes:
        raise _UnusableError(f"has {num_bytes} of its {file.num_bytes} bytes (uncompressed)")


def _verified(content: Iterable[bytes], file: IdxFile) -> Iterator[bytes]:
    """Passes the chunks on; the end is reached only if all of them together are the file."""
    digest = hashlib.sha256()
    for chunk in _sized(content, file):
        digest.update(chunk)
        yield chunk
    if digest.hexdigest() != file.sha256:
        raise _UnusableError(f"has the sha256 {digest.hexdigest()}, not {file.sha256} (uncompressed)")


def _load(path: Path, file: IdxFile) -> bytearray:
    """The whole file; checked are its length, the shape in its header and, where compressed, its CRC."""
    content = bytearray(file.num_bytes)
    end = 0
    for chunk in _sized(_content(path), file):
        start, end = end, end + len(chunk)
        content[start:end] = chunk
    if not content.startswith(file.header):
        raise _UnusableError(f"has not the header of unsigned bytes of shape {list(file.shape)}")
    return content


def _corrupt(path: Path, why: str) -> SettingError:
    return SettingError(f"the data set is read from {path}", f"it {why}", "replace or remove that file and start again")


def _reason(error: BaseException) -> str:
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, BaseException):
        return _reason(error.reason)
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__


# Fetching


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fetch:
    """One fetch of a release into the cache folder `home`."""

    home: Path
    release: Release
    sources: Sources
    tell: Callable[[str], None]

    def run(self, tried: list[str]) -> bool:
        """Whether the cache has every file afterwards; each place that did not help adds a line to `tried`."""
        with self.writing():
            self.home.mkdir(parents=True, exist_ok=True)
            lock = (self.home / ".fetch.lock").open("ab")
        with lock:  # closing it, or the death of the process, lets the next one in
            holds_lock = self.await_turn(lock)
            if self.is_done():
                return True
            if holds_lock:
                _remove_leftovers(self.home)
            with self.writing():
                staging = Path(tempfile.mkdtemp(prefix=_STAGING, suffix=_staging_suffix(), dir=self.home))
            try:
                return self.try_all(staging, tried)
            finally:
                shutil.rmtree(staging, ignore_errors=True)

    def try_all(self, staging: Path, tried: list[str]) -> bool:
        """Asks one place after the other for what is still missing."""
        for mirror in self.sources.mirrors:
            self.tell(f"Fetching {self.release.title} from {mirror}.")
            failures = self.from_mirror(mirror, staging)
            if self.is_done():
                return True
            tried.append(f"{mirror}: {'; '.join(failures)}")
        place = f"apt-get download {self.sources.package}"
        try:
            self.from_package(staging)
        except _UnusableError as error:
            tried.append(f"{place}: {error}")
        return self.is_done()

    def is_done(self) -> bool:
        """Whether every file is in the cache and verified."""
        return not _flaws(self.home, self.release, self.home)

    def missing(self) -> list[IdxFile]:
        """The files the cache lacks, or has in a state that cannot be used."""
        known = _read_marker(self.home)
        with self.writing():
            return [file for file in self.release.files if _flaw(self.home, file, known)]

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turns a cache folder that cannot be used into an error that ends the fetch: no other place would help."""
        try:
            yield
        except OSError as error:
            num_mb = math.ceil(sum(file.num_bytes for file in self.release.files) / 1e6)
            raise SettingError(
                f"{self.release.title} is fetched into {self.home}",
                f"that folder cannot be written to ({_reason(error)})",
                f"set STORMO_DATA to a folder with {num_mb} MB of free space",
            ) from error

    def await_turn(self, lock: IO[bytes]) -> bool:
        """Whether the lock is held; without it a fetch is still correct, only done more than once.

        So the nodes of a job that share a home folder fetch once, and the others see the files appear.
        """
        deadline_s = time.monotonic() + self.sources.turn_timeout_s
        is_told = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self.is_done() or time.monotonic() > deadline_s:
                    return False
            except OSError:  # a file system without locks
                return False
            else:
                return True
            if not is_told:
                self.tell(f"Waiting for another process that fetches {self.release.title}.")
                is_told = True
            time.sleep(0.2)

    def store(self, content: Iterable[bytes], file: IdxFile, staging: Path) -> None:
        """Writes verified content under a temporary name and renames it once it is on disk."""
        staged = staging / f"{file.name}.{secrets.token_hex(4)}"
        with self.writing():
            with staged.open("wb") as out:
                for chunk in _verified(content, file):
                    out.write(chunk)
                out.flush()
                os.fsync(out.fileno())  # before the rename: after a power cut the name must not lead to a hole
            staged.replace(self.home / file.name)
            _sync_folder(self.home)

    def from_mirror(self, mirror: str, staging: Path) -> list[str]:
        """Fetches the missing files from a mirror; returns what went wrong, file by file."""
        # The smallest file first and alone: a mirror that is out of reach is given up after seconds, not minutes.
        smallest = min(self.release.files, key=lambda file: file.num_bytes)
        stop = threading.Event()

        def job(file: IdxFile, timeout_s: float) -> Callable[[], None]:
            url = f"{mirror}{file.name}.gz"
            return lambda: self.download(url, file, staging, timeout_s=timeout_s, stop=stop)

        try:
            probe = {smallest.name: job(smallest, self.sources.connect_timeout_s)}
            if failures := _in_parallel(probe, self.sources.answer_timeout_s):
                return failures
            jobs = {file.name: job(file, self.sources.stall_timeout_s) for file in self.missing()}
            return _in_parallel(jobs, self.sources.files_timeout_s)
        finally:
            stop.set()  # for those that ran out of time

    def download(self, url: str, file: IdxFile, staging: Path, *, timeout_s: float, stop: threading.Event) -> None:
        """Downloads one file, with retries."""
        opener = urllib.request.build_opener()  # not the global one, which keeps the proxies of its first use
        for attempt in range(self.sources.num_attempts):
            if attempt > 0 and stop.wait(self.sources.retry_pause_s * 2 ** (attempt - 1)):
                break
            try:
                with opener.open(url, timeout=timeout_s) as response:
                    self.store(_body(response, stop), file, staging)
                return
            except urllib.error.HTTPError as error:
                error.close()
                failure = _UnusableError(f"gave HTTP {error.code} {error.reason}")
                if error.code < 500 and error.code not in (408, 429):  # the same answer would come again
                    break
            except _UnusableError as error:
                failure = error
            except (OSError, http.client.HTTPException) as error:
                failure = _UnusableError(f"failed ({_reason(error)})")
        raise failure

    def from_package(self, staging: Path) -> None:
        """Downloads and unpacks the Debian package, neither of which needs root."""
        for tool in ("apt-get", "dpkg-deb"):
            if shutil.which(tool) is None:
                raise _UnusableError(f"{tool} is not on PATH")
        self.tell(f"Fetching {self.release.title} with apt-get download {self.sources.package}.")
        box = staging / "package"
        with self.writing():
            box.mkdir()
        _command(["apt-get", "download", self.sources.package], box, self.sources.command_timeout_s)
        archive = next(box.glob("*.deb"), None)
        if archive is None:
            raise _UnusableError("apt-get ended well but left no package")
        unpacked = box / "unpacked"
        _command(["dpkg-deb", "-x", str(archive), str(unpacked)], box, self.sources.command_timeout_s)
        for file in self.missing():
            path = _locate(unpacked / self.sources.package_folder.relative_to("/"), file)
            if path is None:
                raise _UnusableError(f"{file.name} is not in the package")
            try:
                self.store(_content(path), file, staging)
            except _UnusableError as error:
                raise _UnusableError(f"{file.name} {error}") from error


def _staging_suffix() -> str:
    return f"@{socket.gethostname()}"


def _remove_leftovers(home: Path) -> None:
    """Removes what killed fetches left; only the holder of the lock may.

    Some file systems lock within one node only, so what another node wrote is left alone until it is surely dead.
    """
    for path in home.glob(f"{_STAGING}*"):
        with contextlib.suppress(OSError):
            is_old = time.time() - path.stat().st_mtime > _ABANDONED_AFTER_S
            if is_old or path.name.endswith(_staging_suffix()):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _in_parallel(jobs: Mapping[str, Callable[[], None]], limit_s: float) -> list[str]:
    """Runs all jobs at once; returns which of them had no use, and why.

    In daemon threads: a name lookup has no time limit of its own and cannot be stopped, only left behind.
    """
    outcomes: queue.SimpleQueue[tuple[str, Exception | None]] = queue.SimpleQueue()

    def run(name: str, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:
            outcomes.put((name, error))
        else:
            outcomes.put((name, None))

    threads = {name: threading.Thread(target=run, args=(name, job), daemon=True) for name, job in jobs.items()}
    for thread in threads.values():
        thread.start()
    deadline_s = time.monotonic() + limit_s
    failures: list[str] = []
    pending = set(jobs)
    while pending:
        try:
            name, error = outcomes.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            return failures + [f"{name} was not complete after {limit_s:g} s" for name in sorted(pending)]
        pending.remove(name)
        threads[name].join()  # so that a caller who forks next has no thread left but those that hang
        if isinstance(error, _UnusableError):
            failures.append(f"{name} {error}")
        elif error is not None:
            raise error
    return failures


def _command(arguments: list[str], folder: Path, timeout_s: float) -> None:
    """Runs a command in `folder`; one that takes too long or is interrupted is ended with all it started."""
    with tempfile.TemporaryFile() as output:  # not a pipe, which a process left behind could keep open
        try:
            process = subprocess.Popen(
                arguments,
                cwd=folder,
                env={**os.environ, "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise _UnusableError(f"{arguments[0]} cannot be started ({_reason(error)})") from error
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise _UnusableError(f"{arguments[0]} did not end within {timeout_s:g} s") from error
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code != 0:
            output.seek(0)
            lines = output.read().decode(errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
            raise _UnusableError(f"{arguments[0]} ended with code {code} ({last})")
