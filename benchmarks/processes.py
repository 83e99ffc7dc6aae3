"""Finds the processes of one attempt at a run, wherever they went: each inherits a mark in its environment (Linux)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MARK = "STORMO_BENCHMARK_ATTEMPT"


def marked(mark: str) -> set[int]:
    """The living processes that carry the mark; zombies have no environment and do not count."""
    wanted = f"{MARK}={mark}".encode()
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and wanted in _environment(int(folder.name)):
            found.add(int(folder.name))
    return found


def workers_of(agent_pid: int, mark: str) -> dict[int, int]:
    """Rank to process id of the workers that an agent has started so far."""
    found = {}
    for pid in marked(mark) - {agent_pid}:
        if _parent(pid) != agent_pid:  # a helper of a worker inherits its rank
            continue
        for entry in _environment(pid):
            if entry.startswith(b"RANK="):
                found[int(entry.removeprefix(b"RANK="))] = pid
    return found


def kill(pids: Iterable[int]) -> None:
    """SIGKILL each; one that has just ended is no mistake."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_until_gone(mark: str, timeout_s: float) -> set[int]:
    """Wait for every marked process to end; return those that did not."""
    deadline = time.monotonic() + timeout_s
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _environment(pid: int) -> list[bytes]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
