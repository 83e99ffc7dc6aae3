"""The ranks of Open MPI's mpirun train and fail as one job."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.system.conftest import Need
from tests.system.hosts import Host, process_of_rank, wait_until
from tests.system.runs import ENDS_WITHIN_S, SLOW, Digests, Train, digests_of

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


def test_flags_that_contradict_mpirun_are_refused(hosts: tuple[Host, Host], train: Train) -> None:
    job = hosts[0].start(*MPIRUN, *train("--num-gpus", "4"))
    assert job.wait() == 2
    assert job.first_line.startswith("stormo: --num-gpus 4 was set, but mpirun started 2 ranks on this node; drop")
