"""A rank's failure, end or death reaches its agent, or the other ranks where there is none."""

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

from stormo.launch.environments.local import Node, environment
from stormo.launch.failure_reporter import NoReporter, open_failure_reporter
from stormo.launch.json_socket import JsonSocket
from stormo.launch.rank_info import alone

HERE = Path(__file__).parent
StartWorker = Callable[..., tuple[Any, JsonSocket]]


@pytest.fixture
def start_worker(start_program: Callable[..., Any]) -> Iterator[StartWorker]:
    """Starts a worker whose agent is this test."""
    links: list[JsonSocket] = []

    def start(*actions: list[Any]) -> tuple[Any, JsonSocket]:
        own, theirs = socket.socketpair()
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            told = environment(
                Node(num_workers=2),
                1,
                environ={},
                store_addr="127.0.0.1",
                store_port=12345,
                script_port=23456,
                channel_fd=theirs.fileno(),
                store_fd=None,
                num_cores=2,
            )
            command = [sys.executable, str(HERE / "worker_program.py"), json.dumps({"1": actions})]
            job = start_program(command, pass_fds=(theirs.fileno(),), **told)
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


def test_a_worker_gives_a_sign_of_life_at_once_and_again_and_says_goodbye(start_worker: StartWorker) -> None:
    job, link = start_worker(["sleep", 2.5])
    events = [message["event"] for message in messages_until(link, lambda received: False)]
    assert events[0] == "alive"
    assert events.count("alive") >= 3
    assert events[-1] == "bye"
    assert job.wait() == 0


def test_a_failure_travels_with_its_traceback_and_the_worker_itself_prints_nothing(start_worker: StartWorker) -> None:
    job, link = start_worker(["raise", "boom"])
    failure = messages_until(link, lambda received: False)[-1]
    assert (failure["event"], failure["kind"], failure["secondary"]) == ("failure", "exception", False)
    assert failure["what"] == "failed: ValueError: boom"
    assert "Traceback" in failure["details"]
    assert job.wait() == 1
    assert job.err == ""


def test_a_worker_ends_when_its_line_to_the_agent_is_cut(start_worker: StartWorker) -> None:
    job, link = start_worker(["sleep", 60])
    messages_until(link, bool)
    link.close()
    assert job.wait(10) != 0


def test_a_forked_helper_does_not_keep_the_line_open(start_worker: StartWorker) -> None:
    job, link = start_worker(["forked helper"], ["kill", 9])
    messages_until(link, lambda received: False)
    assert link.closed
    job.wait()
    os.kill(int(job.out.split()[1]), 9)


def test_a_process_that_is_the_whole_job_needs_no_line() -> None:
    line = open_failure_reporter(alone())
    assert isinstance(line, NoReporter)
    assert not line.shows_failures
    line.alive(3)
    line.report_failure(ValueError("boom"), secondary=False)
    line.close()


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
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": world_size,
                "LOCAL_WORLD_SIZE": world_size,
                "GROUP_RANK": 0,
                "GROUP_WORLD_SIZE": 1,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": 29500,
                "STORMO_TEST_STORE": tmp_path / "store",
                **{name: value[rank] if isinstance(value, list) else value for name, value in environ.items()},
            }
            command = [sys.executable, str(HERE / "worker_program.py"), json.dumps(scenario)]
            jobs.append(start_program(command, **{name: str(value) for name, value in variables.items()}))
        return jobs

    return start


def all_text(jobs: list[Any]) -> str:
    return "".join(job.err for job in jobs)


def wait_until_ready(jobs: list[Any]) -> None:
    for job in jobs:
        job.wait_until_ready(1)


def test_ranks_that_end_in_order_say_nothing(start_ranks: StartRanks) -> None:
    jobs = start_ranks({"1": [["sleep", 0.5]], "*": []})
    assert [job.wait() for job in jobs] == [0, 0, 0]
    assert all_text(jobs) == ""


@pytest.mark.parametrize(("late", "late_s"), [(0, 1.0), (2, 6.5)])  # rank 0 waits 5 s for the others, then goes
def test_a_rank_may_end_in_order_long_before_the_others(start_ranks: StartRanks, late: int, late_s: float) -> None:
    jobs = start_ranks({str(late): [["sleep", late_s]], "*": [["exit", 0]]})
    assert [job.wait() for job in jobs] == [0, 0, 0]
    assert all_text(jobs) == ""


@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_is_shown_once_and_ends_all_ranks(start_ranks: StartRanks, failing: int) -> None:
    jobs = start_ranks({str(failing): [["out", "ready"], ["sleep", 0.5], ["raise", "boom"]], "*": FOREVER})
    wait_until_ready(jobs)
    assert [job.wait() for job in jobs] == [1, 1, 1]
    assert jobs[failing].err.startswith(f"stormo: rank {failing} on host ")
    assert jobs[failing].err.splitlines()[0].endswith(" failed: ValueError: boom")
    assert "Traceback" in jobs[failing].err
    assert [job.err for job in jobs if job is not jobs[failing]] == ["", ""]


@pytest.mark.parametrize(("killed", "speaker"), [(0, 1), (2, 0)])
def test_a_killed_rank_is_named_once_by_another(start_ranks: StartRanks, killed: int, speaker: int) -> None:
    jobs = start_ranks({"*": FOREVER})
    wait_until_ready(jobs)
    jobs[killed].process.kill()
    survivors = [job for job in jobs if job is not jobs[killed]]
    assert [job.wait() for job in survivors] == [1, 1]
    assert jobs[speaker].err.startswith(f"stormo: rank {killed} on host ")
    assert "was killed by SIGKILL (signal 9); the kernel's out-of-memory killer may have" in jobs[speaker].err
    assert all_text(jobs) == jobs[speaker].err


@pytest.mark.parametrize("late", [0, 1])
def test_the_rank_that_blocks_the_others_is_named_and_not_those_that_waited(start_ranks: StartRanks, late: int) -> None:
    waits = [["sleep", 0.5], ["give up", 8.0, "world.sum in a.py line 3"]]
    jobs = start_ranks({str(late): [["step", 4], *FOREVER], "*": waits})
    assert [job.wait() for job in jobs] == [1, 1, 1]
    assert all_text(jobs).count("stormo: ") == 1
    assert f"stormo: rank {late} on host " in all_text(jobs)
    assert "did not come within 8 s to where rank " in all_text(jobs)
    assert f"(pid {jobs[late].process.pid}) is at step 4: it is " in all_text(jobs)


def test_a_killed_rank_is_noticed_although_a_forked_helper_shares_its_descriptors(start_ranks: StartRanks) -> None:
    jobs = start_ranks({"*": [["forked helper"], *FOREVER]})
    wait_until_ready(jobs)
    jobs[2].process.kill()
    assert [job.wait() for job in jobs[:2]] == [1, 1]
    for job in jobs:
        for line in job.out.splitlines():
            if line.startswith("helper "):
                os.kill(int(line.split()[1]), signal.SIGKILL)


@pytest.mark.parametrize("culprit", [0, 1])
def test_survivors_that_notice_first_leave_the_word_to_the_cause(start_ranks: StartRanks, culprit: int) -> None:
    jobs = start_ranks({str(culprit): [["sleep", 1.5], ["raise", "boom"]], "*": [["complain", "connection reset"]]})
    assert [job.wait() for job in jobs] == [1, 1, 1]
    assert "failed: ValueError: boom" in jobs[culprit].err
    assert "connection reset" not in all_text(jobs)


@pytest.mark.parametrize("complaining", [0, 1])
def test_a_complaint_without_a_cause_is_shown_after_all(start_ranks: StartRanks, complaining: int) -> None:
    jobs = start_ranks({str(complaining): [["complain", "connection reset"]], "*": [["sleep", 60]]})
    assert [job.wait() for job in jobs] == [1, 1, 1]
    assert all_text(jobs).count("stormo: ") == 1
    assert f"rank {complaining} on host" in all_text(jobs)
    assert "connection reset" in all_text(jobs)


@pytest.mark.parametrize("complaining", [0, 1])
def test_a_rank_that_ended_early_is_the_cause_of_a_complaint(start_ranks: StartRanks, complaining: int) -> None:
    complaint = [["sleep", 0.5], ["complain", "closed"]]
    jobs = start_ranks({"2": [["exit", 0]], "*": [["sleep", 60]], str(complaining): complaint})
    assert [job.wait() for job in jobs] == [1, 1, 0]
    assert all_text(jobs) == jobs[0].err
    assert jobs[0].err.count("stormo: ") == 1
    assert "rank 2 on host" in jobs[0].err
    assert "ended early with exit code 0" in jobs[0].err


@pytest.mark.parametrize("ranks", ["*", "1", "0"])
def test_a_setting_error_is_shown_once_whoever_has_it(start_ranks: StartRanks, ranks: str) -> None:
    setting = [["setting", "--lr 0 was set", "nothing would be learned", "set 0.1"]]
    jobs = start_ranks({"*": FOREVER, ranks: setting})
    assert [job.wait() for job in jobs] == [2, 2, 2]
    assert all_text(jobs) == "stormo: --lr 0 was set, but nothing would be learned; set 0.1.\n"


def test_a_failed_rank_that_does_not_end_by_itself_is_ended(start_ranks: StartRanks) -> None:
    jobs = start_ranks({"1": [["raise and linger", "boom"]], "*": FOREVER})
    assert [job.wait(20) for job in jobs] == [1, 1, 1]


def test_ranks_with_different_options_are_told(start_ranks: StartRanks) -> None:
    jobs = start_ranks({"*": FOREVER}, world_size=2, STORMO_TEST_LR=["0.1", "0.2"])
    assert [job.wait() for job in jobs] == [2, 2]
    assert all_text(jobs).count("stormo: ") == 1
    assert "--lr is 0.1 on rank 0" in jobs[0].err
    assert "and 0.2 on rank 1" in jobs[0].err


def test_a_rank_that_never_comes_is_named(start_ranks: StartRanks) -> None:
    jobs = start_ranks({"*": FOREVER}, WORLD_SIZE=4, LOCAL_WORLD_SIZE=4, STORMO_TEST_TIMEOUT_S=2)
    assert [job.wait() for job in jobs] == [1, 1, 1]
    assert "the job has 4 ranks, but rank 3 has not come to 127.0.0.1:" in jobs[0].err
    assert all_text(jobs).count("stormo: ") == 1


def test_a_stopped_rank_is_not_taken_for_a_lost_one(start_ranks: StartRanks) -> None:
    jobs = start_ranks({"*": [["stop on", "SIGTERM"], ["wait for stop"]]}, STORMO_TEST_LOST_AFTER_S=1.0)
    wait_until_ready(jobs)
    jobs[1].process.send_signal(signal.SIGSTOP)
    time.sleep(2.5)  # longer than a lost machine would get
    assert [job.process.poll() for job in jobs] == [None, None, None]
    jobs[1].process.send_signal(signal.SIGCONT)
    for job in jobs:
        job.process.terminate()
    assert [job.wait() for job in jobs] == [0, 0, 0]


def test_what_a_surviving_rank_had_printed_is_not_lost(start_ranks: StartRanks) -> None:
    jobs = start_ranks({"0": [["out", "ready"], ["unflushed out", "epoch 3 done"], ["sleep", 60]], "*": FOREVER})
    wait_until_ready(jobs)
    jobs[1].process.kill()
    assert jobs[0].wait() == 1
    assert "epoch 3 done" in jobs[0].out


@pytest.mark.parametrize("broken", [0, 1])
def test_a_channel_that_breaks_for_a_moment_still_tells_of_a_death(start_ranks: StartRanks, broken: int) -> None:
    jobs = start_ranks({"*": FOREVER, str(broken): [["break the channel", 3], *FOREVER]})
    wait_until_ready(jobs)
    jobs[2].process.kill()
    assert [job.wait() for job in jobs[:2]] == [1, 1]
    assert "rank 2 on host" in all_text(jobs)


def error_files(tmp_path: Path) -> list[str]:
    return [str(tmp_path / f"error-{rank}.json") for rank in range(3)]


def root_cause(files: list[str], exit_codes: list[int]) -> tuple[int, str]:
    """What torchrun would call the root cause of these ends, and what it shows of it."""
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file=files[rank])
        for rank, code in enumerate(exit_codes)
    }
    rank, failure = ChildFailedError("stormo", failures).get_first_failure()
    return rank, str(failure.message)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_torchrun_finds_the_root_cause_where_it_is(start_ranks: StartRanks, failing: int, tmp_path: Path) -> None:
    files = error_files(tmp_path)
    scenario = {str(failing): [["sleep", 0.5], ["raise", "boom"]], "*": FOREVER}
    jobs = start_ranks(scenario, TORCHELASTIC_ERROR_FILE=files)
    rank, message = root_cause(files, [job.wait() for job in jobs])
    assert rank == failing
    assert message.endswith("failed: ValueError: boom")


def test_torchrun_finds_a_killed_rank_to_be_the_root_cause(start_ranks: StartRanks, tmp_path: Path) -> None:
    files = error_files(tmp_path)
    jobs = start_ranks({"*": FOREVER}, TORCHELASTIC_ERROR_FILE=files)
    wait_until_ready(jobs)
    jobs[2].process.kill()
    assert root_cause(files, [job.wait() for job in jobs])[0] == 2
    survivor = json.loads(Path(files[0]).read_text())["message"]
    assert survivor.startswith("rank 2 on host ")  # for the report of a node that has only survivors
