"""When this command was typed, the zero of every wall time, and where the time until the first step goes."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

STARTED = "STORMO_STARTED_UNIX_S"  # the agent's start, which its workers inherit


def process_start_unix_s() -> float:
    """When this command was typed: the agent's start, which workers inherit, or this process's own."""
    inherited = os.environ.get(STARTED)
    if inherited:
        return float(inherited)
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


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
