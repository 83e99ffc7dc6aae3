"""This process and others of this machine: when the command was typed, what the kernel shows of a process, who ends it.

The start of the command is the zero of every wall time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_STATES = {
    "R": "it is running",
    "S": "it is waiting for something (state S)",
    "D": "it is waiting for a disk or a device (state D)",
    "T": "it is stopped (SIGSTOP?)",
    "t": "it is stopped by a debugger",
    "Z": "it has ended",
}
_ENDS_WITHIN_S = 0.1
_EXIT_STATUS = 49  # its place in `process_stat`

STARTED = "STORMO_STARTED_UNIX_S"  # the agent's start, which its workers inherit


def process_start_unix_s() -> float:
    """When this command was typed: the agent's start, which workers inherit, or this process's own."""
    inherited = os.environ.get(STARTED)
    if inherited:
        return float(inherited)
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - (start_ticks(os.getpid()) or 0) / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def process_stat(pid: int) -> list[str]:
    """State, parent, process group and so on, as /proc/PID/stat lists them; empty if there is no such process."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return status.rpartition(")")[2].split()  # the name before it may hold blanks and brackets


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since the machine did; None if there is no such process."""
    fields = process_stat(pid)
    return int(fields[19]) if fields else None


def process_state(pid: int) -> str:
    """What a process is doing, in words."""
    fields = process_stat(pid)
    return _STATES.get(fields[0], f"its state is {fields[0]}") if fields else "its state is unknown"


def fatal_signal(pid: int) -> int | None:
    """The signal that ended a process that is about to be seen as ended; None where none did, or it was reaped."""
    deadline = time.monotonic() + _ENDS_WITHIN_S
    while (fields := process_stat(pid)) and fields[0] != "Z" and time.monotonic() < deadline:
        time.sleep(0.005)
    status = int(fields[_EXIT_STATUS]) if fields and fields[0] == "Z" else 0
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else None


def process_space() -> str:
    """Names the set of processes that can be seen from here: those of a host, or of one container on it."""
    try:
        return f"{os.uname().nodename} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return os.uname().nodename


def die_with_parent() -> None:
    """Have the kernel kill this process the moment its parent is gone, however that came about."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def own_command(verb: str) -> list[str]:
    """What starts a verb of this very stormo in another process; -P: without the current folder on its path."""
    return [sys.executable, "-P", "-m", "stormo", verb]


class SetUp:
    """The parts of a start, in seconds, one after the other."""

    def __init__(self) -> None:
        self.began_unix_s = process_start_unix_s()
        self.times_s: dict[str, float] = {}
        self._last_unix_s = self.began_unix_s

    def done(self, part: str) -> None:
        """A part has ended; the next begins."""
        now = time.time()
        self.times_s[part] = now - self._last_unix_s
        self._last_unix_s = now
