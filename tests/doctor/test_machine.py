"""Findings on limits, network and folders, from machines that a test describes, and on real folders."""

from __future__ import annotations

import errno
import os
import resource
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stormo.doctor import machine as machine_module
from stormo.doctor.finding import Finding
from stormo.doctor.machine import Machine, Speed, check_limits, check_network, check_storage
from stormo.errors import SettingError
from tests.doctor.machines import bad, write

FREE = resource.RLIM_INFINITY
GB = 10**9


def check(
    root: Path,
    shared_bytes: int = 64 * GB,
    cores: int = 8,
    few: dict[int, tuple[int, int]] | None = None,
    available: int = 90 * GB,
    **environ: str,
) -> list[Finding]:
    machine = Machine(
        root=root,
        environ=environ,
        limit=lambda which: (few or {}).get(which, (FREE, FREE)),
        statvfs=lambda _: SimpleNamespace(f_blocks=shared_bytes, f_bavail=shared_bytes, f_frsize=1),  # type: ignore[arg-type, return-value]
        cores=lambda: cores,
        memory=lambda: SimpleNamespace(total=100 * GB, available=available),
    )
    return list(check_limits(machine))


def test_a_machine_with_room(tmp_path: Path) -> None:
    found = check(tmp_path)
    assert not bad(found)
    assert "90 GB of 100 GB memory available" in [one.text for one in found]


@pytest.mark.parametrize(
    ("few", "expected", "text"),
    [
        ({resource.RLIMIT_NOFILE: (256, 4096)}, ("open-files", "warning"), "ulimit -n 4096"),
        ({resource.RLIMIT_NOFILE: (1024, 2048)}, ("open-files", "note"), "limits.conf"),
        ({resource.RLIMIT_NPROC: (500, 500)}, ("processes", "warning"), "ulimit -u"),
    ],
)
def test_limits_of_a_process(
    tmp_path: Path, few: dict[int, tuple[int, int]], expected: tuple[str, str], text: str
) -> None:
    found = check(tmp_path, few=few)
    assert bad(found) == [expected]
    assert any(text in one.fix for one in found)


def test_locked_memory_matters_to_infiniband(tmp_path: Path) -> None:
    few = {resource.RLIMIT_MEMLOCK: (65536, 65536)}
    assert not bad(check(tmp_path, few=few))
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert bad(check(tmp_path, few=few)) == [("locked-memory", "error")]


def test_shared_memory(tmp_path: Path) -> None:
    found = check(tmp_path, shared_bytes=64 << 20)
    assert bad(found) == [("shared-memory", "warning")]
    assert any("--shm-size" in one.fix for one in found)

    def absent(_: Path) -> Any:
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))

    found = list(check_limits(Machine(root=tmp_path, environ={}, limit=lambda _: (FREE, FREE), statvfs=absent)))
    assert ("shared-memory", "error") in bad(found)


@pytest.mark.parametrize(
    ("files", "expected", "text"),
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
    ],
)
def test_limits_of_the_machine(tmp_path: Path, files: dict[str, object], expected: tuple[str, str], text: str) -> None:
    write(tmp_path, files)
    found = check(tmp_path)
    assert bad(found) == [expected]
    assert any(text in one.text for one in found if one.level != "ok")


def test_little_memory_left(tmp_path: Path) -> None:
    found = check(tmp_path, available=5 * GB)
    assert bad(found) == [("memory", "warning")]
    assert "5 GB of 100 GB memory available" in [one.text for one in found]


def test_no_limit_of_old_cgroups_is_fine(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "4:memory:/\n0::/"})
    write(
        tmp_path,
        {"sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712, "sys/fs/cgroup/cpu.max": "max 100000"},
    )
    assert not bad(check(tmp_path))


def test_more_threads_than_cores(tmp_path: Path) -> None:
    assert bad(check(tmp_path, OMP_NUM_THREADS="16")) == [("cores", "warning")]
    assert not bad(check(tmp_path, OMP_NUM_THREADS="8"))


FAST = Speed(write_bytes_per_s=2e9, read_bytes_per_s=3e9, small_s=0.0003)


def check_folders(folder: Path, kind: str = "ext4", **room: int) -> list[Finding]:
    write(folder, {"proc/self/mounts": f"disk / xfs rw 0 0\nserver:/x {folder} {kind} rw 0 0"})
    free = {"f_bavail": 10**12, "f_frsize": 1, "f_files": 10**6, "f_favail": 10**6, "f_flag": 0} | room
    machine = Machine(
        root=folder,
        runs_folder=folder / "not" / "there",
        data_folder=folder,
        temp_folder=folder,
        statvfs=lambda _: SimpleNamespace(**free),  # type: ignore[arg-type, return-value]
    )
    return list(check_storage(machine))


def test_a_real_folder_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/mounts": ""})
    before = sorted(tmp_path.rglob("*"))
    found = check_folders(tmp_path)
    assert [one.check for one in found if one.facts] == ["storage-runs", "storage-data", "storage-temp"]
    for one in found:
        assert one.facts["file_system"] == "ext4"
        assert not one.facts["is_network"]
        for fact in ("write_bytes_per_s", "read_bytes_per_s", "small_file_s"):
            assert float(str(one.facts[fact])) > 0
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("speed", "expected", "text"),
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speed: Speed, expected: tuple[str, str], text: str
) -> None:
    monkeypatch.setattr(machine_module, "_measure_speed", lambda _: speed)
    found = check_folders(tmp_path)
    assert bad(found) == [expected]
    assert any(text in one.text for one in found if one.level != "ok")


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, room: dict[str, int], expected: list[tuple[str, str]]
) -> None:
    monkeypatch.setattr(machine_module, "_measure_speed", lambda _: FAST)
    found = check_folders(tmp_path, kind, **room)
    assert bad(found) == expected
    assert found[0].facts["is_network"] == (kind == "lustre")


def test_no_room_to_measure_in(tmp_path: Path) -> None:
    found = check_folders(tmp_path, f_bavail=0)
    assert any("too little room to measure" in one.text for one in found)
    assert ("storage-runs", "warning") in bad(found)


def test_folders_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> str:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    found = check_folders(tmp_path, "nfs4", f_flag=os.ST_RDONLY)
    assert bad(found) == [("storage-runs", "error"), ("storage-data", "note"), ("storage-temp", "error")]
    assert found[0].text.endswith("(nfs4, over the network): mounted read-only")
    assert "--runs-folder" in found[0].fix
    found = check_folders(tmp_path, "nfs4")
    assert "cannot be written (Read-only file system)" in found[0].text


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> Speed:
        (path / "large").touch()
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(machine_module, "_measure_speed", full)
    assert "Disk quota exceeded" in check_folders(tmp_path)[0].text
    assert not list(tmp_path.glob(".stormo-doctor-*"))


def test_a_runs_folder_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "_measure_speed", lambda _: FAST)
    (tmp_path / "not").mkdir()
    (tmp_path / "not" / "there").touch()
    assert bad(check_folders(tmp_path)) == [("storage-runs", "error")]
    (tmp_path / "not" / "there").unlink()
    (tmp_path / "not").rmdir()
    (tmp_path / "not").symlink_to("nowhere")
    assert f"{tmp_path / 'not'} is no folder" in check_folders(tmp_path)[0].text


def card(
    name: str, speed: int = 100_000, mtu: int = 9000, flags: str = "0x1003", state: str = "up"
) -> dict[str, object]:
    at = f"sys/class/net/{name}"
    return {f"{at}/speed": speed, f"{at}/mtu": mtu, f"{at}/flags": flags, f"{at}/operstate": state}


def port(name: str, state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)") -> dict[str, object]:
    at = f"sys/class/infiniband/{name}/ports/1"
    return {f"{at}/state": state, f"{at}/phys_state": "5: LinkUp", f"{at}/rate": rate}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A healthy machine with one card and the loopback interface."""
    write(tmp_path, card("lo", -1, 65536, "0x9", "unknown") | card("eth0"))
    header = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT"
    write(tmp_path, {"proc/net/route": f"{header}\neth0 00000000 0100000A 0003 0 0 0 00000000 0 0 0"})
    return tmp_path


def check_at(root: Path, number: str = "10.0.0.7", **environ: str) -> list[Finding]:
    machine = Machine(root=root, environ=environ)
    return list(check_network(machine, lambda _: [number], lambda: "node7"))


def test_a_healthy_network(root: Path) -> None:
    found = check_at(root)
    assert not bad(found)
    assert [one.text for one in found] == ["eth0: 100 Gbit/s, MTU 9000, default route", "node7 is 10.0.0.7"]


@pytest.mark.parametrize(
    ("files", "expected", "text"),
    [
        (card("eth0", 1000, 1500), ("network-card", "note"), "at most 125 MB/s of gradients"),
        (card("eth0", 100_000, 576), ("network-card", "warning"), "too small"),
        (card("eth0", -1, 1500, "0x1002", "down"), ("network-card", "note"), "no network card is up"),
        (card("lo", -1, 65536, "0x8", "down"), ("loopback", "error"), "lo is not up"),
    ],
)
def test_a_bad_network(root: Path, files: dict[str, object], expected: tuple[str, str], text: str) -> None:
    write(root, files)
    found = check_at(root)
    assert bad(found) == [expected]
    assert any(text in one.text for one in found if one.level != "ok")


def test_virtual_cards_are_left_out_unless_there_is_nothing_else(root: Path) -> None:
    write(root, card("docker0", 10_000, 1500))
    (root / "sys/devices/virtual/net/docker0").mkdir(parents=True)
    assert [one.text for one in check_at(root) if one.check == "network-card"] == [
        "eth0: 100 Gbit/s, MTU 9000, default route"
    ]
    write(root, card("eth0", flags="0x1002"))
    assert [one.facts["card"] for one in check_at(root) if one.check == "network-card"] == ["docker0"]


@pytest.mark.parametrize(
    ("ports", "expected"),
    [
        ([port("mlx5_0"), port("mlx5_1")], []),
        ([port("mlx5_0"), port("mlx5_1", "1: DOWN")], [("infiniband", "note")]),
        ([port("mlx5_0", "2: INIT")], [("infiniband", "warning")]),
        ([port("mlx5_0"), port("mlx5_1", rate="100 Gb/sec (1X NDR)")], [("infiniband", "warning")]),
    ],
)
def test_infiniband(root: Path, ports: list[dict[str, object]], expected: list[tuple[str, str]]) -> None:
    for files in ports:
        write(root, files)
    write(root, {"dev/infiniband/uverbs0": ""})
    assert bad(check_at(root)) == expected


def test_infiniband_that_a_container_does_not_get(root: Path) -> None:
    write(root, port("mlx5_0"))
    found = check_at(root)
    assert bad(found) == [("infiniband", "warning")]
    assert any("/dev/infiniband" in one.fix for one in found)


def test_the_hosts_own_name(root: Path) -> None:
    found = check_at(root, "127.0.1.1")
    assert bad(found) == [("host-name", "warning")]
    assert "is 127.0.1.1, which no other machine can reach" in found[-1].text

    def unknown(name: str) -> list[str]:
        raise SettingError(name, "there is none", "x")

    found = list(check_network(Machine(root=root, environ={}), unknown, lambda: "node7"))
    assert "node7, has no address" in found[-1].text
    assert bad(found) == [("host-name", "warning")]


@pytest.mark.parametrize(
    ("variable", "value", "level"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", "ok"),
        ("GLOO_SOCKET_IFNAME", "eth", "error"),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0", "error"),
        ("NCCL_SOCKET_IFNAME", "eth", "ok"),
        ("NCCL_SOCKET_IFNAME", "=eth", "error"),
        ("NCCL_SOCKET_IFNAME", "=eth0", "ok"),
        ("NCCL_SOCKET_IFNAME", "ib", "error"),
        ("NCCL_SOCKET_IFNAME", "ib,eth", "ok"),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", "ok"),
        ("NCCL_SOCKET_IFNAME", "^eth,lo", "error"),
    ],
)
def test_cards_that_a_variable_names(root: Path, variable: str, value: str, level: str) -> None:
    (found,) = [one for one in check_at(root, **{variable: value}) if one.check == "socket-card"]
    assert found.level == level


def test_variables_that_slow(root: Path) -> None:
    assert bad(check_at(root, NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="0")) == [("variables", "warning")]
    assert bad(check_at(root, NCCL_IB_DISABLE="1")) == [("variables", "note")]
    write(root, port("mlx5_0") | {"dev/infiniband/uverbs0": ""})
    assert bad(check_at(root, NCCL_IB_DISABLE="1")) == [("variables", "warning")]
    assert bad(check_at(root, TORCH_DISTRIBUTED_DEBUG="DETAIL")) == [("variables", "warning")]
