"""Each worker gets its own slice of a GPU, and NCCL is told how to join slices of one."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from stormo.errors import SettingError
from stormo.launch import alone, slices
from stormo.launch.environments import torchrun
from stormo.launch.environments.detect import detect
from stormo.launch.environments.local import Node
from stormo.launch.rank_info import RankInfo, host_name
from stormo.launch.slices import take_slice
from stormo.system.hardware import NODE_SLICES, Gpu
from tests.launch.test_local import told

NCCL = ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE")


def slices_of(*gpus: str, each: int) -> tuple[Gpu, ...]:
    """Slices of physical GPUs."""
    return tuple(
        Gpu(name="NVIDIA H200 MIG 1g.18gb", memory_bytes=1, capability=(9, 0), uuid=f"MIG-{gpu}{i}", slice_of=gpu)
        for gpu in gpus
        for i in range(each)
    )


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> os._Environ[str]:
    """The environment of this process, without what a launcher or a user sets, and as it was afterwards."""
    for name in (*NCCL, NODE_SLICES, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setattr(slices, "cuda_has_started", lambda: False)
    return os.environ


def _show(monkeypatch: pytest.MonkeyPatch, shown: tuple[Gpu, ...]) -> None:
    monkeypatch.setattr(slices, "visible_slices", lambda: list(shown))


def _rank(local_rank: int, *, local_size: int = 4, num_nodes: int = 1, launcher: str = "torchrun") -> RankInfo:
    world_size = local_size * num_nodes
    return replace(
        alone(),
        launcher=launcher,
        rank=local_rank,
        world_size=world_size,
        local_rank=local_rank,
        local_size=local_size,
        num_nodes=num_nodes,
    )


def test_the_agent_shows_each_worker_its_own_slice() -> None:
    shown = slices_of("a", each=7)
    node = Node(num_workers=4, slices=shown, shares_a_gpu=True)
    environments = [told(node, local_rank) for local_rank in range(4)]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in environments] == ["MIG-a0", "MIG-a1", "MIG-a2", "MIG-a3"]
    assert {one[NODE_SLICES] for one in environments} == {",".join(one.uuid for one in shown)}
    assert [one["NCCL_HOSTID"] for one in environments] == [f"{host_name()}-{rank}" for rank in range(4)]
    assert {(one["NCCL_SOCKET_IFNAME"], one["NCCL_IB_DISABLE"]) for one in environments} == {("lo", "1")}


def test_what_the_user_sets_for_nccl_wins() -> None:
    given = {"NCCL_HOSTID": "mine", "NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_DISABLE": "0"}
    environment = told(Node(num_workers=2, slices=slices_of("a", each=2), shares_a_gpu=True), 1, given)
    assert {name: environment[name] for name in NCCL} == given


def test_workers_on_several_nodes_meet_outside_loopback() -> None:
    node = Node(num_workers=2, num_nodes=2, master_addr="n1", slices=slices_of("a", each=2), shares_a_gpu=True)
    environment = told(node, 1)
    assert "NCCL_SOCKET_IFNAME" not in environment
    assert environment["NCCL_HOSTID"] == f"{host_name()}-1"


def test_slices_of_different_gpus_are_joined_as_gpus_are() -> None:
    environment = told(Node(num_workers=2, slices=slices_of("a", "b", each=1)), 1)
    assert environment["CUDA_VISIBLE_DEVICES"] == "MIG-b0"
    assert "NCCL_HOSTID" not in environment


def test_more_workers_than_slices_take_turns() -> None:
    node = Node(num_workers=3, slices=slices_of("a", each=2))
    assert [told(node, rank)["CUDA_VISIBLE_DEVICES"] for rank in range(3)] == ["MIG-a0", "MIG-a1", "MIG-a0"]


def test_workers_that_share_a_whole_gpu_are_hosts_of_their_own_to_nccl() -> None:
    environment = told(Node(num_workers=2, shares_a_gpu=True), 1)
    assert [environment[name] for name in NCCL] == [f"{host_name()}-1", "lo", "1"]
    assert not {"CUDA_VISIBLE_DEVICES", NODE_SLICES} & set(environment)


def test_whole_gpus_are_left_to_torch() -> None:
    environment = told(Node(num_workers=2), 1)
    assert not {"CUDA_VISIBLE_DEVICES", NODE_SLICES, "NCCL_HOSTID"} & set(environment)


@pytest.mark.parametrize("launcher", ["torchrun", "slurm", "mpi", "env"])
def test_a_rank_of_another_launcher_takes_the_slice_of_its_local_rank(
    monkeypatch: pytest.MonkeyPatch, environ: os._Environ[str], launcher: str
) -> None:
    _show(monkeypatch, slices_of("a", each=4))
    take_slice(_rank(2, launcher=launcher), "auto")
    assert environ["CUDA_VISIBLE_DEVICES"] == "MIG-a2"
    assert environ[NODE_SLICES] == "MIG-a0,MIG-a1,MIG-a2,MIG-a3"
    assert [environ[name] for name in NCCL] == [f"{host_name()}-2", "lo", "1"]


def test_it_keeps_the_one_that_its_launcher_bound(monkeypatch: pytest.MonkeyPatch, environ: os._Environ[str]) -> None:
    environ["CUDA_VISIBLE_DEVICES"] = "MIG-a3"
    _show(monkeypatch, slices_of("a", each=4)[3:])
    take_slice(_rank(2, launcher="slurm", num_nodes=2), "cuda")
    assert environ["CUDA_VISIBLE_DEVICES"] == "MIG-a3"
    assert NODE_SLICES not in environ
    assert environ["NCCL_HOSTID"] == f"{host_name()}-2"
    assert "NCCL_SOCKET_IFNAME" not in environ


@pytest.mark.parametrize(
    ("info", "device"),
    [
        (None, "auto"),
        (alone(), "auto"),
        (_rank(1, launcher="local"), "auto"),
        (_rank(0, local_size=1, num_nodes=2), "auto"),
        (_rank(1), "cpu"),
    ],
)
def test_who_needs_no_slice_asks_for_none(
    monkeypatch: pytest.MonkeyPatch, environ: os._Environ[str], info: RankInfo | None, device: str
) -> None:
    monkeypatch.setattr(slices, "visible_slices", lambda: pytest.fail("asked NVML"))
    take_slice(info, device)
    assert "CUDA_VISIBLE_DEVICES" not in environ


def test_a_slice_is_taken_once(monkeypatch: pytest.MonkeyPatch, environ: os._Environ[str]) -> None:
    _show(monkeypatch, slices_of("a", each=4))
    take_slice(_rank(1), "auto")
    monkeypatch.setattr(slices, "visible_slices", lambda: pytest.fail("asked NVML again"))
    take_slice(_rank(1), "auto")
    assert environ["CUDA_VISIBLE_DEVICES"] == "MIG-a1"


def test_a_script_that_has_started_cuda_is_refused(monkeypatch: pytest.MonkeyPatch, environ: os._Environ[str]) -> None:
    _show(monkeypatch, slices_of("a", each=4))
    monkeypatch.setattr(slices, "cuda_has_started", lambda: True)
    with pytest.raises(SettingError, match="CUDA was started before this worker took one of the 4 slices"):
        take_slice(_rank(1), "auto")


def test_torchruns_variables_lead_to_a_slice(monkeypatch: pytest.MonkeyPatch, environ: os._Environ[str]) -> None:
    variables = {
        "TORCHELASTIC_RUN_ID": "x",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    assert torchrun.detect(variables)
    _show(monkeypatch, slices_of("a", each=4))
    take_slice(detect(variables), "auto")
    assert environ["CUDA_VISIBLE_DEVICES"] == "MIG-a3"
