"""stormo's own launcher: what a worker is told is what it reads."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from stormo.errors import SettingError
from stormo.launch.environments import local
from stormo.launch.environments.local import Node
from stormo.launch.rendezvous import Rendezvous

RENDEZVOUS = Rendezvous(control=None, store_addr="n1", store_port=12345, store=None, script_port=23456)


def told(
    node: Node, local_rank: int, environ: dict[str, str] | None = None, *, num_cores: int = 16, **descriptors: str
) -> dict[str, str]:
    given = {**RENDEZVOUS.variables(), local.CHANNEL_FD: "5", **descriptors}
    return local.environment(node, local_rank, environ=environ or {}, given=given, num_cores=num_cores)


def test_the_tracker_of_shared_memory_is_quiet_and_the_users_own_filters_stay() -> None:
    environ = told(Node(num_workers=1), 0, {"PYTHONWARNINGS": "error"})
    assert environ["PYTHONWARNINGS"] == "error,ignore:resource_tracker"
    assert told(Node(num_workers=1), 0, environ)["PYTHONWARNINGS"] == "error,ignore:resource_tracker"
    warn = "import warnings; warnings.warn('resource_tracker: There appear to be 28 leaked semaphore objects')"
    done = subprocess.run(
        [sys.executable, "-c", warn], env=os.environ | environ, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("local_rank", range(3))
@pytest.mark.parametrize("node_id", range(2))
def test_a_worker_reads_what_its_agent_wrote(node_id: int, local_rank: int) -> None:
    node = Node(num_workers=3, num_nodes=2, node_id=node_id, master_addr="n1")
    environ = told(node, local_rank)
    assert local.detect(environ)
    info = local.rank_info(environ)
    assert (info.launcher, info.rank, info.world_size) == ("local", 3 * node_id + local_rank, 6)
    assert (info.local_rank, info.local_size) == (local_rank, 3)
    assert (info.node_id, info.num_nodes) == (node_id, 2)
    assert (info.master_addr, info.master_port) == ("n1", 12345)
    assert environ["MASTER_PORT"] == "23456"  # a script that calls torch.distributed finds it free


def test_a_shell_without_the_launcher_is_not_detected() -> None:
    assert not local.detect({"RANK": "0", "WORLD_SIZE": "2"})


def test_cores_are_shared_among_the_workers_unless_the_user_says_otherwise() -> None:
    node = Node(num_workers=3)
    assert told(node, 0)["OMP_NUM_THREADS"] == "5"
    assert told(node, 0, num_cores=2)["OMP_NUM_THREADS"] == "1"
    assert told(node, 0, {"OMP_NUM_THREADS": "8"})["OMP_NUM_THREADS"] == "8"


def test_sets_have_one_order_in_all_workers_unless_the_user_says_otherwise() -> None:
    nodes = [Node(num_workers=2, num_nodes=2, node_id=node_id, master_addr="n1") for node_id in range(2)]
    for variables in ({}, {"PYTHONHASHSEED": ""}):
        assert {told(node, rank, variables)["PYTHONHASHSEED"] for node in nodes for rank in range(2)} == {"0"}
    assert told(nodes[1], 0, {"PYTHONHASHSEED": "random"})["PYTHONHASHSEED"] == "random"


def test_one_machine_keeps_to_loopback_unless_the_user_says_otherwise() -> None:
    environ = told(Node(num_workers=2), 0, {"GLOO_SOCKET_IFNAME": "eth0"})
    assert (environ["GLOO_SOCKET_IFNAME"], environ["NCCL_SOCKET_IFNAME"]) == ("eth0", "lo")
    several = told(Node(num_workers=2, num_nodes=2, master_addr="n1"), 0)
    assert "NCCL_SOCKET_IFNAME" not in several


def test_only_the_worker_that_gets_the_store_hears_of_it() -> None:
    node = Node(num_workers=2)
    assert told(node, 0, STORMO_STORE_FD="7")["STORMO_STORE_FD"] == "7"
    assert "STORMO_STORE_FD" not in told(node, 1, {"STORMO_STORE_FD": "7"})


def test_on_one_node_the_workers_hear_of_no_port_of_the_store() -> None:
    given = replace(RENDEZVOUS, store_port=None).variables()
    assert given == {"MASTER_ADDR": "n1", "MASTER_PORT": "23456"}
    environ = local.environment(Node(num_workers=1), 0, environ={"STORMO_STORE_PORT": "7"}, given=given, num_cores=1)
    assert "STORMO_STORE_PORT" not in environ


def test_nodes_that_do_not_know_where_the_first_is_are_refused_before_anything_starts() -> None:
    with pytest.raises(SettingError) as caught:
        Node(num_workers=1, num_nodes=2)
    assert "set --master-addr to the name or address of node 0" in str(caught.value)
