"""Two nodes as two agents on one machine: how they find together, and that one failing ends the other."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stormo.launch import client
from stormo.launch.rendezvous import command_for
from tests.launch.conftest import worker_command

HERE = Path(__file__).parent
Start = Callable[..., Any]
MASTER = "127.0.0.2"  # an address of this machine that nothing else here uses
FOREVER = [["out", "ready"], ["sleep", 60]]


@pytest.fixture
def start_node(start_agent: Start, free_port: int) -> Start:
    def start(node_id: int, scenario: dict[str, Any], *, num_nodes: int = 2, **arguments: Any) -> Any:
        node = {
            "num_workers": arguments.pop("num_workers", 1),
            "num_nodes": num_nodes,
            "node_id": node_id,
            "master_addr": arguments.pop("master_addr", MASTER),
            "master_port": arguments.pop("master_port", free_port),
        }
        return start_agent(scenario, node=node, **arguments)

    return start


def test_two_nodes_run_one_job_whose_ranks_meet_on_a_port_already_bound(start_node: Start) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
    scenario = {"*": [["environ", *names]]}
    jobs = [start_node(node_id, scenario, num_workers=2) for node_id in (1, 0)]
    assert [job.wait() for job in jobs] == [0, 0]
    lines = "".join(job.out for job in jobs).splitlines()
    told = sorted((json.loads(line[line.index("{") :]) for line in lines), key=lambda said: int(said["RANK"]))
    assert [(said["RANK"], said["NODE_RANK"], said["LOCAL_RANK"]) for said in told] == [
        ("0", "0", "0"),
        ("1", "0", "1"),
        ("2", "1", "0"),
        ("3", "1", "1"),
    ]
    assert {said["WORLD_SIZE"] for said in told} == {"4"}
    assert {said["MASTER_ADDR"] for said in told} == {MASTER}
    assert {said["GLOO_SOCKET_IFNAME"] for said in told} == {None}
    assert len({said["MASTER_PORT"] for said in told}) == 1
    # Only rank 0 of all draws on the terminal itself.
    assert sorted(line[: line.index("{")] for line in lines) == ["", "[rank 1] ", "[rank 2] ", "[rank 3] "]


@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_on_one_node_ends_the_other_with_the_same_first_line(
    start_node: Start, failing: int, tmp_path: Path
) -> None:
    both_ready = tmp_path / "both-ready"
    scenario = {str(failing): [["out", "ready"], ["wait for", str(both_ready)], ["raise", "boom"]], "*": FOREVER}
    jobs = [start_node(node_id, scenario) for node_id in (0, 1)]
    for job in jobs:
        job.wait_until_ready(1)
    both_ready.touch()
    assert [job.wait() for job in jobs] == [1, 1]
    first_lines = [job.err.splitlines()[0] for job in jobs]
    assert first_lines[0] == first_lines[1]
    assert first_lines[0].startswith(f"stormo: rank {failing} on host ")
    assert first_lines[0].endswith(" failed: ValueError: boom")
    assert "Traceback" in jobs[failing].err
    assert "Traceback" not in jobs[1 - failing].err


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_complaint_on_one_node_waits_for_the_cause_on_the_other(
    start_node: Start, culprit: int, tmp_path: Path
) -> None:
    ready, complained = str(tmp_path / "ready"), str(tmp_path / "complained")
    scenario = {
        str(culprit): [["touch", ready], ["wait for", complained], ["sleep", 0.5], ["kill", int(signal.SIGKILL)]],
        str(1 - culprit): [["wait for", ready], ["touch", complained], ["complain", "connection reset by peer"]],
    }
    timeouts = {"settle": {"secondary_s": 20.0, "other_nodes_s": 20.0}}
    jobs = [start_node(node_id, scenario, timeouts=timeouts) for node_id in (0, 1)]
    assert [job.wait() for job in jobs] == [1, 1]
    for job in jobs:
        assert job.err.splitlines()[0].endswith("was killed by SIGKILL (signal 9)")
        assert "connection reset" not in job.err


@pytest.mark.parametrize("early", [0, 1])
def test_a_rank_that_exited_early_on_another_node_is_named(start_node: Start, early: int, tmp_path: Path) -> None:
    left = str(tmp_path / "left")
    complaint = [["wait for", left], ["complain", "connection closed"]]
    scenario = {str(early): [["leave"], ["touch", left]], str(1 - early): complaint}
    timeouts = {"settle": {"other_nodes_s": 2.5}}
    jobs = [start_node(node_id, scenario, timeouts=timeouts) for node_id in (0, 1)]
    assert [job.wait() for job in jobs] == [1, 1]
    for job in jobs:
        assert job.err.splitlines()[0].startswith(f"stormo: rank {early} on host ")
        assert job.err.splitlines()[0].endswith(" ended early with exit code 0")


def test_every_node_ends_with_the_exit_code_of_the_whole(start_node: Start) -> None:
    scenario = {"0": [["exit", 0]], "1": [["sleep", 0.3], ["exit", 75]]}
    jobs = [start_node(node_id, scenario) for node_id in (0, 1)]
    assert [job.wait() for job in jobs] == [75, 75]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_agent_ends_the_other_node(start_node: Start, killed: int) -> None:
    jobs = [start_node(node_id, {"*": FOREVER}) for node_id in (0, 1)]
    for job in jobs:
        job.wait_until_ready(1)
    jobs[killed].process.kill()
    assert jobs[1 - killed].wait() == 1
    assert jobs[1 - killed].err.startswith(f"stormo: node {killed} on host ")
    assert "was killed by SIGKILL (signal 9)" in jobs[1 - killed].err


@pytest.mark.parametrize("stopped", [0, 1])
def test_an_agent_without_heartbeat_is_lost(start_node: Start, stopped: int) -> None:
    timing = {"channel": {"heartbeat_s": 0.2, "lost_after_s": 1.5, "stalled_after_s": 1.5}}
    jobs = [start_node(node_id, {"*": FOREVER}, timeouts=timing) for node_id in (0, 1)]
    for job in jobs:
        job.wait_until_ready(1)
    jobs[stopped].process.send_signal(signal.SIGSTOP)
    assert jobs[1 - stopped].wait() == 1
    assert f"node {stopped} on host" in jobs[1 - stopped].err
    assert "is lost: no heartbeat for 1.5 s" in jobs[1 - stopped].err
    jobs[stopped].process.send_signal(signal.SIGCONT)
    assert jobs[stopped].wait() == 1  # and it ends when it wakes up


def test_different_options_are_named_with_both_values_on_both_nodes(start_node: Start) -> None:
    jobs = [
        start_node(node_id, {"*": FOREVER}, digest=str(node_id), options={"--lr": lr, "--epochs": "3"})
        for node_id, lr in ((0, "0.1"), (1, "0.2"))
    ]
    assert [job.wait() for job in jobs] == [2, 2]
    for job in jobs:
        assert "--lr is 0.1 on node 0" in job.err
        assert "and 0.2 on node 1" in job.err
        assert "--epochs" not in job.err
        assert len(job.err.splitlines()) == 1


def test_different_numbers_of_workers_are_named(start_node: Start) -> None:
    jobs = [start_node(node_id, {"*": FOREVER}, num_workers=1 + node_id) for node_id in (0, 1)]
    assert [job.wait() for job in jobs] == [2, 2]
    assert "--num-gpus is 1 on node 0" in jobs[0].err
    assert "and 2 on node 1" in jobs[1].err


def test_two_nodes_with_the_same_id_end_all_with_one_sentence(start_node: Start) -> None:
    jobs = [start_node(node_id, {"*": FOREVER}, num_nodes=3) for node_id in (0, 1, 1)]
    assert [job.wait() for job in jobs] == [2, 2, 2]
    for job in jobs:
        assert "was started with --node-id 1, but host" in job.err
        assert "has already joined as node 1" in job.err


def test_different_numbers_of_nodes_are_named(start_node: Start) -> None:
    jobs = [start_node(0, {"*": FOREVER}, num_nodes=3), start_node(1, {"*": FOREVER}, num_nodes=2)]
    assert [job.wait() for job in jobs] == [2, 2]
    for job in jobs:
        assert "with --num-nodes 2 and host" in job.err
        assert "with --num-nodes 3" in job.err


def test_a_node_that_comes_late_to_a_running_job_is_sent_away_alone(start_node: Start) -> None:
    scenario = {"*": [["stop on", "SIGTERM"], ["wait for stop"], ["exit", 75]]}
    jobs = [start_node(node_id, scenario) for node_id in (0, 1)]
    for job in jobs:
        job.wait_until_ready(1)
    late = start_node(1, scenario)
    assert late.wait() == 2
    assert "has already joined as node 1" in late.err
    for job in jobs:
        assert job.process.poll() is None
        job.process.terminate()
    assert [job.wait() for job in jobs] == [75, 75]


def test_nodes_that_never_come_are_named_with_the_command_to_start(start_node: Start) -> None:
    jobs = [start_node(node_id, {"*": FOREVER}, num_nodes=4, timeout_s=1.5) for node_id in (0, 2)]
    assert [job.wait() for job in jobs] == [1, 1]
    for job in jobs:
        assert "the job has 4 nodes, but nodes 1, 3 have not joined at 127.0.0.2:" in job.err
        assert "within 1.5 s; start there: " in job.err
        assert job.err.endswith("--node-id 1.\n")


def test_node_0_may_start_last(start_node: Start) -> None:
    late = start_node(1, {"*": [["exit", 0]]})
    time.sleep(0.3)
    assert [start_node(0, {"*": [["exit", 0]]}).wait(), late.wait()] == [0, 0]


def test_a_master_that_cannot_be_reached_is_tried_until_the_timeout(start_node: Start, free_port: int) -> None:
    job = start_node(1, {"*": FOREVER}, timeout_s=1.5)
    assert job.wait() == 1
    assert f"tried to reach node 0 at {MASTER}:{free_port} for 1.5 s" in job.err
    assert "Connection refused" in job.err


def test_a_master_name_that_nobody_knows_is_one_sentence(start_node: Start) -> None:
    master, other = (start_node(node, {}, master_addr="no.such.host.invalid", timeout_s=1.0) for node in (0, 1))
    assert master.wait() == 2
    assert "--master-addr no.such.host.invalid was set, but host" in master.err
    assert other.wait() == 1
    assert "cannot find its address" in other.err


def test_an_address_of_another_machine_cannot_be_node_0s(start_node: Start) -> None:
    job = start_node(0, {}, master_addr="192.0.2.7")
    assert job.wait() == 2
    assert "--master-addr is 192.0.2.7 and this is node 0, but that is not an address of host" in job.err


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_all_addresses_at_once_are_refused(start_node: Start, address: str) -> None:
    job = start_node(0, {}, master_addr=address)
    assert job.wait() == 2
    assert "stands for all addresses" in job.err


@pytest.fixture
def foreign_listener(free_port: int) -> Iterator[Callable[[bytes | None], None]]:
    """Some other program on the port: says something to whoever connects, or (None) nothing at all."""
    listener = socket.create_server((MASTER, free_port))
    connections: list[socket.socket] = []

    def serve(words: bytes | None) -> None:
        def accept() -> None:
            while True:
                try:
                    connections.append(listener.accept()[0])
                    if words is not None:
                        connections[-1].sendall(words)
                        if not words:
                            connections[-1].close()
                except OSError:
                    return

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        threads.append(thread)

    threads: list[threading.Thread] = []
    yield serve
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for connection in connections:
        connection.close()
    for thread in threads:
        thread.join()


@pytest.mark.usefixtures("foreign_listener")
def test_a_busy_port_is_named_and_a_free_one_suggested(start_node: Start, free_port: int) -> None:
    job = start_node(0, {})
    assert job.wait() == 2
    assert f"--master-port {free_port} was set, but another process of this machine already listens" in job.err
    suggested = int(job.err.partition("set --master-port ")[2].split()[0])
    with socket.create_server((MASTER, suggested)):
        pass


@pytest.mark.parametrize(
    "words",
    [b"SSH-2.0-OpenSSH_9.6\r\n", b"[1]\n", b"x" * 300_000, b'{"type":"beat"}\n'],
    ids=["ssh", "list", "long line", "beat"],
)
def test_a_program_that_is_not_stormo_on_the_port_is_recognised_at_once(
    start_node: Start, foreign_listener: Callable[[bytes | None], None], free_port: int, words: bytes
) -> None:
    foreign_listener(words)
    job = start_node(1, {})
    assert job.wait(15) == 2
    assert f"something other than stormo listens on {MASTER}:{free_port}" in job.err


@pytest.mark.parametrize(
    ("words", "expected", "timeout_s"),
    [(None, "does not answer as stormo does", 1.5), (b"", "closes the connection at once", 1.0)],
)
def test_a_program_that_says_nothing_on_the_port_is_named_after_the_timeout(
    start_node: Start,
    foreign_listener: Callable[[bytes | None], None],
    words: bytes | None,
    expected: str,
    timeout_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "_ATTEMPT_TIMEOUT_S", 0.5)
    foreign_listener(words)
    job = start_node(1, {}, timeout_s=timeout_s)
    assert job.wait() == 1
    assert expected in job.err


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_waiting_for_nodes_can_be_stopped(start_node: Start, number: signal.Signals, expected: int) -> None:
    job = start_node(0, {})
    job.wait_for(lambda job: is_listening(job.process.pid))
    job.process.send_signal(number)
    assert job.wait() == expected
    assert job.err == f"stormo: stopped by {number.name} before all nodes had joined.\n"


def test_nothing_listens_on_all_addresses_and_garbage_from_outside_is_ignored(
    start_node: Start, free_port: int
) -> None:
    scenario = {"*": [["stop on", "SIGTERM"], ["wait for stop"], ["exit", 75]]}
    first = start_node(0, scenario)
    first.wait_for(lambda job: is_listening(job.process.pid))
    garbage = (b"\xff\xfe\n", b"[" * 100_000 + b"\n", b"x" * 300_000, b'{"type":"hello"}\n'[:-1], b"{}\n")
    for words in garbage:
        with socket.create_connection((MASTER, free_port)) as stranger:
            stranger.sendall(words)
    jobs = [first, start_node(1, scenario)]
    for job in jobs:
        job.wait_until_ready(1)
    with socket.create_connection((MASTER, free_port)) as stranger:
        stranger.sendall(b'{"type":"failure","kind":"exception"}\n')
    addresses = [address for job in jobs for address in listening_addresses(job.process.pid)]
    assert addresses == [MASTER]
    assert listening_addresses(jobs[0].worker_pid(0)) == [MASTER]
    for job in jobs:
        job.process.terminate()
    assert [job.wait() for job in jobs] == [75, 75]


def listening_addresses(pid: int) -> list[str]:
    """The IPv4 addresses a process listens on, from the kernel's tables."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(socket.inet_ntoa(bytes.fromhex(fields[1].split(":")[0])[::-1]))
    return found


def is_listening(pid: int) -> bool:
    try:
        return bool(listening_addresses(pid))
    except OSError:
        return False


def test_the_command_for_another_node_is_the_same_but_for_its_id() -> None:
    command = ["/usr/bin/python3", "-P", "-m", "stormo", "train", "my task.py", "--node-id", "0", "--num-nodes", "2"]
    assert command_for(command, 1) == "stormo train 'my task.py' --node-id 1 --num-nodes 2"
    assert command_for(["stormo", "train", "--node-id=0"], 1) == "stormo train --node-id=1"
    assert command_for(["stormo", "train"], 1) == "stormo train --node-id 1"


@pytest.fixture
def on_two_machines(start_program: Start) -> Start:
    """Runs a job on hosts n1 and n2 that live in namespaces of their own, and says how both agents ended."""
    if subprocess.run(["unshare", "-rnu", "ip", "link"], capture_output=True, check=False).returncode != 0:
        pytest.skip("network namespaces cannot be made here")

    def run(scenario: dict[str, Any], *, cut: bool, **agent: Any) -> Any:
        request = {"cut": cut, "agent": {"command": worker_command(scenario), **agent}}
        program = ["unshare", "-rnu", sys.executable, str(HERE / "two_machines.py"), json.dumps(request)]
        job = start_program(program)
        assert job.wait(60) == 0, job.err
        return json.loads(job.out)

    return run


@pytest.mark.system
def test_a_failure_names_the_machine_it_happened_on(on_two_machines: Start) -> None:
    endings = on_two_machines({"1": [["sleep", 0.5], ["raise", "boom"]], "0": FOREVER}, cut=False)
    for ending in endings:
        assert ending["code"] == 1
        assert ending["err"].startswith("stormo: rank 1 on host n2 failed: ValueError: boom\n")


@pytest.mark.system
def test_a_machine_that_leaves_the_network_is_lost(on_two_machines: Start) -> None:
    # The limit of the heartbeat is out of the way: the kernel must notice.
    timeouts = {"channel": {"stalled_after_s": 60.0, "lost_after_s": 4.0}}
    endings = on_two_machines({"*": FOREVER}, cut=True, timeouts=timeouts)
    for ending, other in zip(endings, ("node 1 on host n2", "node 0 on host n1"), strict=True):
        assert ending["code"] == 1
        assert ending["err"].startswith(f"stormo: {other} is lost: its machine has not answered for 4 s")
