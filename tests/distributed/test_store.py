"""What workers say to each other through torch's store, and what somebody else has written there."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from stormo.distributed.store import SignedStore, Store, is_secondary
from stormo.errors import StormoError
from stormo.launch import RankInfo
from stormo.launch.rendezvous import StoreAddress, inherited_store_address, new_store_memory, received_store_address

SOON = timedelta(seconds=1)


def place_of(rank: int, num_nodes: int = 1) -> RankInfo:
    return RankInfo(
        launcher="slurm",
        rank=rank,
        world_size=2,
        local_rank=rank if num_nodes == 1 else 0,
        local_size=2 // num_nodes,
        node_id=0 if num_nodes == 1 else rank,
        num_nodes=num_nodes,
        master_addr="127.0.0.1",
        master_port=29600,
        host="here",
    )


def test_a_word_is_heard_and_one_of_a_stranger_is_not() -> None:
    shared = dist.HashStore()
    ours, theirs = SignedStore(shared, "w", b"key"), SignedStore(shared, "w", b"guess")
    ours.put("a", {"path": ["x", 1, None]})
    assert ours.get("a", SOON) == {"path": ["x", 1, None]}
    theirs.put("a", {"path": "/etc"})
    shared.set("b", "no word at all")
    ours.put("c", 1)
    shared.set("d", shared.get("c").decode())  # said under another name
    for name in ("a", "b", "d"):
        with pytest.raises(StormoError, match="no worker of this job"):
            ours.get(name, SOON)


def test_the_ranks_of_a_node_meet_in_memory_that_has_no_name() -> None:
    at = StoreAddress(memory=new_store_memory())
    told = received_store_address(place_of(1), at.described())
    assert told.memory is not None
    assert told.memory != at.memory
    stores = [Store(place_of(rank), 5.0, point) for rank, point in enumerate((at, told))]
    stores[0].signed("x").put("a", 3)
    assert stores[1].signed("x").get("a", SOON) == 3
    with pytest.raises(dist.DistError, match="wait timeout after 20ms") as gave_up:
        stores[1].signed("x").get("never", timedelta(milliseconds=20))
    assert is_secondary(gave_up.value)
    assert str(Path(f"/proc/self/fd/{at.memory}").readlink()).endswith("(deleted)")
    for descriptor in (at.memory, told.memory):
        assert descriptor is not None
        os.close(descriptor)
    with Path(os.devnull).open("rb"), Path("/etc/hostname").open("rb"):  # take the numbers that are free now
        stores[1].signed("x").put("b", 4)
        assert stores[0].signed("x").get("b", SOON) == 4
        del stores, gave_up


@pytest.mark.parametrize(
    "told", [{}, {"memory": "/etc/passwd"}, {"memory": 3}, {"memory": "/proc/1/fd/../../../etc"}, {"port": 29600}]
)
def test_only_the_memory_of_a_process_is_opened(told: dict[str, object]) -> None:
    with pytest.raises(StormoError, match="same release"):
        received_store_address(place_of(1), told)


@pytest.mark.parametrize("told", [{"address": "127.0.0.1"}, {"address": "127.0.0.1", "port": "1"}, {"memory": "x"}])
def test_ranks_of_several_nodes_need_an_address(told: dict[str, object]) -> None:
    with pytest.raises(StormoError, match="same release"):
        received_store_address(place_of(1, num_nodes=2), told)


def test_a_worker_does_not_hand_its_memory_on() -> None:
    memory = new_store_memory()
    os.set_inheritable(memory, True)
    environ = {"STORMO_STORE_FD": str(memory)}
    assert inherited_store_address(place_of(1), environ).memory == memory
    assert environ == {}
    assert not os.get_inheritable(memory)
    os.close(memory)
