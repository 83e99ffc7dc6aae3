"""A worker's line to its agent, seen from the agent's end; and which line fits which place."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stormo.launch.lifeline import NoLifeline, open_lifeline
from stormo.launch.link import Link
from stormo.launch.local import Node, environment
from stormo.launch.place import alone

HERE = Path(__file__).parent
StartWorker = Callable[..., tuple[Any, Link]]


@pytest.fixture
def start_worker(start_program: Callable[..., Any]) -> Iterator[StartWorker]:
    """Starts a worker whose agent is this test."""
    links: list[Link] = []

    def start(*actions: list[Any]) -> tuple[Any, Link]:
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
        links.append(Link(own))
        return job, links[-1]

    yield start
    for link in links:
        link.close()


def messages_until(link: Link, condition: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
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
    line = open_lifeline(alone())
    assert isinstance(line, NoLifeline)
    assert not line.shows_failures
    line.alive(3)
    line.report_failure(ValueError("boom"), secondary=False)
    line.close()
