"""Two hosts, a Slurm cluster on them, and the runs that all launchers are compared with.

What is missing is installed where that is possible; otherwise the tests are skipped, or fail where CI promises it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import programs
from tests.system import hosts as machines
from tests.system.hosts import Host, wait_until
from tests.system.runs import Digests, Train, digests_of
from tests.system.slurm import Cluster
from tests.system.ssh import Ssh

Need = Callable[..., None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.system)


@pytest.fixture(scope="session")
def need() -> Need:
    """Makes sure of a command by installing its Debian packages; skips the test if that cannot be done."""
    updated: list[bool] = []

    def need(command: str, *packages: str) -> None:
        if shutil.which(command):
            return
        apt_get = shutil.which("apt-get")
        if apt_get is None or os.geteuid() != 0:
            pytest.skip(f"needs {command}: it is not installed, and only root on Debian could do that here")
        environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        install = [apt_get, "install", "-y", "-qq", "--no-install-recommends", *packages]
        for words in ([] if updated else [[apt_get, "update", "-qq"]]) + [install]:
            done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                reason = f"needs {command}: {' '.join(words)} failed: {done.stderr.strip()[-500:]}"
                _skip_or_fail(reason)
        updated.append(True)

    return need


def _skip_or_fail(reason: str) -> None:
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def hosts(need: Need, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    """The hosts n1 and n2 on one switch. As Debian installs them, the name of each leads to loopback on itself."""
    need("ip", "iproute2")
    why_not = machines.why_not()
    if why_not is not None:
        pytest.skip(f"needs network namespaces: {why_not}")
    folder = tmp_path_factory.mktemp("hosts")
    both = {"n1": "10.99.0.1", "n2": "10.99.0.2"}
    switch = machines.Switch()
    made: list[Host] = []
    try:
        for name, address in both.items():
            names = both | {name: "127.0.1.1", f"{name}-net": address}
            made.append(Host(switch, name, address, hosts_file(names), folder / name))
        yield made[0], made[1]
    finally:
        for host in made:
            host.close()
        switch.close()


def hosts_file(names: dict[str, str]) -> str:
    lines = [f"{address} {name}" for name, address in {"localhost": "127.0.0.1", **names}.items()]
    # torch looks up the mapped form of an address for its messages; without it, every rank would complain.
    return "\n".join([*lines, *(f"::ffff:{line}" for line in lines)]) + "\n"


@pytest.fixture(autouse=True)
def _nothing_is_left(hosts: tuple[Host, Host]) -> Iterator[None]:
    """However a job ended: no process, no listening port and nothing in shared memory may outlive it for long."""
    yield
    try:
        wait_until(lambda: not any(host.leftovers() for host in hosts), 30.0, lambda: _leftovers(hosts))
    finally:
        for host in hosts:
            host.end_jobs()


def _leftovers(hosts: tuple[Host, Host]) -> str:
    return "left behind: " + "; ".join(f"on {host.name}: {host.leftovers()}" for host in hosts)


@pytest.fixture(scope="session")
def cluster(hosts: tuple[Host, Host], need: Need, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """Slurm on both hosts, which end it when they are closed."""
    need("slurmctld", "slurm-wlm", "munge")
    return Cluster(hosts, tmp_path_factory.mktemp("slurm") / "cluster")


@pytest.fixture(scope="session")
def ssh(hosts: tuple[Host, ...], need: Need, tmp_path_factory: pytest.TempPathFactory) -> Ssh:
    """An ssh server on every host, which ends it when it is closed."""
    need("sshd", "openssh-server", "openssh-client")
    return Ssh(hosts, tmp_path_factory.mktemp("ssh"))


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """The command line of a small training, and the folder of its runs."""
    return Train(folder=tmp_path / "runs")


@pytest.fixture(scope="session")
def local_digests(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Digests]:
    """What so many workers on this machine come to; each number of workers is trained once."""
    known: dict[int, Digests] = {}

    def digests(num_workers: int) -> Digests:
        if num_workers not in known:
            train = Train(folder=tmp_path_factory.mktemp("local"))
            words = ["-m", "stormo", "train", *train.arguments("--num-gpus", str(num_workers))]
            done = programs.run(words, train.folder, num_workers)
            assert (done.returncode, done.stderr) == (0, "")
            known[num_workers] = digests_of(train.folder)
        return known[num_workers]

    return digests
