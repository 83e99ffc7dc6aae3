"""What the kernel shows of a process: its state, its start, and the signal that ended it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from stormo.system.process import fatal_signal, process_stat, process_state, start_ticks


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_a_stopped_process_is_said_to_be_stopped(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert process_state(child.pid) == "it is stopped (SIGSTOP?)"
    assert fatal_signal(child.pid) is None


def test_the_signal_that_ended_a_process_is_known_until_its_parent_has_asked(child: subprocess.Popen[bytes]) -> None:
    started = start_ticks(child.pid)
    assert started is not None
    assert started >= (start_ticks(os.getpid()) or 0)
    child.send_signal(signal.SIGUSR1)
    assert fatal_signal(child.pid) == signal.SIGUSR1
    child.wait()
    assert fatal_signal(child.pid) is None
    assert process_stat(child.pid) == []
    assert process_state(child.pid) == "its state is unknown"
    assert start_ticks(child.pid) is None


def test_a_process_that_ended_by_itself_was_ended_by_no_signal() -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert fatal_signal(process.pid) is None
