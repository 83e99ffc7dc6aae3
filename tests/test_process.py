"""What the kernel shows of a process: its state, its start, and the signal that ended it."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from stormo.system.process import allow_open_files, fatal_signal, process_stat, process_state, start_ticks


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


@pytest.mark.parametrize(
    ("limits", "raised_to", "too_low"),
    [
        ((1024, 4096), (1512, 4096), None),
        ((1024, -1), (1512, -1), None),
        ((4096, 4096), None, None),
        ((1024, 1100), (1100, 1100), 1100),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be(
    limits: tuple[int, int], raised_to: tuple[int, int] | None, too_low: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda what, new: raised.append(new))
    assert allow_open_files(1512) == too_low
    assert raised == ([] if raised_to is None else [raised_to])
