"""A user's own script with `stormo.World`: every launcher comes to the same bits, and failures end the whole job."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import programs
from tests.system.conftest import Need
from tests.system.hosts import Host, Job
from tests.system.runs import ENDS_WITHIN_S, HERE, PYTHON, STORMO
from tests.system.slurm import Cluster
from tests.system.test_mpi import MPIRUN
from tests.system.test_slurm import TWO_NODES

SCRIPT = str(HERE.parent / "script" / "training.py")
RUN = (STORMO, "run", SCRIPT, "--device", "cpu")
FAILS = ("--slow", "0.1", "--epochs", "1000", "--fail-rank", "1")


def digest_of(job: Job, *others: Job) -> str:
    """What the main worker says of its weights; nobody else says it."""
    codes = [each.wait() for each in (job, *others)]
    assert not any(codes), "\n".join(each.err for each in (job, *others))
    return digest_in(job.out)


def digest_in(out: str) -> str:
    found = re.findall(r"steps 8 of 2 workers: (\w{16})", out)
    assert len(found) == 1, out
    return str(found[0])


@pytest.fixture(scope="session")
def local_digest() -> str:
    """What two workers on this machine come to."""
    done = programs.run([SCRIPT], Path.cwd(), 2)
    assert done.returncode == 0, done.stderr
    return digest_in(done.stdout)


def test_mpirun(hosts: tuple[Host, Host], need: Need, local_digest: str) -> None:
    need("mpirun", "openmpi-bin")
    assert digest_of(hosts[0].start(*MPIRUN, PYTHON, SCRIPT)) == local_digest
    job = hosts[0].start(*MPIRUN, PYTHON, SCRIPT, *FAILS)
    job.wait_for("rank 1 has pid")
    assert job.wait(ENDS_WITHIN_S) == 1
    assert job.first_line == "stormo: rank 1 on host n1 failed: ValueError: boom"
    assert job.err.count("Traceback") == 1


def test_srun(cluster: Cluster, local_digest: str) -> None:
    # Also through the command, which then becomes the script.
    assert digest_of(cluster.start(*TWO_NODES, *RUN)) == local_digest
    job = cluster.start(*TWO_NODES, PYTHON, SCRIPT, *FAILS)
    job.wait_for("rank 1 has pid")
    assert job.wait(ENDS_WITHIN_S) == 1
    assert job.first_line == "stormo: rank 1 on host n2 failed: ValueError: boom"
    assert job.err.count("Traceback") == 1


def test_two_nodes_of_stormos_own(hosts: tuple[Host, Host], local_digest: str) -> None:
    start: Callable[[int, tuple[str, ...]], Job] = lambda node_id, flags: hosts[node_id].start(  # noqa: E731
        *(*RUN, "--num-gpus", "1", "--num-nodes", "2", "--node-id", str(node_id), "--master-addr", "10.99.0.1"),
        *("--", *flags),
    )
    first, second = (start(node_id, ()) for node_id in (0, 1))
    assert digest_of(first, second) == local_digest
    assert second.wait() == 0
    jobs = [start(node_id, FAILS) for node_id in (0, 1)]
    jobs[1].wait_for("rank 1 has pid")
    assert [job.wait(ENDS_WITHIN_S) for job in jobs] == [1, 1]
    assert {job.first_line for job in jobs} == {"stormo: rank 1 on host n2 failed: ValueError: boom"}
