"""Two hosts, one command on each: they find together, train as one, and hear of each other's end."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable

import pytest

from tests.system.hosts import Host, Job, process_of_rank
from tests.system.runs import ENDS_WITHIN_S, SLOW, Digests, Train, digests_of

Hosts = tuple[Host, Host]
MASTER = ("--master-addr", "10.99.0.1", "--master-port", "29500")


def start_node(host: Host, train: Train, node_id: int, *options: str, num_nodes: int = 2) -> Job:
    nodes = ("--num-nodes", str(num_nodes), "--node-id", str(node_id))
    return host.start(*train(*nodes, *MASTER, "--num-gpus", "1", *options))


def start_both(hosts: Hosts, train: Train, *options: str) -> tuple[Job, Job]:
    return start_node(hosts[0], train, 0, *options), start_node(hosts[1], train, 1, *options)


def test_two_hosts_train_to_the_same_bits_as_one_and_listen_on_their_own_addresses_only(
    hosts: Hosts, train: Train, local_digests: Callable[[int], Digests]
) -> None:
    jobs = start_both(hosts, train, "--num-gpus", "2", "--task.pass-s", "0.2")
    jobs[0].wait_for("Epoch = 1:")
    listeners = [host.listeners() for host in hosts]
    assert [job.wait() for job in jobs] == [0, 0]
    assert [job.err for job in jobs] == ["", ""]
    assert jobs[1].out == ""
    assert digests_of(train.folder) == local_digests(4)
    for host, found in zip(hosts, listeners, strict=True):
        assert {listener.address for listener in found} == {host.address}


@pytest.mark.parametrize("rank", [1])
def test_a_rank_killed_on_one_host_ends_both_and_is_named_on_both(hosts: Hosts, train: Train, rank: int) -> None:
    jobs = start_both(hosts, train, *SLOW)
    jobs[0].wait_for("Epoch = 1:")
    os.kill(process_of_rank(hosts[rank], rank), signal.SIGKILL)
    assert [job.wait(ENDS_WITHIN_S) for job in jobs] == [1, 1]
    cause = f"stormo: rank {rank} on host n{rank + 1} was killed by SIGKILL (signal 9)"
    assert [job.first_line for job in jobs] == [cause, cause]


def test_a_host_that_leaves_the_network_is_lost_to_the_other_and_ends_too(hosts: Hosts, train: Train) -> None:
    jobs = start_both(hosts, train, *SLOW)
    jobs[0].wait_for("Epoch = 1:")
    hosts[1].leave_network()
    try:
        assert [job.wait(ENDS_WITHIN_S) for job in jobs] == [1, 1]  # how soon is looked at in tests/launch
    finally:
        hosts[1].join_network()
    for job, other in zip(jobs, ("node 1 on host n2", "node 0 on host n1"), strict=True):
        assert job.first_line.startswith(f"stormo: {other} is lost: ")


def test_hosts_that_never_meet_say_so_when_the_time_is_up(hosts: Hosts, train: Train) -> None:
    jobs = (
        start_node(hosts[0], train, 0, "--timeout", "2"),
        start_node(hosts[1], train, 1, "--timeout", "2", "--master-addr", "10.99.0.77"),
    )
    assert [job.wait(20.0) for job in jobs] == [1, 1]
    assert jobs[0].first_line.startswith(
        "stormo: the job has 2 nodes, but node 1 has not joined at 10.99.0.1:29500 within 2 s; start there: "
    )
    assert "--node-id 1" in jobs[0].first_line
    assert "tried to reach node 0 at 10.99.0.77:29500 for 2 s, but without success" in jobs[1].first_line


def test_hosts_that_do_not_fit_together_are_all_told_why(hosts: Hosts, train: Train) -> None:
    jobs = [start_node(hosts[0], train, 0), start_node(hosts[1], train, 1, "--base-lr", "0.02")]
    assert [job.wait(20.0) for job in jobs] == [2, 2]
    difference = "--base-lr is 0.01 on node 0 (host n1) and 0.02 on node 1 (host n2)"
    assert all(job.first_line.startswith(f"stormo: {difference}, but all nodes must") for job in jobs)

    jobs = [start_node(hosts[index % 2], train, node_id, num_nodes=3) for index, node_id in enumerate((0, 1, 1))]
    assert [job.wait(20.0) for job in jobs] == [2, 2, 2]
    first, second, third = (job.first_line for job in jobs)
    assert first == second == third
    pattern = r"stormo: Host n[12] was started with --node-id 1, but host n[12] has already joined as node 1; give"
    assert re.match(pattern, first), first


def test_a_node_0_that_cannot_listen_says_what_to_set(hosts: Hosts, train: Train) -> None:
    waiting = start_node(hosts[0], train, 0)
    while not hosts[0].listeners():
        assert waiting.process.poll() is None, waiting.err
        time.sleep(0.05)
    busy = start_node(hosts[0], train, 0)
    elsewhere = start_node(hosts[1], train, 0)
    assert [busy.wait(20.0), elsewhere.wait(20.0)] == [2, 2]
    pattern = (
        r"stormo: --master-port 29500 was set, but another process of this machine already listens on "
        r"10\.99\.0\.1:29500; set --master-port \d+ on every node, or end that process\."
    )
    assert re.fullmatch(pattern, busy.first_line), busy.first_line
    assert elsewhere.first_line.startswith(
        "stormo: --master-addr is 10.99.0.1 and this is node 0, but that is not an address of host n2; set"
    )
    waiting.process.terminate()
    assert waiting.wait(20.0) == 75
    assert waiting.err == "stormo: stopped by SIGTERM before all nodes had joined.\n"
