"""Fetches the files of a data set from mirrors or a Debian package, without root.

A file appears under its name only when it is complete, verified and on disk, so a killed or a concurrent fetch does
no harm.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import math
import os
import queue
import secrets
import shutil
import signal
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
from typing import IO

from stormo.data.idx import (
    CHUNK_BYTES,
    STAGING,
    IdxFile,
    Release,
    UnusableError,
    content_of,
    find_flaws,
    flaw_of,
    locate,
    read_marker,
    reason_of,
    staging_suffix,
    sync_folder,
    verified_content,
)
from stormo.errors import SettingError

_ABANDONED_AFTER_S = 24 * 3600.0  # far beyond the sum of all time limits of one fetch


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetch:
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
                staging = Path(tempfile.mkdtemp(prefix=STAGING, suffix=staging_suffix(), dir=self.home))
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
        except UnusableError as error:
            tried.append(f"{place}: {error}")
        return self.is_done()

    def is_done(self) -> bool:
        """Whether every file is in the cache and verified."""
        return not find_flaws(self.home, self.release, self.home)

    def missing(self) -> list[IdxFile]:
        """The files the cache lacks, or has in a state that cannot be used."""
        known = read_marker(self.home)
        with self.writing():
            return [file for file in self.release.files if flaw_of(self.home, file, known)]

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turns a cache folder that cannot be used into an error that ends the fetch: no other place would help."""
        try:
            yield
        except OSError as error:
            num_mb = math.ceil(sum(file.num_bytes for file in self.release.files) / 1e6)
            raise SettingError(
                f"{self.release.title} is fetched into {self.home}",
                f"that folder cannot be written to ({reason_of(error)})",
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
                for chunk in verified_content(content, file):
                    out.write(chunk)
                out.flush()
                os.fsync(out.fileno())  # before the rename: after a power cut the name must not lead to a hole
            staged.replace(self.home / file.name)
            sync_folder(self.home)

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
                failure = UnusableError(f"gave HTTP {error.code} {error.reason}")
                if error.code < 500 and error.code not in (408, 429):  # the same answer would come again
                    break
            except UnusableError as error:
                failure = error
            except (OSError, http.client.HTTPException) as error:
                failure = UnusableError(f"failed ({reason_of(error)})")
        raise failure

    def from_package(self, staging: Path) -> None:
        """Downloads and unpacks the Debian package, neither of which needs root."""
        for tool in ("apt-get", "dpkg-deb"):
            if shutil.which(tool) is None:
                raise UnusableError(f"{tool} is not on PATH")
        self.tell(f"Fetching {self.release.title} with apt-get download {self.sources.package}.")
        box = staging / "package"
        with self.writing():
            box.mkdir()
        _command(["apt-get", "download", self.sources.package], box, self.sources.command_timeout_s)
        archive = next(box.glob("*.deb"), None)
        if archive is None:
            raise UnusableError("apt-get ended well but left no package")
        unpacked = box / "unpacked"
        _command(["dpkg-deb", "-x", str(archive), str(unpacked)], box, self.sources.command_timeout_s)
        for file in self.missing():
            path = locate(unpacked / self.sources.package_folder.relative_to("/"), file)
            if path is None:
                raise UnusableError(f"{file.name} is not in the package")
            try:
                self.store(content_of(path), file, staging)
            except UnusableError as error:
                raise UnusableError(f"{file.name} {error}") from error


def _body(response: http.client.HTTPResponse, stop: threading.Event) -> Iterator[bytes]:
    inflater = zlib.decompressobj(wbits=31)  # 31: a gzip header and trailer, whose CRC is checked
    is_first = True
    try:
        # read1, unlike read, returns what has come; an early end of the connection shows in the inflater.
        while piece := response.read1(CHUNK_BYTES):
            if stop.is_set():
                raise UnusableError("was given up")
            if is_first and not piece.startswith(b"\x1f"):
                kind = response.headers.get_content_type()
                raise UnusableError(f"came as something else than gzip data ({kind})")
            is_first = False
            # A few bytes can stand for gigabytes: never more of them at once than one chunk.
            while piece:
                yield inflater.decompress(piece, CHUNK_BYTES)
                piece = inflater.unconsumed_tail
        while rest := inflater.decompress(b"", CHUNK_BYTES):
            yield rest
    except (OSError, http.client.HTTPException, zlib.error) as error:
        raise UnusableError(f"failed ({reason_of(error)})") from error
    if not inflater.eof:
        raise UnusableError("came truncated")


def _remove_leftovers(home: Path) -> None:
    """Removes what killed fetches left; only the holder of the lock may.

    Some file systems lock within one node only, so what another node wrote is left alone until it is surely dead.
    """
    for path in home.glob(f"{STAGING}*"):
        with contextlib.suppress(OSError):
            is_old = time.time() - path.stat().st_mtime > _ABANDONED_AFTER_S
            if is_old or path.name.endswith(staging_suffix()):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()


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
        if isinstance(error, UnusableError):
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
            raise UnusableError(f"{arguments[0]} cannot be started ({reason_of(error)})") from error
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise UnusableError(f"{arguments[0]} did not end within {timeout_s:g} s") from error
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code != 0:
            output.seek(0)
            lines = output.read().decode(errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
            raise UnusableError(f"{arguments[0]} ended with code {code} ({last})")
