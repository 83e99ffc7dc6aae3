"""The workers of torchrun train and fail as one job, on one host and on two."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.system.hosts import Host
from tests.system.runs import ENDS_WITHIN_S, PYTHON, SLOW, Digests, Train, digests_of

TORCHRUN = (PYTHON, "-m", "torch.distributed.run")


def test_a_worker_on_each_of_two_hosts_train_to_the_same_bits_as_two_local_ones(
    hosts: tuple[Host, Host], train: Train, local_digests: Callable[[int], Digests]
) -> None:
    jobs = []
    for node_rank, host in enumerate(hosts):
        nodes = ("--nnodes", "2", "--node-rank", str(node_rank), "--master-addr", "n1", "--master-port", "29500")
        command = (*TORCHRUN, "--nproc-per-node", "1", *nodes, "-m", "stormo", "train", *train.arguments())
        jobs.append(host.start(*command))
    assert [job.wait() for job in jobs] == [0, 0], "".join(job.err for job in jobs)
    assert digests_of(train.folder) == local_digests(2)


def test_a_worker_that_raises_ends_the_job_and_is_named_first(hosts: tuple[Host, Host], train: Train) -> None:
    options = train.arguments(*SLOW, "--task.fail-rank", "1", "--task.at", "20")
    job = hosts[0].start(*TORCHRUN, "--nproc-per-node", "2", "-m", "stormo", "train", *options)
    job.wait_for("Epoch = 1:")
    assert job.wait(ENDS_WITHIN_S) == 1
    assert job.first_line == "stormo: rank 1 on host n1 failed: ValueError: boom"
    assert re.search(r"Root Cause.*?rank +: 1 .*?failed: ValueError: boom", job.err, re.DOTALL)
    assert 'raise ValueError("boom")' in job.err
