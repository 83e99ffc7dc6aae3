"""Which GPU a worker takes, whatever Slurm shows it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import cast

import pytest
import torch
import torch.distributed as dist

from stormo.distributed import devices
from stormo.distributed.devices import choose_gpus, device_of
from stormo.distributed.store import SignedStore, Store
from stormo.errors import SettingError, StormoError
from stormo.launch import RankInfo, alone
from stormo.system.hardware import NODE_SLICES
from tests.launch.slurm_environments import tasks_of


def seen_by(command: str, host: str = "n1") -> list[list[str]]:
    """The GPUs that every task of a host was shown."""
    tasks = [task for task in tasks_of(command) if task["SLURMD_NODENAME"] == host]
    return [task["CUDA_VISIBLE_DEVICES"].split(",") for task in tasks]


@pytest.mark.parametrize(
    ("seen", "taken"),
    [
        (seen_by("srun -N2 --ntasks-per-node=2 --gpus-per-task=1"), [0, 0]),
        (seen_by("srun -N2 --ntasks-per-node=2 --gpus-per-task=1", "n2"), [0, 0]),
        (seen_by("srun -N1 -n4 --gpus-per-node=4"), [0, 1, 2, 3]),
        (seen_by("srun -N1 -n4 --gpus-per-node=4 --gpu-bind=single:1"), [0, 0, 0, 0]),
        (seen_by("srun -N1 -n4 --gpus-per-node=4 --gpu-bind=map_gpu:3,2,1,0"), [0, 0, 0, 0]),
        (seen_by("srun --gpus=4 --ntasks-per-gpu=1"), [0, 0, 0, 0]),
        # --gpu-bind=closest: tasks dealt out over two sockets in turn, and one socket after the other.
        ([["a", "b"], ["c", "d"], ["a", "b"], ["c", "d"]], [0, 0, 1, 1]),
        ([["a", "b"], ["a", "b"], ["c", "d"], ["c", "d"]], [0, 1, 0, 1]),
        # Only one of all ways fits.
        ([["a", "b"], ["a", "c"], ["a"]], [1, 1, 0]),
    ],
)
def test_no_two_workers_of_a_node_take_the_same_gpu(seen: list[list[str]], taken: list[int]) -> None:
    chosen = choose_gpus(seen, "n1")
    assert len({gpus[index] for gpus, index in zip(seen, chosen, strict=True)}) == len(seen)
    assert chosen == taken


@pytest.mark.parametrize(
    ("seen", "numbers"),
    [
        (seen_by("srun -N1 -n4 --gpus-per-node=2"), ("4 workers", "2 GPUs")),
        (seen_by("srun -N1 -n4 --gpus-per-node=4 --gpu-bind=single:2"), ("4 workers", "2 GPUs")),
        (seen_by("srun -N1 -n2 --gpus-per-node=1"), ("2 workers", "1 GPU")),
        ([["a", "b"], ["c"], ["c"]], ("3 workers", "3 GPUs")),
    ],
)
def test_workers_that_cannot_each_have_one_are_refused(seen: list[list[str]], numbers: tuple[str, str]) -> None:
    with pytest.raises(SettingError) as caught:
        choose_gpus(seen, "n1")
    assert str(caught.value).startswith(f"{numbers[0]} were started on host n1, but they see {numbers[1]}, ")


class OneNode:
    """A store in which the other worker of a node has told what it sees."""

    timeout = timedelta(seconds=5)

    def __init__(self, *seen_by_other: str, key: bytes = b"key") -> None:
        self._store = dist.HashStore()
        self.signed("devices/0", key).put("0", seen_by_other)

    def signed(self, prefix: str, key: bytes = b"key") -> SignedStore:
        return SignedStore(dist.PrefixStore(prefix, self._store), prefix, key)


@pytest.mark.parametrize("launcher", ["local", "torchrun"])
def test_a_worker_with_a_slice_has_one_device(monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    monkeypatch.setenv(NODE_SLICES, "MIG-a,MIG-b")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: pytest.fail("its slice was bound already"))
    assert device_of("cuda", replace(second_of_two(), launcher=launcher)) == torch.device("cuda", 0)


def second_of_two() -> RankInfo:
    return replace(alone(), launcher="slurm", rank=1, world_size=2, local_rank=1, local_size=2, host="n1")


def test_workers_of_a_node_choose_different_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(devices, "device_uuid", lambda index: "b")
    place = second_of_two()
    assert device_of("cuda", place, cast(Store, OneNode("a"))) == torch.device("cuda", 0)
    with pytest.raises(SettingError, match="2 workers were started on host n1, but they see 1 GPU, and each"):
        device_of("cuda", place, cast(Store, OneNode("b")))
    assert device_of("cuda", place, cast(Store, OneNode("b")), may_share=True) == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    agent = replace(place, launcher="torchrun")
    assert device_of("cuda", agent, cast(Store, OneNode("nobody asks"))) == torch.device("cuda", 1)


def test_an_unauthenticated_gpu_list_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(devices, "device_uuid", lambda index: "b")
    with pytest.raises(StormoError, match="no worker of this job has written devices/0/0"):
        device_of("cuda", second_of_two(), cast(Store, OneNode("a", key=b"another")))


def test_workers_with_enough_gpus_still_ask_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(devices, "device_uuid", lambda index: "ab"[index])
    assert device_of("cuda", second_of_two(), cast(Store, OneNode("b"))) == torch.device("cuda", 0)


def test_ranks_that_do_not_know_that_they_share_a_host_do_not_share_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(devices, "device_uuid", lambda index: "ab"[index])
    place = replace(second_of_two(), launcher="env", local_rank=0, local_size=1, node_id=1, num_nodes=2)
    store = OneNode()
    store.signed("devices").put("0", ["n1", "a"])
    with pytest.raises(SettingError, match="RANK=0 and RANK=1 were started on host n1 without LOCAL_RANK"):
        device_of("cuda", place, cast(Store, store))
    assert device_of("cuda", place, cast(Store, store), may_share=True) == torch.device("cuda", 0)
    store.signed("devices").put("0", ["n0", "c"])
    assert device_of("cuda", place, cast(Store, store)) == torch.device("cuda", 0)


def test_a_slice_is_known_by_the_name_that_nvml_has_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-b,MIG-c")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: pytest.fail("may be the whole GPU's"))
    assert devices.device_uuid(0) == "MIG-b"


@pytest.mark.gpu
def test_every_gpu_has_a_name_of_its_own() -> None:
    count = torch.cuda.device_count()
    names = [devices.device_uuid(index) for index in range(count)]
    assert len(set(names)) == count
    assert all(len(name) > 8 for name in names)
