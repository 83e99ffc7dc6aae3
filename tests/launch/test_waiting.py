"""Workers that are started before it is known whether they will be needed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from stormo.launch import Node, run_node
from stormo.launch.waiting import WaitingWorkers

# Says in a file, once it is let go, who it is; and whether it had to wait.
_WORKER = """
import os, pathlib, sys
from stormo.launch import waiting
waits = waiting.starts_ahead(os.environ)
if waits:
    waiting.wait_until_needed(os.environ, load=lambda: None)
name = os.environ["RANK"] + "-of-" + os.environ["WORLD_SIZE"]
pathlib.Path(sys.argv[1], name).write_text("waited" if waits else "at once")
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    return [sys.executable, "-c", _WORKER, str(tmp_path)]


@pytest.fixture
def ahead(command: list[str]) -> Iterator[WaitingWorkers]:
    with closing(WaitingWorkers(command, Node(num_workers=2), os.environ)) as workers:
        yield workers


def said(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_workers_that_fit_are_let_go(command: list[str], ahead: WaitingWorkers, tmp_path: Path) -> None:
    pids = [worker.pid for worker in ahead.workers]
    assert run_node(command, Node(num_workers=2), ahead=ahead) == 0
    assert said(tmp_path) == {"0-of-2": "waited", "1-of-2": "waited"}
    assert not any(map(is_there, pids))


def test_workers_that_do_not_fit_end_and_others_are_started(
    command: list[str], ahead: WaitingWorkers, tmp_path: Path
) -> None:
    pids = [worker.pid for worker in ahead.workers]
    assert run_node(command, Node(num_workers=1), ahead=ahead) == 0
    assert said(tmp_path) == {"0-of-1": "at once"}
    assert not any(map(is_there, pids))


def test_workers_that_nobody_needs_end_without_a_word(ahead: WaitingWorkers, tmp_path: Path) -> None:
    pids = [worker.pid for worker in ahead.workers]
    assert all(map(is_there, pids))
    ahead.close()
    assert not any(map(is_there, pids))
    assert said(tmp_path) == {}


def test_a_worker_that_died_while_it_waited_is_named(
    command: list[str], ahead: WaitingWorkers, capfd: pytest.CaptureFixture[str]
) -> None:
    for worker in ahead.workers:
        worker.kill()
    assert run_node(command, Node(num_workers=2), ahead=ahead) == 1
    assert "was killed by SIGKILL (signal 9)" in capfd.readouterr().err
