"""A copy equals its source, is made once, is shared, and is gone when nobody uses it; whatever happens on the way."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from stormo.data.staging import copying, node_cache
from stormo.data.staging.copying import StoppedError, list_tree
from stormo.data.staging.node_cache import Lease, Staged, entry_lock, lease_copy, stage
from stormo.errors import SettingError
from tests import forked


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    _make_small(monkeypatch.setattr)


def _make_small(set_attribute: Any = setattr) -> None:
    set_attribute(copying, "PIECE_BYTES", 1000)
    set_attribute(copying, "_BLOCK_BYTES", 300)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A data set with everything that a folder may hold."""
    outside, root = tmp_path / "outside", tmp_path / "data"
    (outside / "more").mkdir(parents=True)
    (outside / "more" / "file").write_bytes(b"outside")
    (root / "a" / "b").mkdir(parents=True)
    (root / "empty" / "folder").mkdir(parents=True)
    for number, size in enumerate((0, 1, 299, 1000, 1001, 12_345)):
        (root / "a" / f"{number}.bin").write_bytes(os.urandom(size))
    (root / "a" / "0.bin.partial").write_bytes(b"a name of its own")
    Path(os.fsdecode(os.fsencode(root) + b"/a/b/\xff\xfe")).write_bytes(b"no text")
    (root / "a" / "b" / "up").symlink_to("../1.bin")
    (root / "absolute").symlink_to(root / "a")
    (root / "out-file").symlink_to(outside / "more" / "file")
    (root / "out-folder").symlink_to(outside)
    (root / "nowhere").symlink_to("not/there")
    return root


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "local"
    made.mkdir()
    return made


def content(root: Path) -> dict[str, bytes | None]:
    """Everything that can be read under a folder, through links too."""
    found: dict[str, bytes | None] = {}
    for where, folders, files in os.walk(root, followlinks=True):
        found |= {os.path.relpath(Path(where, name), root): None for name in folders}
        for name in files:
            path = Path(where, name)
            found[os.path.relpath(path, root)] = path.read_bytes() if path.exists() else None
    return found


def test_a_copy_holds_what_the_source_holds_and_needs_it_no_more(source: Path, folder: Path, tmp_path: Path) -> None:
    before = content(source)
    assert before["out-folder/more/file"] == before["out-file"] == b"outside"
    staged = stage(source, folder)
    assert content(staged.path) == before
    assert (staged.copied_bytes, staged.path.name) == (staged.num_bytes, "data")
    assert (staged.path / "a" / "5.bin").stat().st_mtime_ns == (source / "a" / "5.bin").stat().st_mtime_ns
    source.rename(tmp_path / "away")
    (tmp_path / "outside").rename(tmp_path / "gone")
    assert content(staged.path) == before
    staged.lease.release()
    assert list(folder.iterdir()) == []


def test_a_single_file_keeps_its_name(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "corpus.tar").write_bytes(b"x" * 2500)
    staged = stage(tmp_path / "corpus.tar", folder)
    assert (staged.path.name, staged.path.read_bytes()) == ("corpus.tar", b"x" * 2500)
    staged.lease.release()
    assert list(folder.iterdir()) == []


def test_a_copy_that_is_there_is_used_and_one_of_an_older_source_is_not(source: Path, folder: Path) -> None:
    first, again = stage(source, folder), stage(source, folder)
    assert (again.path, again.copied_bytes) == (first.path, 0)
    (source / "a" / "1.bin").write_bytes(b"2")
    newer = stage(source, folder)
    assert newer.path != first.path
    assert newer.copied_bytes == newer.num_bytes
    assert (newer.path / "a" / "1.bin").read_bytes() == b"2"
    assert (first.path / "a" / "1.bin").read_bytes() != b"2"  # who reads it keeps it
    for staged in (first, newer):
        staged.lease.release()
        assert again.path.exists() or staged is newer
    again.lease.release()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("damage", ["size", "file", "folder", "restart"])
def test_a_copy_that_is_not_whole_is_copied_again(
    source: Path, folder: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = stage(source, folder)
    damaged = first.path / "a" / "5.bin"
    if damage == "size":
        os.truncate(damaged, 100)
    elif damage == "file":
        damaged.unlink()
    elif damage == "folder":
        (first.path / "empty" / "folder").rmdir()
    else:
        monkeypatch.setattr(node_cache, "_boot", lambda: "the machine was started again")
    again = stage(source, folder)
    assert content(again.path) == content(source)
    assert (again.path, again.copied_bytes) == (first.path, first.num_bytes)


def test_too_little_room_is_refused_with_the_numbers_before_anything_is_copied(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(folder)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((4096, 1000, *real[2:4], 4, *real[5:])))
    with pytest.raises(SettingError, match=r"it needs 14\.7 kB and there are 4 kB free; name a larger folder"):
        stage(source, folder)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("call", "at", "number", "sentence"),
    [
        ("pwrite", 10, errno.ENOSPC, r"no room was left there after a part of 14\.7 kB; make room"),
        ("pwrite", 10, errno.EIO, r"that failed \(Input/output error\); name another folder"),
        ("preadv", 0, errno.EIO, r"a/\S+ cannot be read there \(Input/output error\); fix that"),
    ],
)
def test_an_error_in_the_middle_is_one_sentence_and_leaves_nothing(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, call: str, at: int, number: int, sentence: str
) -> None:
    real, calls = getattr(os, call), iter(range(1000))

    def failing(*arguments: Any) -> Any:
        if next(calls) == at:
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(SettingError, match=sentence):
        stage(source, folder)
    assert list(folder.iterdir()) == []


def test_what_cannot_be_copied_or_may_not_be_trusted_is_refused(source: Path, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="No such file"):
        stage(tmp_path / "missing", folder)
    with pytest.raises(SettingError, match="lies inside it"):
        stage(tmp_path, folder)
    (tmp_path / "outside" / "back").symlink_to(tmp_path / "outside")
    with pytest.raises(SettingError, match="leads to a folder that it lies in"):
        stage(source, folder)
    (tmp_path / "outside" / "back").unlink()
    os.mkfifo(source / "pipe")
    with pytest.raises(SettingError, match="pipe is neither a file nor a folder"):
        stage(source, folder)
    (source / "pipe").unlink()
    node_cache.root_of(folder).symlink_to(tmp_path / "outside")  # as another user could do it in /tmp
    with pytest.raises(SettingError, match="is not a folder of this user"):
        stage(source, folder)


@pytest.mark.parametrize("at", ["listing", "waiting", "copying"])
def test_a_stop_ends_it_wherever_it_is_and_nothing_half_done_is_trusted(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    number, real = 0, os.preadv

    def read(*arguments: Any) -> int:
        nonlocal number
        number = signal.SIGINT
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", read)
    whole = node_cache.root_of(folder) / f"data-{list_tree(source).sha256[:16]}"
    if at in ("listing", "waiting"):
        number = signal.SIGINT
    if at == "waiting":
        monkeypatch.setattr(node_cache, "list_tree", lambda source, _: list_tree(source))
    with entry_lock(whole, make=True) if at == "waiting" else nullcontext(), pytest.raises(StoppedError):
        stage(source, folder, stop=lambda: number)
    monkeypatch.undo()
    _make_small(monkeypatch.setattr)
    assert at == "waiting" or not list(folder.iterdir())
    assert content(stage(source, folder).path) == content(source)


def test_ctrl_c_ends_the_threads_that_copy(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, make, calls, events = os.pwrite, threading.Event, iter(range(1000)), list[threading.Event]()

    def noted() -> threading.Event:
        events.append(make())
        return events[-1]

    def interrupting(*arguments: Any) -> int:
        if next(calls) == 0:
            os.kill(os.getpid(), signal.SIGINT)
        events[0].wait(20.0)  # until the threads are told of an end
        return write(*arguments)

    monkeypatch.setattr(threading, "Event", noted)
    monkeypatch.setattr(os, "pwrite", interrupting)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            stage(source, folder)
    finally:
        signal.signal(signal.SIGINT, before)
    assert next(calls) <= copying._NUM_THREADS  # none went on
    assert not list(folder.iterdir())


def _stage_and_wait(source: str, folder: str, link: Connection, num_writes: int | None) -> None:
    """Stage when told, tell how much was copied, let go when told; or die in the middle."""
    _make_small()
    if num_writes is not None:
        real, left = os.pwrite, iter(range(num_writes))

        def dying(*arguments: Any) -> Any:
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)

        os.pwrite = dying
    link.recv()
    staged = stage(Path(source), Path(folder))
    link.send(staged.copied_bytes)
    link.recv()
    staged.lease.release()


@pytest.fixture
def others(source: Path, folder: Path) -> Iterator[Any]:
    started: list[Any] = []

    def start(num_writes: int | None = None) -> tuple[Any, Any]:
        here, there = get_context("forkserver").Pipe()
        process = forked.fork(_stage_and_wait, (str(source), str(folder), there, num_writes))
        started.append(process)
        return process, here

    yield start
    for process in started:
        process.kill()
        process.join()


def test_two_jobs_on_a_node_copy_once_and_the_last_one_removes(source: Path, folder: Path, others: Any) -> None:
    jobs = [others(), others()]
    for _, link in jobs:
        link.send("stage")
    copied = sorted(link.recv() for _, link in jobs)
    assert copied == [0, list_tree(source).num_bytes]
    (first, first_link), (second, second_link) = jobs
    first_link.send("let go")
    first.join()
    (copy,) = folder.glob("*/data-*/content/data")
    assert content(copy) == content(source)
    second_link.send("let go")
    second.join()
    assert list(folder.iterdir()) == []


def test_a_job_that_was_killed_while_it_copied_or_used_a_copy_holds_nobody_up(
    source: Path, folder: Path, tmp_path: Path, others: Any
) -> None:
    killed, link = others(num_writes=20)
    link.send("stage")
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert list(folder.glob("*/data-*")) != []
    user, link = others()
    link.send("stage")
    assert link.recv() > 0  # all over again: nobody knows what the other one had done
    user.kill()
    user.join()
    staged = stage(source, folder)
    assert staged.copied_bytes == 0
    kept = _kept(tmp_path / "outside", folder)
    assert content(staged.path) == content(source)
    staged.lease.release()
    assert [path.name.partition("-")[0] for path in folder.glob("*/*")] == ["outside"]
    killed, link = others(num_writes=20)
    link.send("stage")
    killed.join()
    (tmp_path / "outside" / "new").touch()
    newer = _kept(tmp_path / "outside", folder)  # removes what is left of others, and the kept copy that is outdated
    assert list(folder.glob("*/*")) == [newer.entry]
    assert newer.entry != kept.entry


def _kept(source: Path, folder: Path) -> Staged:
    staged = stage(source, folder, keep=True)
    staged.lease.release()
    return staged


def test_a_release_does_not_wait_for_another_that_still_makes_or_checks_the_copy(source: Path, folder: Path) -> None:
    done = stage(source, folder)
    with entry_lock(done.entry):
        other = Lease(done.entry)
        letting_go = threading.Thread(target=done.lease.release, daemon=True)
        letting_go.start()
        letting_go.join(60.0)
        assert not letting_go.is_alive()
    assert done.path.is_dir()
    other.release()
    assert not list(folder.iterdir())


def test_another_worker_takes_the_copy_by_its_name(source: Path, folder: Path) -> None:
    done = stage(source, folder)
    path, lease = lease_copy(folder, done.entry.name)
    assert path == done.path
    done.lease.release()
    assert path.is_dir()
    lease.release()
    assert not list(folder.iterdir())


@pytest.mark.parametrize("name", ["", ".", "..", "../{other}", "{other}", "link", "nowhere", "a/b", "{root}"])
def test_nothing_but_a_copy_of_this_users_is_taken_and_so_removed(source: Path, folder: Path, name: str) -> None:
    done = stage(source, folder)
    other = folder / "precious"
    other.mkdir()
    (other / "manifest.json").write_text('{"source": "/precious"}')
    (done.entry.parent / "link").symlink_to(other)
    before = sorted(path for path in folder.rglob("*") if "users" not in path.name)
    with pytest.raises(SettingError, match="no copy"):
        lease_copy(folder, name.format(other=other, root=done.entry.parent))
    assert sorted(path for path in folder.rglob("*") if "users" not in path.name) == before
    done.lease.release()
    assert (other / "manifest.json").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_copy_that_is_another_users_is_not_taken(source: Path, folder: Path) -> None:
    done = stage(source, folder, keep=True)
    os.chown(done.entry, 65534, 65534)
    with pytest.raises(SettingError, match="no copy"):
        lease_copy(folder, done.entry.name)
    done.lease._unlock()
