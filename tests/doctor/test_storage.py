"""What the doctor says of folders, real ones and ones that a test describes."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stormo.doctor import storage
from stormo.doctor.finding import Finding
from stormo.doctor.machine import Machine
from stormo.doctor.storage import Speed
from tests.doctor.test_network import write

FAST = Speed(write_bytes_per_s=2e9, read_bytes_per_s=3e9, small_s=0.0003)


@pytest.fixture
def folder() -> Any:
    """A folder with a short name: sockets must fit below it."""
    with tempfile.TemporaryDirectory(prefix="d") as name:
        yield Path(name)


def look(folder: Path, kind: str = "ext4", options: str = "rw", **room: int) -> list[Finding]:
    write(folder, {"proc/self/mounts": f"disk / xfs rw 0 0\nserver:/x {folder} {kind} {options} 0 0"})
    free = {"f_bavail": 10**12, "f_frsize": 1, "f_files": 10**6, "f_favail": 10**6, "f_flag": 0} | room
    machine = Machine(
        root=folder,
        runs_folder=folder / "not" / "there",
        data_folder=folder,
        temp_folder=folder,
        statvfs=lambda _: SimpleNamespace(**free),  # type: ignore[arg-type, return-value]
    )
    return list(storage.check(machine))


def bad(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(one.check, one.level) for one in findings if one.level != "ok"]


def test_a_real_folder_is_measured_and_left_as_it_was(folder: Path) -> None:
    write(folder, {"proc/self/mounts": ""})
    before = sorted(folder.rglob("*"))
    found = look(folder)
    assert [one.check for one in found if one.facts] == ["storage-runs", "storage-data", "storage-temp"]
    for one in found:
        assert one.facts["file_system"] == "ext4"
        assert not one.facts["is_network"]
        for fact in ("write_bytes_per_s", "read_bytes_per_s", "small_file_s"):
            assert float(str(one.facts[fact])) > 0
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("speed", "expected", "words"),
    [
        (
            Speed(write_bytes_per_s=10e6, read_bytes_per_s=1e9, small_s=0.001),
            ("storage-runs", "warning"),
            "takes 100 s",
        ),
        (Speed(write_bytes_per_s=1e9, read_bytes_per_s=1e9, small_s=0.2), ("storage-data", "warning"), "200.0 ms"),
    ],
)
def test_slow_folders(
    folder: Path, monkeypatch: pytest.MonkeyPatch, speed: Speed, expected: tuple[str, str], words: str
) -> None:
    monkeypatch.setattr(storage, "_measure", lambda _: speed)
    found = look(folder)
    assert bad(found) == [expected]
    assert any(words in one.text for one in found if one.level != "ok")


@pytest.mark.parametrize(
    ("kind", "room", "expected"),
    [
        ("lustre", {}, []),
        (
            "ext4",
            {"f_bavail": 10**9},
            [("storage-runs", "warning"), ("storage-data", "warning"), ("storage-temp", "warning")],
        ),
        (
            "ext4",
            {"f_favail": 50},
            [("storage-runs", "warning"), ("storage-data", "warning"), ("storage-temp", "warning")],
        ),
        ("ext4", {"f_flag": os.ST_NOEXEC}, [("storage-temp", "warning")]),
        ("tmpfs", {"f_files": 0}, [("storage-runs", "warning")]),
    ],
)
def test_room_and_kinds(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, room: dict[str, int], expected: list[tuple[str, str]]
) -> None:
    monkeypatch.setattr(storage, "_measure", lambda _: FAST)
    found = look(folder, kind, "rw", **room)
    assert bad(found) == expected
    assert found[0].facts["is_network"] == (kind == "lustre")


def test_no_room_to_measure_in(folder: Path) -> None:
    found = look(folder, f_bavail=0)
    assert any("too little room to measure" in one.text for one in found)
    assert ("storage-runs", "warning") in bad(found)


def test_folders_that_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> str:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    found = look(folder, "nfs4", "ro,relatime")
    assert bad(found) == [("storage-runs", "error"), ("storage-data", "note"), ("storage-temp", "error")]
    assert found[0].text.endswith("(nfs4, over the network): mounted read-only")
    assert "--runs-folder" in found[0].mend
    found = look(folder, "nfs4")
    assert "cannot be written (Read-only file system)" in found[0].text


def test_a_full_disk_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> Speed:
        (path / "large").touch()
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(storage, "_measure", full)
    assert "Disk quota exceeded" in look(folder)[0].text
    assert not list(folder.glob(".stormo-doctor-*"))


def test_a_runs_folder_that_is_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_measure", lambda _: FAST)
    (folder / "not").mkdir()
    (folder / "not" / "there").touch()
    assert bad(look(folder)) == [("storage-runs", "error")]
    (folder / "not" / "there").unlink()
    (folder / "not").rmdir()
    (folder / "not").symlink_to("nowhere")
    assert f"{folder / 'not'} is no folder" in look(folder)[0].text


def test_a_tmpdir_that_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_measure", lambda _: FAST)
    monkeypatch.setenv("TMPDIR", "/no/such/folder")
    found = look(folder)
    assert bad(found) == [("storage-temp", "warning")]
    assert any("TMPDIR=/no/such/folder" in one.text for one in found)


def test_a_temporary_folder_with_a_long_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_measure", lambda _: FAST)
    long = folder / ("x" * 80)
    long.mkdir()
    assert bad(look(long)) == [("storage-temp", "warning")]
