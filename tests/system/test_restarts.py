"""Workers that are started again: by stormo on a fixed number of nodes, by torchrun also as nodes come and go."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.hosts import Host, process_of_rank, wait_until
from tests.system.runs import ENDS_WITHIN_S, HERE, PYTHON, RUN_NAME, STORMO, Digests, Train, digests_of

Hosts = tuple[Host, Host]
BATCH = ("--global-batch-size", "64", "--base-lr", "0.02", "--warmup-from", "0.5")  # what two workers have by default
HELD = str(HERE / "held_task.py")


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """A file that slows the training down while it is there, so that nothing is over before it was looked at."""
    file = tmp_path / "hold"
    file.touch()
    return file


def held(train: Train, hold: Path, *options: str) -> list[str]:
    """The words after `stormo train`, of a training that saves every step."""
    return [HELD, *train.arguments(*options, "--checkpoint-every", "1", "--task.hold", str(hold))[1:]]


def is_training(run: Path) -> Callable[[], bool]:
    """Tells whether a checkpoint has been published since now."""

    def newest() -> list[str]:
        return sorted(path.name for path in (run / "checkpoints").glob("step-*"))[-1:]

    before = newest()
    return lambda: newest() > before


def has_saved(train: Train, step: int) -> Callable[[], bool]:
    return (train.folder / RUN_NAME / "checkpoints" / f"step-{step:08d}").is_dir


def test_a_worker_that_was_killed_on_one_of_two_nodes_is_started_again_on_both(
    hosts: Hosts, train: Train, hold: Path, local_digests: Callable[[int], Digests]
) -> None:
    node = ("--num-nodes", "2", "--num-gpus", "1", "--master-addr", "10.99.0.1", "--max-restarts", "1", "--node-id")
    jobs = [host.start(STORMO, "train", *held(train, hold, *node, str(node_id))) for node_id, host in enumerate(hosts)]
    wait_until(has_saved(train, 2), ENDS_WITHIN_S, lambda: jobs[0].err)
    os.kill(process_of_rank(hosts[1], 1), signal.SIGKILL)
    hold.unlink()
    assert [job.wait() for job in jobs] == [0, 0], [job.err for job in jobs]
    for job in jobs:
        assert job.first_line == "stormo: rank 1 on host n2 was killed by SIGKILL (signal 9)"
        assert job.err.endswith("stormo: restart 1 of 1\n")
    assert digests_of(train.folder) == local_digests(2)


def test_torchrun_starts_a_killed_worker_again_and_the_training_ends_with_the_same_bits(
    hosts: Hosts, train: Train, hold: Path, local_digests: Callable[[int], Digests]
) -> None:
    torchrun = (PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1")
    job = hosts[0].start(*torchrun, "-m", "stormo", "train", *held(train, hold))
    wait_until(has_saved(train, 2), ENDS_WITHIN_S, lambda: job.err)
    os.kill(process_of_rank(hosts[0], 1), signal.SIGKILL)
    hold.unlink()
    assert job.wait() == 0, job.err
    assert digests_of(train.folder) == local_digests(2)


def test_nodes_come_and_go_under_torchrun_and_no_second_run_begins(
    hosts: Hosts, train: Train, hold: Path, local_digests: Callable[[int], Digests]
) -> None:
    quick = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=5"
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "10.99.0.1:29500", "--rdzv-id", "a", "--max-restarts", "1")
    words = held(train, hold, *BATCH)
    named = words.index("--run-name")
    words[named : named + 2] = []

    def torchrun(conf: str) -> list[str]:
        nodes = ("--nnodes", "1:2", "--nproc-per-node", "1", *meeting, "--rdzv-conf", conf)
        return [PYTHON, "-m", "torch.distributed.run", *nodes, "-m", "stormo", "train", *words]

    # Without it, torch tells a node that comes nothing of those that stay, and all wait for one another.
    fresh = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    stays = hosts[0].start(*torchrun(f"{quick},is_host=true"), **fresh)  # its name leads to loopback on itself
    stays.wait_for("1 = 1 node × 1 CPU process")
    leaves = hosts[1].start(*torchrun(quick), **fresh)
    stays.wait_for("2 = 2 nodes × 1 CPU process")
    (run,) = train.folder.glob("[!.]*")  # beside it lies the note of the launch
    wait_until(is_training(run), ENDS_WITHIN_S, "no step was made")
    leaves.process.send_signal(signal.SIGTERM)
    leaves.wait(ENDS_WITHIN_S)
    hold.unlink()
    assert stays.wait() == 0, stays.err
    assert list(train.folder.glob("[!.]*")) == [run]
    run.rename(run.with_name(RUN_NAME))
    done, alone = digests_of(train.folder), local_digests(2)
    assert (done.sample_order, done.num_steps) == (alone.sample_order, alone.num_steps)
