"""The ranks of mpirun train and fail as one job, on one host and on two."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.conftest import Need
from tests.system.hosts import Host, process_of_rank, wait_until
from tests.system.runs import ENDS_WITHIN_S, SLOW, Digests, Train, digests_of
from tests.system.ssh import Ssh

MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2")


@pytest.fixture(autouse=True, scope="module")
def _mpirun(need: Need) -> None:
    need("mpirun", "openmpi-bin")


def test_two_ranks_train_to_the_same_bits_as_two_local_workers(
    hosts: tuple[Host, Host], train: Train, local_digests: Callable[[int], Digests]
) -> None:
    job = hosts[0].start(*MPIRUN, *train())
    assert job.wait() == 0, job.err
    assert job.err == ""
    assert digests_of(train.folder) == local_digests(2)


def test_a_rank_that_is_killed_ends_the_job(hosts: tuple[Host, Host], train: Train) -> None:
    # One that raises is looked at in test_script.py.
    job = hosts[0].start(*MPIRUN, *train(*SLOW))
    # mpirun gives its ranks a terminal of its own, so their output is drawn and not made of plain lines.
    wait_until(train.first_epoch_is_saved, 120.0, lambda: job.err)
    os.kill(process_of_rank(hosts[0], 1), signal.SIGKILL)
    assert job.wait(ENDS_WITHIN_S) != 0
    assert "Traceback" not in job.err


@pytest.fixture
def told_by_ssh(ssh: Ssh, tmp_path: Path) -> dict[str, str]:
    """What makes each mpirun reach the other host as this user may."""
    program = tmp_path / "ssh"
    program.write_text(f'#!/bin/sh\nexec {ssh.client} "$@"\n')
    program.chmod(0o755)
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**as_root, "OMPI_MCA_plm_rsh_agent": str(program), "HYDRA_LAUNCHER_EXEC": str(program)}


ONE_ON_EACH = {
    "mpirun": ("--host", "n1:1,n2:1", "-n", "2", "--map-by", "ppr:1:node", "-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS"),
    "mpiexec.hydra": ("-hosts", "n1:1,n2:1", "-n", "2", "-ppn", "1"),
}


@pytest.mark.parametrize(("program", "package"), [("mpirun", "openmpi-bin"), ("mpiexec.hydra", "mpich")])
def test_ranks_on_two_hosts_train_to_the_same_bits_as_two_local_workers(
    program: str,
    package: str,
    hosts: tuple[Host, Host],
    need: Need,
    told_by_ssh: dict[str, str],
    train: Train,
    local_digests: Callable[[int], Digests],
) -> None:
    need(program, package)
    told = {**told_by_ssh, "PYTHONPATH": str(Path.cwd())}
    job = hosts[0].start(program, *ONE_ON_EACH[program], *train("--master-addr", "10.99.0.1"), **told)
    assert job.wait() == 0, job.err
    assert "2 = 2 nodes × 1 CPU process (started by mpi" in job.out
    assert digests_of(train.folder) == local_digests(2)


def test_flags_that_contradict_mpirun_are_refused(hosts: tuple[Host, Host], train: Train) -> None:
    job = hosts[0].start(*MPIRUN, *train("--num-gpus", "4"))
    assert job.wait() == 2
    assert job.first_line.startswith("stormo: --num-gpus 4 was set, but mpirun started 2 ranks on this node; drop")
