"""This process and others of this machine: when the command was typed, what the kernel shows of a process.

Every wall time counts from the start of the command.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
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
_COLLECTION = gc.get_threshold()
_IMPORTED_OBJECTS = 100_000  # between two collections while modules are imported

STARTED = "STORMO_STARTED_UNIX_S"  # the agent's start, which its workers inherit


def process_start_unix_s() -> float:
    """When this command was typed: the agent's start, which workers inherit, or this process's own."""
    inherited = os.environ.get(STARTED)
    if inherited:
        return float(inherited)
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - (start_ticks(os.getpid()) or 0) / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def collect_rarely() -> None:
    """Until `keep_imported`, collect garbage rarely: imports create hundreds of thousands of objects, none garbage."""
    gc.set_threshold(_IMPORTED_OBJECTS)


def keep_imported() -> None:
    """Collect garbage as usual, but never among what is imported: to look through it delays steps and the exit."""
    gc.freeze()
    if gc.get_threshold()[0] == _IMPORTED_OBJECTS:  # else the task has set its own
        gc.set_threshold(*_COLLECTION)


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
    """What a process is doing, for a message."""
    fields = process_stat(pid)
    return _STATES.get(fields[0], f"its state is {fields[0]}") if fields else "its state is unknown"


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP or the like has stopped a process; a debugger does not count."""
    return process_stat(pid)[:1] == ["T"]


def fatal_signal(pid: int) -> int | None:
    """The signal that ended a process, which may not be a zombie yet; None where none did, or it was reaped."""
    deadline = time.monotonic() + _ENDS_WITHIN_S
    while (fields := process_stat(pid)) and fields[0] != "Z" and time.monotonic() < deadline:
        time.sleep(0.005)
    status = int(fields[_EXIT_STATUS]) if fields and fields[0] == "Z" else 0
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else None


def pid_namespace() -> str:
    """Identifies the processes that can be seen from here: those of a host, or of one container on it."""
    try:
        return f"{os.uname().nodename} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return os.uname().nodename


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent is gone."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def allow_open_files(needed: int) -> int | None:
    """Raise the limit of open files as far as this process needs; the hard limit where that is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return hard if limit < needed else None


def stormo_command(verb: str) -> list[str]:
    """The command for a verb of this stormo in another process; -P leaves the current folder off its path."""
    return [sys.executable, "-P", "-m", "stormo", verb]


class SetupTimer:
    """The seconds of each part of a start, one after the other."""

    def __init__(self) -> None:
        self.began_unix_s = process_start_unix_s()
        self.times_s: dict[str, float] = {}
        self._last_unix_s = self.began_unix_s

    def done(self, part: str) -> None:
        """A part has ended; the next begins."""
        now = time.time()
        self.times_s[part] = now - self._last_unix_s
        self._last_unix_s = now
