"""`torchx run stormo.train` by TorchX's local scheduler and on a real Slurm cluster, where a failed job goes on."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.conftest import Need
from tests.system.hosts import Host, wait_until
from tests.system.runs import ENDS_WITHIN_S, PYTHON, RUN_NAME, Digests, Train, digests_of, summary_of
from tests.system.slurm import Cluster


class Backfilled(Cluster):
    """TorchX asks for a group of nodes for each replica, which only Slurm's backfill scheduler gives."""

    def _start(self) -> None:
        conf = self._folder / "slurm.conf"
        builtin, *_ = [line for line in conf.read_text().splitlines() if line.startswith("Scheduler")]
        assert builtin == "SchedulerType=sched/builtin"
        kept = [line for line in conf.read_text().splitlines() if not line.startswith("Scheduler")]
        own = ["SchedulerType=sched/backfill", "SchedulerParameters=bf_interval=1,sched_interval=1"]
        ports = ["SlurmctldPort=16817", "SlurmdPort=16818"]  # beside the other cluster of these hosts
        conf.write_text("\n".join([*own, *ports, *kept, ""]))
        super()._start()


@pytest.fixture(scope="module")
def cluster(hosts: tuple[Host, Host], need: Need, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    need("slurmctld", "slurm-wlm", "munge")
    return Backfilled(hosts, tmp_path_factory.mktemp("slurm") / "cluster")


def words(train: Train, folder: Path, component: str, *options: str) -> list[str]:
    """What a user types in a folder, with the environment of stormo activated."""
    task, *flags = train.arguments(*options)
    del flags[flags.index("--run-name") : flags.index("--run-name") + 2]
    path = f"PATH={Path(PYTHON).parent}:{os.environ['PATH']}"
    torchx = f"torchx run {component} --run_name {RUN_NAME} --task".split()
    return ["env", f"--chdir={folder}", path, *torchx, task, "--", *flags]


def test_two_replicas_of_the_local_scheduler_train_to_the_same_bits_as_two_local_workers(
    hosts: tuple[Host, Host], train: Train, local_digests: Callable[[int], Digests], tmp_path: Path
) -> None:
    job = hosts[0].start(*words(train, tmp_path, f"-s local_cwd -cfg log_dir={tmp_path}/logs stormo.train --nodes 2"))
    assert job.wait() == 0, job.err
    assert "stormo/0 workers        2 = 2 nodes × 1 CPU process" in job.err
    assert digests_of(train.folder) == local_digests(2)


def submit(cluster: Cluster, train: Train, folder: Path, component: str, *options: str) -> str:
    """Submit a training; the number of its job."""
    submitted = cluster.start(*words(train, folder, f"-s slurm stormo.train {component}", *options))
    submitted.wait(ENDS_WITHIN_S)
    job = re.match(r"slurm://torchx/(\d+)\n", submitted.out)
    assert job, submitted.err
    # What TorchX does next, asking for the state of the job, needs a data base of jobs, which this cluster has not.
    assert "sacct" in submitted.err.splitlines()[-1]
    return job[1]


def wait_for_end(cluster: Cluster, folder: Path) -> None:
    wait_until(lambda: not cluster.command("squeue", "--noheader"), ENDS_WITHIN_S, lambda: _logs(folder))


def test_a_job_of_two_nodes_trains_to_the_same_bits_as_two_local_workers(
    cluster: Cluster, train: Train, local_digests: Callable[[int], Digests], tmp_path: Path
) -> None:
    job = submit(cluster, train, tmp_path, "--nodes 2 --cpus 4")
    wait_for_end(cluster, tmp_path)
    assert digests_of(train.folder) == local_digests(2), _logs(tmp_path)
    said = (tmp_path / f"slurm-{job}-stormo-0.out").read_text()
    assert "2 = 2 nodes" in said
    assert said.count("Epoch = 3:") == 1


def test_a_job_that_was_stopped_is_started_again_by_slurm_and_goes_on(
    cluster: Cluster, train: Train, local_digests: Callable[[int], Digests], tmp_path: Path
) -> None:
    hold, slow = train.slowly()
    job = submit(cluster, train, tmp_path, "--max_retries 1", *slow)
    output = tmp_path / f"slurm-{job}-stormo-0.out"
    begun = lambda: output.exists() and "Epoch = 1:" in output.read_text()  # noqa: E731
    wait_until(begun, ENDS_WITHIN_S, lambda: _logs(tmp_path))
    cluster.command("scancel", "--signal=USR1", f"{job}.0")
    hold.unlink()
    wait_for_end(cluster, tmp_path)
    assert digests_of(train.folder) == local_digests(1), _logs(tmp_path)
    assert summary_of(train.folder)["num_resumes"] == 1


def _logs(folder: Path) -> str:
    return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in folder.glob("slurm-*"))
