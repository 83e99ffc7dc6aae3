"""Three hosts of which two cannot reach each other, or only slowly: the pre-flight and the doctor name the two."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from tests import programs
from tests.system import hosts as machines
from tests.system.conftest import Need, hosts_file
from tests.system.hosts import Host, Job, wait_until
from tests.system.runs import RUN_NAME, STORMO, Digests, Train, digests_of

NAMES = {"m1": "10.98.0.1", "m2": "10.98.0.2", "m3": "10.98.0.3"}
MASTER = ("--master-addr", "10.98.0.1", "--num-nodes", "3", "--num-gpus", "1")
NOWHERE = "02:00:00:00:00:99"  # no card has this address: what is sent there is lost, and nobody is told
Hosts = list[Host]


@pytest.fixture(scope="module")
def three(need: Need, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    need("tc", "iproute2")
    why_not = machines.why_not()
    if why_not is not None:
        pytest.skip(f"needs network namespaces: {why_not}")
    folder = tmp_path_factory.mktemp("three")
    switch, made = machines.Switch(), list[Host]()
    try:
        for name, address in NAMES.items():
            made.append(Host(switch, name, address, hosts_file(NAMES), folder / name))
        yield made
    finally:
        for host in made:
            host.close()
        switch.close()


def start_all(three: Hosts, command: list[str]) -> list[Job]:
    return [host.start(*command, *MASTER, "--node-id", str(node)) for node, host in enumerate(three)]


def nothing_is_left(three: Hosts) -> None:
    left = [host.leftovers() for host in three]
    wait_until(lambda: not any(host.leftovers() for host in three), 30.0, lambda: f"left behind: {left}")


def test_hosts_that_never_come_or_cannot_reach_each_other_are_named_before_anything_is_trained(
    three: Hosts, train: Train
) -> None:
    _, second, third = three
    second.command("ip", "neigh", "replace", third.address, "lladdr", NOWHERE, "dev", "eth0", "nud", "permanent")
    lonely = three[0].start(STORMO, "doctor", "--limit-s", "10", *MASTER, "--node-id", "0", "--master-port", "29501")
    try:
        jobs = start_all(three, train("--preflight"))
        assert [job.wait() for job in (*jobs, lonely)] == [1, 1, 1, 1]
    finally:
        second.command("ip", "neigh", "del", third.address, "dev", "eth0")
    cause = (
        "stormo: rank 0 on host m1 failed: preflight: node 2 (m3, 10.98.0.3) cannot be reached from node 1 (m2): "
        "the connection timed out (after 5 s), nor the other way round; open all TCP ports between the nodes"
    )
    for job in jobs:
        assert job.first_line.startswith(cause)
        assert job.out == ""
    assert not (train.folder / RUN_NAME).exists()
    assert lonely.first_line.startswith(
        "stormo: the job has 3 nodes, but nodes 1, 2 have not joined at 10.98.0.1:29501 within 10 s; start there: "
    )
    nothing_is_left(three)


def test_the_doctor_names_the_slow_link_between_two_of_three_hosts(three: Hosts, train: Train) -> None:
    _, second, third = three
    for words in (
        "qdisc add dev eth0 root handle 1: htb default 1 r2q 100000",
        "class add dev eth0 parent 1: classid 1:1 htb rate 40gbit",
        "class add dev eth0 parent 1: classid 1:2 htb rate 8mbit",
        f"filter add dev eth0 protocol ip parent 1: prio 1 u32 match ip dst {third.address}/32 flowid 1:2",
    ):
        second.command("tc", *words.split())
    try:
        jobs = start_all(three, [STORMO, "doctor", "--json", "--runs-folder", str(train.folder)])
        assert [job.wait() for job in jobs] == [1, 1, 1]
    finally:
        second.command("tc", "qdisc", "del", "dev", "eth0", "root")
    assert [(job.err, job.out) for job in jobs[1:]] == [("", ""), ("", "")]
    found = json.loads(jobs[0].out)["findings"]
    errors = [one for one in found if one["level"] == "error"]
    assert [(one["check"], one["where"]) for one in errors] == [("link", "node 1 (m2) and node 2 (m3)")]
    assert errors[0]["facts"]["bytes_per_s"] < 2e6
    links = {(one["facts"]["node_a"], one["facts"]["node_b"]) for one in found if one["check"] == "link"}
    assert links == {(0, 1), (0, 2), (1, 2)}
    assert "reach" in {one["check"] for one in found if one["level"] == "ok"}
    nothing_is_left(three)


def test_a_preflight_leaves_the_training_as_it_is(train: Train, local_digests: Callable[[int], Digests]) -> None:
    train.folder.mkdir()
    words = ["-m", "stormo", "train", *train.arguments("--num-gpus", "2", "--preflight")]
    done = programs.run(words, train.folder, 2)
    assert (done.returncode, done.stderr) == (0, "")
    assert "preflight: 2 workers on 1 node, all-reduce " in done.stdout
    assert digests_of(train.folder) == local_digests(2)
