"""The cores next to a worker's GPU, on a sysfs of our own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stormo.system import affinity
from stormo.system.affinity import bind_to_gpu, choose_cores, own_cores
from stormo.system.hardware import num_cores

A, B = "00000000:0A:00.0", "0000:0b:00.0"  # as NVML and as CUDA write it


def _machine(root: Path, **gpus: tuple[int, str]) -> Path:
    for name, (node, cores) in gpus.items():
        folder = root / "bus" / "pci" / "devices" / f"0000:{name}:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
        (folder / "local_cpulist").write_text(f"{cores}\n")
    return root


def _chosen(root: Path, bus_ids: list[str], local_size: int, num_allowed: int) -> list[list[int] | None]:
    allowed = set(range(num_allowed))
    found = [choose_cores(bus_ids, rank, local_size, allowed, root) for rank in range(local_size)]
    return [None if one is None else one[1] for one in found]


def test_two_gpus_on_two_sockets_get_a_socket_each(tmp_path: Path) -> None:
    root = _machine(tmp_path, **{"0a": (0, "0-3,8-11"), "0b": (1, "4-7,12-15")})
    assert _chosen(root, [A, B], 2, 16) == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    assert choose_cores([A, B], 1, 2, set(range(16)), root) == (1, [4, 5, 6, 7, 12, 13, 14, 15])


def _hyperthreads(root: Path, *siblings: tuple[int, int]) -> None:
    for pair in siblings:
        for core in pair:
            folder = root / f"devices/system/cpu/cpu{core}/topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(f"{pair[0]},{pair[1]}\n")


def test_workers_of_one_socket_share_its_cores_with_their_hyperthreads(tmp_path: Path) -> None:
    root = _machine(tmp_path, **{"0a": (0, "0-3,8-11")})
    _hyperthreads(root, *((core, core + 8) for core in range(4)))
    assert _chosen(root, [A, A], 2, 16) == [[0, 1, 8, 9], [2, 3, 10, 11]]


def test_cores_that_are_numbered_across_the_sockets_are_shared_too(tmp_path: Path) -> None:
    root = _machine(tmp_path, **{"0a": (0, "0,2,4,6,8,10,12,14")})
    assert _chosen(root, [A, A], 2, 16) == [[0, 2, 4, 6], [8, 10, 12, 14]]
    _hyperthreads(root, *((core, core + 8) for core in (0, 2, 4, 6)))
    assert _chosen(root, [A, A], 2, 16) == [[0, 2, 8, 10], [4, 6, 12, 14]]


def test_too_few_cores_for_each_are_left_to_all_workers_of_the_socket(tmp_path: Path) -> None:
    root = _machine(tmp_path, **{"0a": (0, "0-3,8-11")})
    assert _chosen(root, [A] * 3, 3, 16) == [[0, 1, 2, 3, 8, 9, 10, 11]] * 3


def test_a_launcher_that_shows_each_worker_its_own_gpu_leaves_the_whole_socket(tmp_path: Path) -> None:
    root = _machine(tmp_path, **{"0a": (0, "0-7")})
    assert _chosen(root, [A], 2, 16) == [list(range(8))] * 2


@pytest.mark.parametrize(
    ("node", "cores", "bus_ids"),
    [
        (0, "0-3", [A]),  # all there are
        (-1, "0-3", [A]),  # a virtual machine
        (0, "8-11", [A]),  # none that this process may use
        (0, "", [A]),
        (0, "0-1", ["0000:0c:00.0"]),  # not in sysfs
        (0, "0-1", [""]),
        (0, "0-1", []),
    ],
)
def test_where_nothing_is_known_or_gained_nothing_is_bound(
    tmp_path: Path, node: int, cores: str, bus_ids: list[str]
) -> None:
    assert choose_cores(bus_ids, 0, 1, {0, 1, 2, 3}, _machine(tmp_path, **{"0a": (node, cores)})) is None


def _threads() -> list[int]:
    return [int(thread.name) for thread in Path("/proc/self/task").iterdir()]


@pytest.fixture
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(affinity, "_unbound", None)
    yield
    for thread in _threads():
        os.sched_setaffinity(thread, before)


@pytest.mark.usefixtures("_restored")
def test_all_threads_are_bound_and_the_number_of_cores_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("needs two cores")
    last = max(allowed)
    monkeypatch.setattr(os, "cpu_count", lambda: len(allowed))
    monkeypatch.setattr(affinity, "_SYSFS", _machine(tmp_path, **{"0a": (1, str(last))}))
    assert bind_to_gpu([A], 0, 1) == f"bound to cores {last} (NUMA node 1 of its GPU)"
    assert all(os.sched_getaffinity(thread) == {last} for thread in _threads())
    assert own_cores() == allowed
    assert num_cores() == len(allowed)


@pytest.mark.usefixtures("_restored")
def test_a_process_that_somebody_has_bound_stays_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    monkeypatch.setattr(os, "cpu_count", lambda: len(allowed) + 1)
    monkeypatch.setattr(affinity, "_SYSFS", _machine(tmp_path, **{"0a": (0, str(min(allowed)))}))
    assert bind_to_gpu([A], 0, 1) is None
    assert os.sched_getaffinity(0) == allowed
