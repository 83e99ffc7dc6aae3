"""`--launcher ssh` between real ssh servers: trains, fails, stops and ends as one job, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.system.hosts import Host, environment_of, wait_until
from tests.system.runs import ENDS_WITHIN_S, Digests, Train, digests_of, summary_of
from tests.system.ssh import Ssh

BOTH = ("--launcher", "ssh", "--hosts", "n[1-2]", "--num-gpus", "1")


def test_hosts_save_and_stop_when_the_command_is_killed_and_go_on_by_hand_to_the_same_bits(
    hosts: tuple[Host, Host], ssh: Ssh, train: Train, local_digests: Callable[[int], Digests]
) -> None:
    hold, slow = train.slowly()
    job = hosts[0].start(*train(*slow, *BOTH), STORMO_SSH=ssh.client, GLOO_SOCKET_IFNAME="eth0")
    job.wait_for("Epoch = 1:")
    # What the user has set here holds there too.
    told = [environment_of(pid) for pid in hosts[1].processes()]
    assert any(variables.get("GLOO_SOCKET_IFNAME") == "eth0" and "RANK" in variables for variables in told)
    (typed,) = [pid for pid, command in hosts[0].processes().items() if "--launcher ssh" in command]
    os.kill(typed, signal.SIGKILL)
    job.wait(ENDS_WITHIN_S)
    wait_until(lambda: not any(host.processes() for host in hosts), ENDS_WITHIN_S, "it went on without its user")
    assert job.err == ""
    assert summary_of(train.folder)["stopped_by"] == "signal"
    hold.unlink()
    shown = hosts[0].start(*train.resume(*BOTH, "--print-commands"))
    assert shown.wait() == 0, shown.err
    lines = shown.out.splitlines()
    assert lines[0::2] == ["# on n1", "# on n2"]
    jobs = [host.start("sh", "-c", line) for host, line in zip(hosts, lines[1::2], strict=True)]
    assert [job.wait() for job in jobs] == [0, 0], jobs[0].err
    assert jobs[0].out.count("Epoch = 3:") == 1
    assert digests_of(train.folder) == local_digests(2)


@pytest.mark.parametrize(
    ("names", "options", "culprit", "why"),
    [
        ("n1,10.99.0.9", "-o ConnectTimeout=1", "10.99.0.9", "connect to host 10.99.0.9"),  # nobody has that address
        ("n2", "-o PubkeyAuthentication=no", "n2", "Permission denied"),
    ],
)
def test_a_host_that_does_not_let_us_in_is_named(
    names: str, options: str, culprit: str, why: str, hosts: tuple[Host, Host], ssh: Ssh, train: Train
) -> None:
    job = hosts[0].start(*train("--launcher", "ssh", "--hosts", names), STORMO_SSH=f"{ssh.client} {options}")
    assert job.wait(ENDS_WITHIN_S) == 1
    assert len(job.err.splitlines()) == 1
    assert job.err.startswith(f"stormo: host {culprit} did not start its workers: ")
    assert why in job.err
    assert not train.folder.exists()
