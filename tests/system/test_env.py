"""Ranks that are told torch's variables alone, as in the pods of a PyTorchJob, train as one job."""

from __future__ import annotations

from collections.abc import Callable

from tests.system.hosts import Host
from tests.system.runs import Digests, Train, digests_of


def test_one_rank_on_each_of_two_hosts_train_to_the_same_bits_as_two_local_workers(
    hosts: tuple[Host, Host], train: Train, local_digests: Callable[[int], Digests]
) -> None:
    told = {"WORLD_SIZE": "2", "MASTER_PORT": "23456", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    jobs = [
        host.start(*train(), **told, RANK=str(rank), MASTER_ADDR=address)
        for rank, (host, address) in enumerate(zip(hosts, ("localhost", "n1"), strict=True))
    ]
    assert [job.wait() for job in jobs] == [0, 0], "".join(job.err for job in jobs)
    assert "2 = 2 nodes × 1 CPU process" in jobs[0].out
    assert digests_of(train.folder) == local_digests(2)
