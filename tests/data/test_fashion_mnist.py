"""Fashion-MNIST from every place it can come from, good and bad; the mirrors are a server on loopback."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import os
import random
import socket
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from stormo.data.fashion_mnist import (
    FASHION_MNIST,
    PUBLIC_SOURCES,
    DataNotFoundError,
    IdxFile,
    Release,
    Sources,
    _fetch,
    find_or_fetch,
    read,
)
from stormo.errors import EXIT_USAGE, SettingError
from tests.forked import fork

REAL_ENVIRONMENT = dict(os.environ)  # before any fixture


def make_file(name: str, shape: tuple[int, ...], values: int) -> tuple[IdxFile, bytes]:
    shapeless = IdxFile(name=name, sha256="", shape=shape)
    body = random.Random(name).choices(range(values), k=shapeless.num_bytes - len(shapeless.header))
    content = shapeless.header + bytes(body)
    return replace(shapeless, sha256=hashlib.sha256(content).hexdigest()), content


PAIRS = [
    make_file("train-images", (50, 28, 28), 256),
    make_file("train-labels", (50,), 10),
    make_file("t10k-images", (20, 28, 28), 256),
    make_file("t10k-labels", (20,), 10),  # the smallest: a mirror is asked for it first
]
CONTENT = {file.name: content for file, content in PAIRS}
PACKED = {f"{name}.gz": gzip.compress(content) for name, content in CONTENT.items()}
FILES = [file for file, _ in PAIRS]
SMALL = Release(title="Small-MNIST", splits={"train": (FILES[0], FILES[1]), "validation": (FILES[2], FILES[3])})


Answer = Callable[[BaseHTTPRequestHandler, bytes], None]


def send(handler: BaseHTTPRequestHandler, body: bytes, *, code: int = 200, claimed: int | None = None) -> None:
    handler.send_response(code)
    handler.send_header("Content-Type", "text/html" if body.startswith(b"<") else "application/gzip")
    handler.send_header("Content-Length", str(len(body) if claimed is None else claimed))
    handler.end_headers()
    handler.wfile.write(body)


def good(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    send(handler, body)


def html(handler: BaseHTTPRequestHandler, _: bytes) -> None:
    send(handler, b"<!DOCTYPE html><title>Log in to the campus network</title>")


def truncated(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    send(handler, body[: len(body) // 2], claimed=len(body))


def other_content(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    content = gzip.decompress(body)
    send(handler, gzip.compress(content[:-1] + bytes([content[-1] ^ 1])))


def too_long(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    send(handler, gzip.compress(gzip.decompress(body) + b"\0"))


def broken_gzip(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    send(handler, body[:-8] + bytes(8))


def not_found(handler: BaseHTTPRequestHandler, _: bytes) -> None:
    send(handler, b"<p>no such file", code=404)


def hang_up(handler: BaseHTTPRequestHandler, _: bytes) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)


class Mirror(ThreadingHTTPServer):
    """Serves the small release; how it answers is chosen per file, and what it was asked for is counted."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer: Answer = good
        self.answers: dict[str, Answer] = {}
        self.asked: Counter[str] = Counter()
        self.paths: list[str] = []
        self.is_closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/data/"

    def hang(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        """Sends half of the file and nothing more."""
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[: len(body) // 2])
        self.is_closing.wait(60)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is part of these tests."""


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        mirror = self.server
        assert isinstance(mirror, Mirror)
        name = self.path.rsplit("/", 1)[-1]
        mirror.asked[name] += 1
        mirror.paths.append(self.path)
        mirror.answers.get(name, mirror.answer)(self, PACKED[name])

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def running_mirror() -> Iterator[Mirror]:
    mirror = Mirror()
    thread = threading.Thread(target=mirror.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield mirror
    finally:
        mirror.is_closing.set()
        mirror.shutdown()
        mirror.server_close()
        thread.join()


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    with running_mirror() as server:
        yield server


@pytest.fixture
def second_mirror() -> Iterator[Mirror]:
    with running_mirror() as server:
        yield server


@pytest.fixture(autouse=True)
def bare_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy, no cache of the user, and neither apt-get nor dpkg-deb."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.delenv("STORMO_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setenv("PATH", str(tmp_path / "no-programs"))


def sources(*mirrors: str, **changes: Any) -> Sources:
    # The time limits suit a machine under load; a test that means to run into one shortens it.
    settings: dict[str, Any] = {
        "package": "dataset-small-mnist",
        "package_folder": Path("/usr/share/datasets/small-mnist-that-nobody-has"),
        "stall_timeout_s": 60.0,
        "command_timeout_s": 60.0,
    }
    return Sources(mirrors=mirrors, **(settings | changes))


def fetch(cache: Path, *mirrors: str, **changes: Any) -> Path:
    return find_or_fetch(None, cache=cache, release=SMALL, sources=sources(*mirrors, **changes))


def fill(folder: Path, *, packed: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (PACKED if packed else CONTENT).items():
        (folder / name).write_bytes(content)
    return folder


def content_of(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in CONTENT}


def leftovers(cache: Path) -> list[Path]:
    return list((cache / "fashion-mnist").glob(".fetch-*"))


# A given folder


@pytest.mark.parametrize("packed", [True, False])
def test_a_given_folder_is_used_as_it_is(tmp_path: Path, mirror: Mirror, packed: bool) -> None:
    folder = fill(tmp_path / "given", packed=packed)
    before = sorted(folder.iterdir())
    found = find_or_fetch(folder, cache=tmp_path / "cache", release=SMALL, sources=sources(mirror.url))
    assert found == folder
    assert sorted(folder.iterdir()) == before
    assert not mirror.asked


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def page(path: Path) -> None:
    path.write_text("<!DOCTYPE html>")


@pytest.mark.parametrize(("packed", "damage"), [(True, Path.unlink), (False, Path.unlink), (False, cut), (False, page)])
def test_a_damaged_file_of_a_given_folder_is_named_and_never_fetched(
    tmp_path: Path, mirror: Mirror, packed: bool, damage: Callable[[Path], None]
) -> None:
    folder = fill(tmp_path / "given", packed=packed)
    fill(tmp_path / "cache" / "fashion-mnist")  # a good copy elsewhere must not be taken in its place
    damage(folder / ("train-images.gz" if packed else "train-images"))
    with pytest.raises(SettingError, match="train-images") as caught:
        find_or_fetch(folder, cache=tmp_path / "cache", release=SMALL, sources=sources(mirror.url))
    assert str(folder) in str(caught.value)
    assert "train-labels " not in str(caught.value).split(";")[0]
    assert not mirror.asked


def test_a_given_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"/nowhere, but there is no such folder; put train-images, "):
        find_or_fetch(tmp_path / "nowhere", cache=tmp_path / "cache", release=SMALL)


# The cache


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"STORMO_DATA": "data", "XDG_CACHE_HOME": "xdg"}, "data/fashion-mnist"),
        ({"STORMO_DATA": "", "XDG_CACHE_HOME": "xdg"}, "xdg/stormo/fashion-mnist"),
        ({}, "user/.cache/stormo/fashion-mnist"),
    ],
)
def test_the_cache_is_found_through_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value and str(tmp_path / value))
    fill(tmp_path / expected)
    assert find_or_fetch(None, release=SMALL, sources=sources(), offline=True) == tmp_path / expected


def test_a_damaged_file_of_the_cache_is_fetched_again_and_the_good_ones_are_kept(
    tmp_path: Path, mirror: Mirror
) -> None:
    home = fetch(tmp_path, mirror.url)
    mirror.asked.clear()
    cut(home / "train-images")
    assert fetch(tmp_path, mirror.url) == home
    assert content_of(home) == CONTENT
    assert mirror.asked == {"train-images.gz": 1}


# Mirrors


def test_a_good_mirror_fills_the_cache_with_uncompressed_files(tmp_path: Path, mirror: Mirror) -> None:
    home = fetch(tmp_path, mirror.url)
    assert home == tmp_path / "fashion-mnist"
    assert content_of(home) == CONTENT
    assert mirror.asked == dict.fromkeys(PACKED, 1)
    assert sorted(path.name for path in home.iterdir()) == sorted([*CONTENT, ".fetch.lock"])


def test_a_later_start_asks_nobody(tmp_path: Path, mirror: Mirror) -> None:
    home = fetch(tmp_path, mirror.url)
    mirror.asked.clear()
    assert fetch(tmp_path, mirror.url) == home
    assert find_or_fetch(None, cache=tmp_path, release=SMALL, sources=sources(), offline=True) == home
    assert not mirror.asked


BAD_ANSWERS: list[tuple[str, str]] = [
    ("html", r"failed \(Not a gzipped file"),
    ("truncated", r"failed \(Compressed file ended before"),
    ("other_content", "has the sha256 [0-9a-f]{64}, not [0-9a-f]{64}"),
    ("too_long", r"has more than its \d+ bytes"),
    ("broken_gzip", r"failed \(CRC check failed"),
    ("not_found", r"failed \(HTTP 404 Not Found\)"),
    ("hang_up", r"failed \(Remote end closed connection"),
    ("hang", r"failed \(timed out\)"),
]


@pytest.mark.parametrize(("answer", "reason"), BAD_ANSWERS)
def test_a_bad_answer_is_never_used_and_the_next_mirror_is(
    tmp_path: Path, mirror: Mirror, second_mirror: Mirror, answer: str, reason: str
) -> None:
    mirror.answers["train-images.gz"] = mirror.hang if answer == "hang" else globals()[answer]
    limits = {"stall_timeout_s": 1.0} if answer == "hang" else {}
    with pytest.raises(DataNotFoundError, match=rf"{mirror.url}: train-images {reason}"):
        fetch(tmp_path, mirror.url, **limits)
    assert not (tmp_path / "fashion-mnist" / "train-images").exists()
    assert not leftovers(tmp_path)
    # What the first mirror gave before it failed is kept.
    assert content_of(fetch(tmp_path, mirror.url, second_mirror.url, **limits)) == CONTENT
    assert second_mirror.asked == {"train-images.gz": 1}


def test_proxies_are_honoured(tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", mirror.url)
    home = fetch(tmp_path, "http://mirror.invalid/data/")
    assert content_of(home) == CONTENT
    assert "http://mirror.invalid/data/train-images.gz" in mirror.paths


def test_offline_asks_nobody(tmp_path: Path, mirror: Mirror) -> None:
    with pytest.raises(DataNotFoundError, match="network: not asked, since offline was set"):
        find_or_fetch(None, cache=tmp_path, release=SMALL, sources=sources(mirror.url), offline=True)
    assert not mirror.asked
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_written_to_ends_the_search(tmp_path: Path, mirror: Mirror) -> None:
    (tmp_path / "a-file").touch()
    with pytest.raises(SettingError, match="set STORMO_DATA to a folder with 1 MB"):
        fetch(tmp_path / "a-file", mirror.url)
    assert not mirror.asked


def test_a_full_disk_ends_the_search_with_its_reason(
    tmp_path: Path, mirror: Mirror, second_mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SettingError, match=r"cannot be written to \(No space left on device\); set STORMO_DATA"):
        fetch(tmp_path, mirror.url, second_mirror.url)
    assert not second_mirror.asked
    assert not leftovers(tmp_path)


# Killed and concurrent fetches


def fetch_in_child(cache: Path, mirror_url: str, with_lock: bool) -> None:
    """The body of a child process; it ends with code 0 only if its cache is complete."""
    if not with_lock:

        def no_locks(*_: Any) -> None:
            raise OSError(38, "Function not implemented")

        fcntl.flock = no_locks
    home = fetch(cache, mirror_url)
    assert content_of(home) == CONTENT


def wait_until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_after_a_kill_in_the_middle_the_next_start_works_and_cleans_up(tmp_path: Path, mirror: Mirror) -> None:
    mirror.answers["train-images.gz"] = mirror.hang  # so that the child cannot come to the end before it is killed
    child = fork(fetch_in_child, (tmp_path, mirror.url, True))
    home = tmp_path / "fashion-mnist"
    wait_until(lambda: (home / "t10k-images").exists() and mirror.asked["train-images.gz"] and leftovers(tmp_path))
    child.kill()
    child.join()
    assert not (home / "train-images").exists()
    assert leftovers(tmp_path)
    mirror.answers.clear()
    for path in leftovers(tmp_path):
        os.utime(path, (0, 0))  # as after a day
    assert content_of(fetch(tmp_path, mirror.url)) == CONTENT
    assert not leftovers(tmp_path)


def test_a_process_that_may_wait_for_another_says_so(
    tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(fcntl, "flock", lambda *_: said.append("waits for the lock"))
    find_or_fetch(None, cache=tmp_path, release=SMALL, sources=sources(mirror.url), tell=said.append)
    assert said[:2] == ["Fetching Small-MNIST, or waiting for a process that does.", "waits for the lock"]


@pytest.mark.parametrize("with_lock", [True, False])
def test_two_processes_can_fetch_at_the_same_time(tmp_path: Path, mirror: Mirror, with_lock: bool) -> None:
    def when_both_are_there(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        if not with_lock:
            wait_until(lambda: mirror.asked["t10k-labels.gz"] >= 2)
        good(handler, body)

    mirror.answer = when_both_are_there
    children = [fork(fetch_in_child, (tmp_path, mirror.url, with_lock)) for _ in range(2)]
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0, 0]
    assert content_of(tmp_path / "fashion-mnist") == CONTENT
    assert not leftovers(tmp_path)
    # With a lock, the second process waits for the files of the first.
    assert mirror.asked["t10k-labels.gz"] == (1 if with_lock else 2)


# The Debian package


def test_the_installed_package_is_used_where_it_lies(tmp_path: Path, mirror: Mirror) -> None:
    installed = fill(tmp_path / "installed")
    assert fetch(tmp_path / "cache", mirror.url, package_folder=installed) == installed
    assert not mirror.asked


def make_tool(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an apt-get that has one package and a dpkg-deb that unpacks it."""
    fill(tmp_path / "content")
    with tarfile.open(tmp_path / "package.tar", "w") as archive:
        archive.add(tmp_path / "content", arcname="usr/share/datasets/small-mnist-that-nobody-has")
    folder = tmp_path / "tools"
    copy = f"cp {tmp_path}/package.tar ./dataset-small-mnist_1_all.deb"
    make_tool(folder, "apt-get", f'[ "$*" = "download dataset-small-mnist" ] || exit 9\n{copy}')
    make_tool(folder, "dpkg-deb", '[ "$1" = -x ] || exit 9\nmkdir -p "$3" && tar -xf "$2" -C "$3"')
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_the_package_is_downloaded_when_every_mirror_fails(tmp_path: Path, mirror: Mirror, tools: Path) -> None:
    mirror.answer = html
    home = fetch(tmp_path / "cache", mirror.url)
    assert content_of(home) == CONTENT
    assert not leftovers(tmp_path / "cache")
    assert not list(tmp_path.rglob("*.deb"))


@pytest.mark.parametrize(
    ("tool", "script", "reason"),
    [
        (
            "apt-get",
            "echo W: slow; echo E: Unable to locate package >&2; exit 100",
            "apt-get ended with code 100 (E: Unable to locate package)",
        ),
        ("dpkg-deb", "exit 0", "train-images is not in the package"),
    ],
)
def test_a_tool_that_fails_is_reported_with_its_last_line(
    tmp_path: Path, tools: Path, tool: str, script: str, reason: str
) -> None:
    make_tool(tools, tool, script)
    with pytest.raises(DataNotFoundError) as caught:
        fetch(tmp_path / "cache")
    assert f"  - apt-get download dataset-small-mnist: {reason}\n" in str(caught.value)
    assert not leftovers(tmp_path / "cache")


# When nothing works


def test_the_error_lists_all_that_was_tried_and_what_to_do(tmp_path: Path, mirror: Mirror) -> None:
    mirror.answer = not_found
    with pytest.raises(DataNotFoundError) as caught:
        fetch(tmp_path, mirror.url)
    assert caught.value.exit_code == EXIT_USAGE
    assert str(caught.value) == "\n".join(
        [
            "Small-MNIST was asked for, but no usable copy was found; tried, in this order:",
            f"  - cache, {tmp_path}/fashion-mnist: there is no such folder",
            "  - Debian package dataset-small-mnist, /usr/share/datasets/small-mnist-that-nobody-has: "
            "there is no such folder",
            f"  - {mirror.url}: t10k-labels failed (HTTP 404 Not Found)",
            "  - apt-get download dataset-small-mnist: apt-get is not on PATH",
            "On a machine with a network, download these files:",
            f"    {mirror.url}train-images.gz",
            f"    {mirror.url}train-labels.gz",
            f"    {mirror.url}t10k-images.gz",
            f"    {mirror.url}t10k-labels.gz",
            "Put them into a folder that every node can read, and give --task.data-folder FOLDER.",
        ]
    )


# Reading


@pytest.mark.parametrize("packed", [True, False])
def test_reading_gives_contiguous_tensors_of_the_right_values(tmp_path: Path, packed: bool) -> None:
    folder = fill(tmp_path / "given", packed=packed)
    images, labels = read(folder, "validation", release=SMALL)
    assert images.dtype == torch.uint8
    assert images.shape == (20, 28, 28)
    assert labels.dtype == torch.int64
    assert images.is_contiguous()
    assert labels.is_contiguous()
    assert bytes(images.flatten().tolist()) == CONTENT["t10k-images"][16:]
    assert bytes(labels.tolist()) == CONTENT["t10k-labels"][8:]
    images[0] = 0  # the memory is the tensor's own
    assert read(folder, "validation", release=SMALL)[0][0].any()


def test_a_cut_file_that_was_found_is_named_by_whoever_reads_it(tmp_path: Path) -> None:
    home = fill(tmp_path / "fashion-mnist", packed=True)
    cut(home / "train-images.gz")
    found = find_or_fetch(None, cache=tmp_path, release=SMALL, sources=sources(), offline=True)
    with pytest.raises(SettingError, match="replace or remove that file"):
        read(found, "train", release=SMALL)


@pytest.mark.parametrize(
    ("packed", "damage", "reason"),
    [
        (True, cut, r"cannot be read \(Compressed file ended before"),
        (False, cut, r"has \d+ of its \d+ bytes"),
        (False, flip, r"has the sha256 "),
        (True, lambda path: path.write_bytes(gzip.compress(bytes(1 << 22))), r"has more than its \d+ bytes"),
    ],
)
def test_reading_a_damaged_file_names_it(
    tmp_path: Path, packed: bool, damage: Callable[[Path], None], reason: str
) -> None:
    folder = fill(tmp_path / "given", packed=packed)
    damage(folder / ("train-images.gz" if packed else "train-images"))
    with pytest.raises(SettingError, match=rf"{folder}/train-images(\.gz)?, but it {reason}"):
        read(folder, "train", release=SMALL)


# The real thing


def assert_is_fashion_mnist(folder: Path) -> None:
    images, labels = read(folder, "train")
    validation_images, validation_labels = read(folder, "validation")
    assert images.shape == (60_000, 28, 28)
    assert validation_images.shape == (10_000, 28, 28)
    assert labels.bincount().tolist() == [6_000] * 10
    assert validation_labels.bincount().tolist() == [1_000] * 10
    assert labels[:5].tolist() == [9, 0, 0, 3, 0]
    assert images.double().mean().item() / 255 == pytest.approx(0.2860, abs=5e-5)


def fetch_really(home: Path, real: Sources, excuses: tuple[str, ...]) -> Path:
    """Asks one public place; what lies outside these tests, such as no network, skips and everything else fails."""
    tried: list[str] = []
    if not _fetch(home, FASHION_MNIST, real, lambda _: None, tried):
        assert any(excuse in tried[0] for excuse in excuses), tried
        pytest.skip(tried[0])
    return home


@pytest.fixture
def real_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment these tests were started in."""
    for name, value in REAL_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.mark.system
@pytest.mark.usefixtures("real_environment")
def test_the_real_package_can_be_downloaded(tmp_path: Path) -> None:
    excuses = ("is not on PATH", "apt-get ended with code", "apt-get did not end")
    assert_is_fashion_mnist(fetch_really(tmp_path, replace(PUBLIC_SOURCES, mirrors=()), excuses))


@pytest.mark.system
@pytest.mark.usefixtures("real_environment")
@pytest.mark.parametrize("real_mirror", PUBLIC_SOURCES.mirrors)
def test_the_real_mirrors_have_the_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real_mirror: str) -> None:
    monkeypatch.setenv("PATH", "")  # no help from the package
    excuses = (" failed (",)
    assert_is_fashion_mnist(fetch_really(tmp_path, replace(PUBLIC_SOURCES, mirrors=(real_mirror,)), excuses))
