"""What the doctor says of limits and folders, from machines that a test describes, and of real folders."""

from __future__ import annotations

import errno
import os
import resource
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stormo.doctor import machine as looked_at
from stormo.doctor.finding import Finding
from stormo.doctor.machine import Machine, Speed, check_limits, check_storage
from tests.doctor.machines import bad, write

FREE = resource.RLIM_INFINITY
GB = 10**9


def look(
    root: Path,
    shared_bytes: int = 64 * GB,
    cores: int = 8,
    few: dict[int, tuple[int, int]] | None = None,
    **environ: str,
) -> list[Finding]:
    memory = {"MemTotal": 100 * GB, "MemAvailable": 90 * GB}
    if not (root / "proc/meminfo").exists():
        write(root, {"proc/meminfo": "\n".join(f"{name}: {value // 1024} kB" for name, value in memory.items())})
    machine = Machine(
        root=root,
        environ=environ,
        limit=lambda which: (few or {}).get(which, (FREE, FREE)),
        statvfs=lambda _: SimpleNamespace(f_blocks=shared_bytes, f_bavail=shared_bytes, f_frsize=1),  # type: ignore[arg-type, return-value]
        cores=lambda: cores,
    )
    return list(check_limits(machine))


def test_a_machine_with_room(tmp_path: Path) -> None:
    found = look(tmp_path)
    assert not bad(found)
    assert "90 GB of 100 GB memory available" in [one.text for one in found]


@pytest.mark.parametrize(
    ("few", "expected", "words"),
    [
        ({resource.RLIMIT_NOFILE: (256, 4096)}, ("open-files", "warning"), "ulimit -n 4096"),
        ({resource.RLIMIT_NOFILE: (1024, 2048)}, ("open-files", "note"), "limits.conf"),
        ({resource.RLIMIT_NPROC: (500, 500)}, ("processes", "warning"), "ulimit -u"),
        ({resource.RLIMIT_AS: (10**9, FREE)}, ("address-space", "warning"), "ulimit -v unlimited"),
        ({resource.RLIMIT_FSIZE: (10**9, FREE)}, ("file-size", "warning"), "ulimit -f unlimited"),
    ],
)
def test_limits_of_a_process(
    tmp_path: Path, few: dict[int, tuple[int, int]], expected: tuple[str, str], words: str
) -> None:
    found = look(tmp_path, few=few)
    assert bad(found) == [expected]
    assert any(words in one.fix for one in found)


def test_locked_memory_matters_to_infiniband(tmp_path: Path) -> None:
    few = {resource.RLIMIT_MEMLOCK: (65536, 65536)}
    assert not bad(look(tmp_path, few=few))
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert bad(look(tmp_path, few=few)) == [("locked-memory", "error")]


def test_shared_memory(tmp_path: Path) -> None:
    found = look(tmp_path, shared_bytes=64 << 20)
    assert bad(found) == [("shared-memory", "warning")]
    assert any("--shm-size" in one.fix for one in found)

    def absent(_: Path) -> Any:
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))

    found = list(check_limits(Machine(root=tmp_path, environ={}, limit=lambda _: (FREE, FREE), statvfs=absent)))
    assert ("shared-memory", "error") in bad(found)


@pytest.mark.parametrize(
    ("files", "expected", "words"),
    [
        (
            {"proc/self/cgroup": "0::/job/step", "sys/fs/cgroup/job/memory.max": 16 * GB},
            *(("memory", "note"), "16 GB of the machine's 100 GB"),
        ),
        (
            {"proc/self/cgroup": "4:memory:/x", "sys/fs/cgroup/memory/x/memory.limit_in_bytes": 8 * GB},
            *(("memory", "note"), "8 GB of"),
        ),
        (
            {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "200000 100000"},
            *(("cores", "warning"), "but a quota of 2"),
        ),
        (
            {
                "proc/self/cgroup": "1:cpu,cpuacct:/",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": 150000,
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": 100000,
            },
            *(("cores", "warning"), "but a quota of 1.5"),
        ),
        (
            {"proc/self/cgroup": "0::/", "sys/fs/cgroup/pids.max": 100},
            *(("processes", "warning"), "100 processes and threads"),
        ),
        ({"proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 5 kB"}, ("memory", "warning"), "of 102 kB"),
        (
            {"proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 90 kB\nSwapTotal: 10 kB\nSwapFree: 1 kB"},
            *(("swap", "warning"), "swap is in use"),
        ),
        ({"proc/sys/vm/overcommit_memory": 2}, ("overcommit", "warning"), "vm.overcommit_memory=2"),
    ],
)
def test_limits_of_the_machine(tmp_path: Path, files: dict[str, object], expected: tuple[str, str], words: str) -> None:
    write(tmp_path, files)
    found = look(tmp_path)
    assert bad(found) == [expected]
    assert any(words in one.text for one in found if one.level != "ok")


def test_no_limit_of_old_cgroups_is_fine(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "4:memory:/\n0::/"})
    write(
        tmp_path,
        {"sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712, "sys/fs/cgroup/cpu.max": "max 100000"},
    )
    assert not bad(look(tmp_path))


def test_more_threads_than_cores(tmp_path: Path) -> None:
    assert bad(look(tmp_path, OMP_NUM_THREADS="16")) == [("cores", "warning")]
    assert not bad(look(tmp_path, OMP_NUM_THREADS="8"))


FAST = Speed(write_bytes_per_s=2e9, read_bytes_per_s=3e9, small_s=0.0003)


@pytest.fixture
def folder() -> Any:
    """A folder with a short name: sockets must fit below it."""
    with tempfile.TemporaryDirectory(prefix="d") as name:
        yield Path(name)


def look_at_folders(folder: Path, kind: str = "ext4", options: str = "rw", **room: int) -> list[Finding]:
    write(folder, {"proc/self/mounts": f"disk / xfs rw 0 0\nserver:/x {folder} {kind} {options} 0 0"})
    free = {"f_bavail": 10**12, "f_frsize": 1, "f_files": 10**6, "f_favail": 10**6, "f_flag": 0} | room
    machine = Machine(
        root=folder,
        runs_folder=folder / "not" / "there",
        data_folder=folder,
        temp_folder=folder,
        statvfs=lambda _: SimpleNamespace(**free),  # type: ignore[arg-type, return-value]
    )
    return list(check_storage(machine))


def test_a_real_folder_is_measured_and_left_as_it_was(folder: Path) -> None:
    write(folder, {"proc/self/mounts": ""})
    before = sorted(folder.rglob("*"))
    found = look_at_folders(folder)
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
    monkeypatch.setattr(looked_at, "_measure_speed", lambda _: speed)
    found = look_at_folders(folder)
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
    monkeypatch.setattr(looked_at, "_measure_speed", lambda _: FAST)
    found = look_at_folders(folder, kind, "rw", **room)
    assert bad(found) == expected
    assert found[0].facts["is_network"] == (kind == "lustre")


def test_no_room_to_measure_in(folder: Path) -> None:
    found = look_at_folders(folder, f_bavail=0)
    assert any("too little room to measure" in one.text for one in found)
    assert ("storage-runs", "warning") in bad(found)


def test_folders_that_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> str:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    found = look_at_folders(folder, "nfs4", "ro,relatime")
    assert bad(found) == [("storage-runs", "error"), ("storage-data", "note"), ("storage-temp", "error")]
    assert found[0].text.endswith("(nfs4, over the network): mounted read-only")
    assert "--runs-folder" in found[0].fix
    found = look_at_folders(folder, "nfs4")
    assert "cannot be written (Read-only file system)" in found[0].text


def test_a_full_disk_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> Speed:
        (path / "large").touch()
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(looked_at, "_measure_speed", full)
    assert "Disk quota exceeded" in look_at_folders(folder)[0].text
    assert not list(folder.glob(".stormo-doctor-*"))


def test_a_runs_folder_that_is_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looked_at, "_measure_speed", lambda _: FAST)
    (folder / "not").mkdir()
    (folder / "not" / "there").touch()
    assert bad(look_at_folders(folder)) == [("storage-runs", "error")]
    (folder / "not" / "there").unlink()
    (folder / "not").rmdir()
    (folder / "not").symlink_to("nowhere")
    assert f"{folder / 'not'} is no folder" in look_at_folders(folder)[0].text


def test_a_tmpdir_that_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looked_at, "_measure_speed", lambda _: FAST)
    monkeypatch.setenv("TMPDIR", "/no/such/folder")
    found = look_at_folders(folder)
    assert bad(found) == [("storage-temp", "warning")]
    assert any("TMPDIR=/no/such/folder" in one.text for one in found)


def test_a_temporary_folder_with_a_long_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looked_at, "_measure_speed", lambda _: FAST)
    long = folder / ("x" * 80)
    long.mkdir()
    assert bad(look_at_folders(long)) == [("storage-temp", "warning")]
