"""Workers that are started again: a worker dies, nodes come and go, by stormo's own agent and by torchrun."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.system.hosts import Host, Job, process_of_rank, wait_until
from tests.system.runs import ENDS_WITHIN_S, HERE, PYTHON, RUN_NAME, STORMO, Digests, Train, digests_of

Hosts = tuple[Host, Host]
Three = tuple[Host, Host, Host]
BATCH = ("--global-batch-size", "64", "--base-lr", "0.02", "--warmup-from", "0.5")  # what two workers have by default
HELD = str(HERE / "held_task.py")
QUICK = (PYTHON, str(HERE / "quick_nodes.py"))
FINDS_TASK = {"PYTHONPATH": str(Path.cwd())}


@pytest.fixture(scope="module")
def third(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """The host n3 on the switch of the other two."""
    names = "127.0.0.1 localhost\n10.99.0.3 n3\n::ffff:10.99.0.3 n3\n"
    host = Host(hosts[0].switch, "n3", "10.99.0.3", names, tmp_path_factory.mktemp("third") / "n3")
    yield host
    host.close()


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """A file that slows the training down while it is there, so that nothing is over before it was looked at."""
    file = tmp_path / "hold"
    file.touch()
    return file


def held(train: Train, hold: Path, *options: str) -> list[str]:
    """The words after `stormo train`, of a training that saves every step."""
    return [HELD, *train.arguments(*options, "--checkpoint-every", "1", "--task.hold", str(hold))[1:]]


def start_node(host: Host, train: Train, hold: Path, meet: str, nodes: str) -> Job:
    flags = ("--num-nodes", nodes, "--num-gpus", "1", "--master-addr", meet, "--master-port", "29500")
    return host.start(*QUICK, "train", *held(train, hold, *flags, *BATCH), **FINDS_TASK)


def is_training(run: Path) -> Callable[[], bool]:
    """Tells whether a checkpoint has been published since now."""

    def newest() -> list[str]:
        return sorted(path.name for path in (run / "checkpoints").glob("step-*"))[-1:]

    before = newest()
    return lambda: newest() > before


def test_a_worker_that_was_killed_is_started_again_and_the_training_ends_with_the_same_bits(
    hosts: Hosts, train: Train, hold: Path, local_digests: Callable[[int], Digests]
) -> None:
    host = hosts[0]
    words = held(train, hold, "--num-gpus", "2", "--max-restarts", "1")
    job = host.start(STORMO, "train", *words, **FINDS_TASK)
    wait_until((train.folder / RUN_NAME / "checkpoints" / "step-00000002").is_dir, ENDS_WITHIN_S, lambda: job.err)
    assert [listener for listener in host.listeners() if not listener.is_loopback] == []
    os.kill(process_of_rank(host, 1), signal.SIGKILL)
    hold.unlink()
    assert job.wait() == 0, job.err
    assert job.err.splitlines() == [
        "stormo: rank 1 on host n1 ended without a word (it was killed, or crashed)",
        "stormo: restart 1 of 1: going on",
    ]
    assert digests_of(train.folder) == local_digests(2)


def test_nodes_join_die_and_leave_in_the_middle_and_no_sample_is_lost_or_repeated(
    hosts: Hosts, third: Host, train: Train, hold: Path, local_digests: Callable[[int], Digests]
) -> None:
    jobs = {host.name: start_node(host, train, hold, "10.99.0.3", "1:3") for host in (hosts[1], third)}
    jobs["n2"].wait_for("2 = 2 nodes × 1 CPU process")  # the first address is node 0
    jobs["n1"] = start_node(hosts[0], train, hold, "10.99.0.3", "1:3")
    jobs["n1"].wait_for("3 = 3 nodes × 1 CPU process")
    wait_until(is_training(train.folder / RUN_NAME), ENDS_WITHIN_S, "no step was made")
    jobs["n1"].process.kill()
    jobs["n2"].wait_for("restart 1 of 3: going on with 2 nodes, 2 workers")
    wait_until(is_training(train.folder / RUN_NAME), ENDS_WITHIN_S, "no step was made")
    jobs["n2"].process.send_signal(signal.SIGTERM)
    assert jobs["n2"].wait(ENDS_WITHIN_S) == 75
    hold.unlink()
    assert jobs["n3"].wait() == 0
    lost = "stormo: rank 0 on host n1 ended without a word (it was killed, or crashed)\n"
    grown = "stormo: a node comes: going on with 3 nodes, 3 workers\n"
    shrunk = "stormo: restart 1 of 3: going on with 2 nodes, 2 workers\n"
    leaves = "stormo: this node leaves the training; where enough others are left, they go on\n"
    left = "stormo: a node leaves: going on with 1 node, 1 worker\n"
    early = (
        "stormo: a node comes: going on with 2 nodes, 2 workers\n"  # where one of the first two had to wait for nobody
    )
    assert {name: job.err.removeprefix(early) for name, job in jobs.items()} == {
        "n1": "",
        "n2": grown + lost + shrunk + leaves,  # rank 1 speaks for rank 0
        "n3": grown + shrunk + left,
    }
    done, alone = digests_of(train.folder), local_digests(2)
    assert (done.sample_order, done.num_steps) == (alone.sample_order, alone.num_steps)


def test_torchrun_behaves_the_same_and_never_begins_a_second_run(
    hosts: Hosts, train: Train, hold: Path, local_digests: Callable[[int], Digests]
) -> None:
    quick = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=5"
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "10.99.0.1:29500", "--rdzv-id", "a", "--rdzv-conf", quick)
    torchrun = (PYTHON, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1", *meeting)
    words = held(train, hold, *BATCH)
    named = words.index("--run-name")
    command = (*torchrun, "--max-restarts", "1", "-m", "stormo", "train", *words[:named], *words[named + 2 :])
    # Without it, torch tells a node that comes nothing of those that stay, and all wait for one another.
    fresh = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **FINDS_TASK}
    stays = hosts[0].start(*command, **fresh)
    stays.wait_for("1 = 1 node × 1 CPU process")
    leaves = hosts[1].start(*command, **fresh)
    stays.wait_for("2 = 2 nodes × 1 CPU process")
    (run,) = train.folder.iterdir()
    wait_until(is_training(run), ENDS_WITHIN_S, "no step was made")
    leaves.process.send_signal(signal.SIGTERM)
    leaves.wait(ENDS_WITHIN_S)
    hold.unlink()
    assert stays.wait() == 0, stays.err
    assert list(train.folder.iterdir()) == [run]
    run.rename(run.with_name(RUN_NAME))
    done, alone = digests_of(train.folder), local_digests(2)
    assert (done.sample_order, done.num_steps) == (alone.sample_order, alone.num_steps)
