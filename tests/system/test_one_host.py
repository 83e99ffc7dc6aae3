"""One host: only loopback is listened on, and no way to end a run leaves anything behind (checked after every test)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.system.hosts import Host, Job, process_of_rank
from tests.system.runs import ENDS_WITHIN_S, RUN_NAME, SLOW, Train, summary_of

# Helper processes and shared memory too; those of a worker that is killed by itself are looked at in tests/launch.
STREAMED = ("--loader", "streamed", "--loader-workers", "1")
KILLED_WORKER = "stormo: rank 1 on host n1 was killed by SIGKILL (signal 9)\n"
CTRL_C = "stormo: stopping after this step; press Ctrl-C again to stop at once\n"


def send(number: signal.Signals) -> Callable[[Host, Job], None]:
    return lambda _, job: job.process.send_signal(number)  # to the agent, as a terminal and a scheduler do


def kill_worker(host: Host, _: Job) -> None:
    os.kill(process_of_rank(host, 1), signal.SIGKILL)


@pytest.mark.parametrize(
    ("end", "exit_code", "said", "loader"),
    [
        pytest.param(send(signal.SIGINT), 130, CTRL_C, (), id="Ctrl-C"),
        pytest.param(send(signal.SIGKILL), -9, "", STREAMED, id="SIGKILL of the agent"),
        pytest.param(kill_worker, 1, KILLED_WORKER, STREAMED, id="SIGKILL of a worker"),
    ],
)
def test_a_run_listens_on_loopback_only_and_ends_without_a_trace(
    hosts: tuple[Host, Host],
    train: Train,
    end: Callable[[Host, Job], None],
    exit_code: int,
    said: str,
    loader: tuple[str, ...],
) -> None:
    host, _ = hosts
    job = host.start(*train("--num-gpus", "2", *SLOW, *loader))
    job.wait_for("Epoch = 1:")
    listeners = host.listeners()
    assert len(listeners) == 2  # Gloo in both workers: the store is memory that they share
    assert [listener for listener in listeners if not listener.is_loopback] == []
    if loader:  # there is something to leave behind
        assert sum("multiprocessing.forkserver" in command for command in host.processes().values()) >= 4
        assert host.shared_memory() != []
    end(host, job)
    assert job.wait(ENDS_WITHIN_S) == exit_code
    assert job.err.startswith(said)
    assert said or job.err == ""
    assert "resource_tracker" not in job.err  # it removes what a killed worker shared, without a word
    if exit_code in (75, 130):
        summary = summary_of(train.folder)
        assert summary["stopped_by"] == "signal"
        assert (train.folder / RUN_NAME / "checkpoints" / f"step-{summary['steps']:08d}").is_dir()
