"""A rank's failure, exit or death reaches its agent, or the other ranks where there is none."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from stormo.launch.environments.local import CHANNEL_FD, Node, environment
from stormo.launch.failure_reporter import PACKAGE, FailureReporter, is_installed, line_of, open_failure_reporter
from stormo.launch.json_socket import JsonSocket
from stormo.launch.rank_info import alone
from tests.launch import worker_program

StartWorker = Callable[..., tuple[Any, JsonSocket]]


@pytest.fixture
def start_worker(start_program: Callable[..., Any]) -> Iterator[StartWorker]:
    """Starts a worker whose agent is this test."""
    links: list[JsonSocket] = []

    def start(*actions: list[Any]) -> tuple[Any, JsonSocket]:
        own, theirs = socket.socketpair()
        with theirs:
            variables = environment(
                Node(num_workers=2),
                1,
                environ={},
                given={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "12345", CHANNEL_FD: str(theirs.fileno())},
                num_cores=2,
            )
            job = start_program(lambda: worker_program.main({"1": list(actions)}), (theirs.fileno(),), **variables)
        links.append(JsonSocket(own))
        return job, links[-1]

    yield start
    for link in links:
        link.close()


def messages_until(link: JsonSocket, condition: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    received: list[dict[str, Any]] = []
    deadline = time.monotonic() + 20.0
    while not condition(received) and not link.closed:
        assert time.monotonic() < deadline, received
        received += link.receive()
        time.sleep(0.01)
    return received


def test_a_worker_sends_heartbeats_and_leaves(start_worker: StartWorker) -> None:
    job, link = start_worker(["sleep", 1.2])
    events = [message["event"] for message in messages_until(link, lambda received: False)]
    assert events[0] == "alive"
    assert events.count("alive") >= 2
    assert events[-1] == "bye"
    assert job.wait() == 0


def test_a_failure_has_its_traceback_and_the_worker_prints_nothing(start_worker: StartWorker) -> None:
    job, link = start_worker(["raise", "boom"])
    failure = messages_until(link, lambda received: False)[-1]
    assert (failure["event"], failure["kind"], failure["secondary"]) == ("failure", "exception", False)
    assert failure["what"] == "failed: ValueError: boom"
    assert "Traceback" in failure["details"]
    assert job.wait() == 1
    assert job.err == ""


def test_a_worker_exits_when_its_agent_is_gone(start_worker: StartWorker) -> None:
    job, link = start_worker(["sleep", 60])
    messages_until(link, bool)
    link.close()
    assert job.wait(10) != 0


def test_a_forked_helper_does_not_keep_the_channel_open(start_worker: StartWorker) -> None:
    job, link = start_worker(["forked helper"], ["kill", 9])
    messages_until(link, lambda received: False)
    assert link.closed
    job.wait()
    os.kill(int(job.out.split()[1]), 9)


def test_the_line_of_the_script_is_found_behind_packages() -> None:
    functions: dict[str, Any] = {"here": lambda: sys._getframe(1)}
    called = "here"
    for file in (f"{PACKAGE}world.py", "/venv/site-packages/bars.py", "/home/me/train.py"):
        exec(compile(f"\n\ndef f(): return {called}()\n{called}_ = f", file, "exec"), functions)
        called += "_"
    frame = functions[called]()
    assert line_of(frame, is_installed) == "train.py line 3"
    assert line_of(frame, lambda file: file.startswith(PACKAGE)) == "bars.py line 3"
    assert line_of(frame, lambda file: True) == ""


def test_a_single_process_reports_to_nobody() -> None:
    reporter = open_failure_reporter(alone())
    assert type(reporter) is FailureReporter
    assert not reporter.shows_failures
    reporter.alive(3)
    reporter.report_failure(ValueError("boom"), secondary=False)
    reporter.close()


FOREVER = [["out", "ready"], ["sleep", 60]]
StartRanks = Callable[..., list[Any]]


@pytest.fixture
def start_ranks(start_program: Callable[..., Any], tmp_path: Path) -> StartRanks:
    """Starts every rank as torchrun would, but watches none of them."""

    def start(scenario: dict[str, Any], *, world_size: int = 3, **environ: Any) -> list[Any]:
        jobs = []
        for rank in range(world_size):
            variables = {
                "TORCHELASTIC_RUN_ID": "test",
                "TORCHELASTIC_ERROR_FILE": error_file(tmp_path, rank),
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": world_size,
                "LOCAL_WORLD_SIZE": world_size,
                "GROUP_RANK": 0,
                "GROUP_WORLD_SIZE": 1,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": 29500,
                "STORMO_TEST_STORE": tmp_path / "store",
                "STORMO_TEST_LINGER_S": 0.5,
                **{name: value[rank] if isinstance(value, list) else value for name, value in environ.items()},
            }
            texts = {name: str(value) for name, value in variables.items()}
            jobs.append(start_program(lambda: worker_program.main(scenario), **texts))
        return jobs

    return start


def error_file(folder: Path, rank: int) -> str:
    return str(folder / f"error-{rank}.json")


def torchrun_cause(folder: Path, exit_codes: list[int]) -> tuple[int, str]:
    """What torchrun would call the root cause of these exits, and what it shows of it."""
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file=error_file(folder, rank))
        for rank, code in enumerate(exit_codes)
    }
    rank, failure = ChildFailedError("stormo", failures).get_first_failure()
    return rank, str(failure.message)


def all_text(jobs: list[Any]) -> str:
    return "".join(job.err for job in jobs)


def wait_until_ready(jobs: list[Any]) -> None:
    for job in jobs:
        job.wait_until_ready(1)


@pytest.mark.parametrize("late", [0, 2])  # rank 0 waits a moment for the others, then exits
def test_a_rank_may_exit_cleanly_long_before_the_others(start_ranks: StartRanks, late: int) -> None:
    jobs = start_ranks({str(late): [["sleep", 1.0]], "*": [["exit", 0]]}, STORMO_TEST_LINGER_S=0.2)
    assert [job.wait() for job in jobs] == [0, 0, 0]
    assert all_text(jobs) == ""


@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_is_shown_once_and_ends_all_ranks(start_ranks: StartRanks, failing: int, tmp_path: Path) -> None:
    ready = [["out", "ready"], ["sleep", 0.2]]
    jobs = start_ranks({str(failing): [*ready, ["raise", "boom"]], "*": FOREVER})
    codes = [job.wait() for job in jobs]
    assert codes == [1, 1, 1]
    assert jobs[failing].err.startswith(f"stormo: rank {failing} on host ")
    assert jobs[failing].err.splitlines()[0].endswith(" failed: ValueError: boom")
    assert "Traceback" in jobs[failing].err
    assert [job.err for job in jobs if job is not jobs[failing]] == ["", ""]
    rank, message = torchrun_cause(tmp_path, codes)
    assert rank == failing
    assert message.endswith("failed: ValueError: boom")


@pytest.mark.parametrize(("killed", "speaker"), [(0, 1), (2, 0)])
def test_a_killed_rank_is_named_once_by_another(
    start_ranks: StartRanks, killed: int, speaker: int, tmp_path: Path
) -> None:
    # Forked helpers share the descriptors of their rank.
    actions = [["forked helper"], ["out", "ready"], ["unflushed out", "epoch 3 done"], ["sleep", 60]]
    jobs = start_ranks({"*": actions})
    wait_until_ready(jobs)
    jobs[killed].process.kill()
    survivors = [job for job in jobs if job is not jobs[killed]]
    assert [job.wait() for job in survivors] == [1, 1]
    for job in jobs:
        os.kill(int(job.out.split()[1]), signal.SIGKILL)
    assert jobs[speaker].err.startswith(f"stormo: rank {killed} on host ")
    assert "was killed by SIGKILL (signal 9); the kernel's out-of-memory killer may have" in jobs[speaker].err
    assert all_text(jobs) == jobs[speaker].err
    assert all("epoch 3 done" in job.out for job in survivors)
    assert torchrun_cause(tmp_path, [job.wait() for job in jobs])[0] == killed
    survivor = json.loads(Path(error_file(tmp_path, speaker)).read_text())["message"]
    assert survivor.startswith(f"rank {killed} on host ")  # for the report of a node that has only survivors


@pytest.mark.parametrize("late", [0, 1])
def test_the_rank_that_blocks_the_others_is_named(start_ranks: StartRanks, late: int, tmp_path: Path) -> None:
    file = str(tmp_path / "late")
    waits = [["wait for", file], ["give up", 8.0, "world.sum in a.py line 3"]]
    scenario = {str(late): [["step", 4], ["sleep", 0.3], ["touch", file], *FOREVER], "*": waits}
    jobs = start_ranks(scenario, STORMO_TEST_SETTLE_S=1.0, STORMO_TEST_LOST_AFTER_S=1.0)
    assert [job.wait() for job in jobs] == [1, 1, 1]
    assert all_text(jobs).count("stormo: ") == 1
    assert f"stormo: rank {late} on host " in all_text(jobs)
    assert "did not come within 8 s to where rank " in all_text(jobs)
    assert f"(pid {jobs[late].process.pid}) is at step 4: it is " in all_text(jobs)


@pytest.mark.parametrize("failing", [0, 1])
def test_survivors_that_notice_first_wait_for_the_cause(start_ranks: StartRanks, failing: int, tmp_path: Path) -> None:
    files = [str(tmp_path / f"complains-{rank}") for rank in range(3) if rank != failing]
    scenario: dict[str, Any] = {
        str(rank): [["touch", str(tmp_path / f"complains-{rank}")], ["complain", "connection reset"]]
        for rank in range(3)
    }
    scenario[str(failing)] = [*(["wait for", file] for file in files), ["sleep", 0.3], ["raise", "boom"]]
    jobs = start_ranks(scenario)
    assert [job.wait() for job in jobs] == [1, 1, 1]
    assert "failed: ValueError: boom" in jobs[failing].err
    assert "connection reset" not in all_text(jobs)


@pytest.mark.parametrize("complaining", [0, 1])
def test_a_complaint_without_a_cause_is_shown(start_ranks: StartRanks, complaining: int) -> None:
    scenario = {str(complaining): [["complain", "connection reset"]], "*": [["sleep", 60]]}
    jobs = start_ranks(scenario, STORMO_TEST_SETTLE_S=0.5)
    assert [job.wait() for job in jobs] == [1, 1, 1]
    assert all_text(jobs).count("stormo: ") == 1
    assert f"rank {complaining} on host" in all_text(jobs)
    assert "connection reset" in all_text(jobs)


@pytest.mark.parametrize("complaining", [0, 1])
def test_a_rank_that_exits_early_is_the_cause_of_a_complaint(
    start_ranks: StartRanks, complaining: int, tmp_path: Path
) -> None:
    file = str(tmp_path / "left")
    complaint = [["wait for", file], ["complain", "closed"]]
    scenario = {"2": [["leave"], ["touch", file]], "*": [["sleep", 60]], str(complaining): complaint}
    jobs = start_ranks(scenario, STORMO_TEST_SETTLE_S=1.0)
    assert [job.wait() for job in jobs] == [1, 1, 0]
    assert all_text(jobs) == jobs[0].err
    assert jobs[0].err.count("stormo: ") == 1
    assert "rank 2 on host" in jobs[0].err
    assert "ended early with exit code 0" in jobs[0].err


@pytest.mark.parametrize("ranks", ["*", "1"])
def test_a_setting_error_is_shown_once_whoever_has_it(start_ranks: StartRanks, ranks: str) -> None:
    setting = [["setting", "--lr 0 was set", "nothing would be learned", "set 0.1"]]
    jobs = start_ranks({"*": FOREVER, ranks: setting})
    assert [job.wait() for job in jobs] == [2, 2, 2]
    assert all_text(jobs) == "stormo: --lr 0 was set, but nothing would be learned; set 0.1.\n"


def test_a_failed_rank_that_does_not_exit_is_ended(start_ranks: StartRanks) -> None:
    jobs = start_ranks({"1": [["raise and linger", "boom"]], "*": FOREVER})
    assert [job.wait(20) for job in jobs] == [1, 1, 1]


def test_different_options_of_ranks_are_named(start_ranks: StartRanks) -> None:
    jobs = start_ranks({"*": FOREVER}, world_size=2, STORMO_TEST_LR=["0.1", "0.2"])
    assert [job.wait() for job in jobs] == [2, 2]
    assert all_text(jobs).count("stormo: ") == 1
    assert "--lr is 0.1 on rank 0" in jobs[0].err
    assert "and 0.2 on rank 1" in jobs[0].err


def test_a_rank_that_never_joins_is_named(start_ranks: StartRanks) -> None:
    variables = {"WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4, "STORMO_TEST_TIMEOUT_S": 2, "STORMO_TEST_LOST_AFTER_S": 1}
    jobs = start_ranks({"*": FOREVER}, **variables)
    assert [job.wait() for job in jobs] == [1, 1, 1]
    assert "the job has 4 ranks, but rank 3 has not joined at 127.0.0.1:" in jobs[0].err
    assert all_text(jobs).count("stormo: ") == 1


def test_a_stopped_rank_is_not_taken_for_a_lost_one(start_ranks: StartRanks) -> None:
    jobs = start_ranks({"*": [["stop on", "SIGTERM"], ["wait for stop"]]}, STORMO_TEST_LOST_AFTER_S=0.5)
    wait_until_ready(jobs)
    jobs[1].process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)  # longer than a lost machine would get
    assert [job.process.poll() for job in jobs] == [None, None, None]
    jobs[1].process.send_signal(signal.SIGCONT)
    for job in jobs:
        job.process.terminate()
    assert [job.wait() for job in jobs] == [0, 0, 0]


@pytest.mark.parametrize("broken", [0, 1])
def test_a_death_is_noticed_after_the_channel_was_broken(start_ranks: StartRanks, broken: int) -> None:
    jobs = start_ranks({"*": FOREVER, str(broken): [["break the channel", 3], *FOREVER]})
    wait_until_ready(jobs)
    jobs[2].process.kill()
    assert [job.wait() for job in jobs[:2]] == [1, 1]
    assert "rank 2 on host" in all_text(jobs)
