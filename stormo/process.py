"""When this command was typed, the zero of every wall time, and where the time until the first step goes; and the
warning of a scheduler that comes in that time.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType

from stormo.errors import EXIT_INTERRUPTED, EXIT_RESUMABLE

STARTED = "STORMO_STARTED_UNIX_S"  # the agent's start, which its workers inherit
_held: list[int] = []
_listened: list[bool] = []  # somebody has, once


def process_start_unix_s() -> float:
    """When this command was typed: the agent's start, which workers inherit, or this process's own."""
    inherited = os.environ.get(STARTED)
    if inherited:
        return float(inherited)
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def hold_warning() -> None:
    """From now on keep SIGUSR1, which would end a process that does not listen yet; torch alone imports for seconds."""
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, lambda number, _: _held.append(number))


def leave_when_told() -> None:
    """Until somebody listens, SIGTERM ends this process as a run that may go on: nothing has been done yet."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _leave)


def leave_when_interrupted() -> None:
    """Until somebody listens, Ctrl-C ends this process; torch's imports would swallow an exception, or break by it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _listened:
        signal.default_int_handler(number, frame)
    os._exit(EXIT_INTERRUPTED)


def _leave(number: int, _: FrameType | None) -> None:
    if _listened:  # and does not any more: there is nothing left to be stopped in order
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
        return
    os.write(2, b"stormo: stopped by SIGTERM before training began; the same command starts it again\n")
    os._exit(EXIT_RESUMABLE)  # an exception would be taken for one of the file that is being imported


def hear_warning() -> None:
    """Have the signal that was kept come again, now that somebody listens."""
    _listened.append(True)
    if _held:
        _held.clear()
        signal.raise_signal(signal.SIGUSR1)


def leave_if_warned() -> None:
    """End as a run that may go on, where the signal was kept and nobody will listen."""
    if _held:
        os.write(2, b"stormo: stopped by SIGUSR1 before training began; the same command starts it again\n")
        os._exit(EXIT_RESUMABLE)


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
