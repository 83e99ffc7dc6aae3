"""One worker process as its agent sees it: started, listened to, looked at, and ended with all it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from stormo.launch import local
from stormo.launch.failure import Failure
from stormo.launch.link import Link
from stormo.launch.meeting import Meeting
from stormo.launch.relay import Lines

_NUM_LAST_LINES = 20
_STATES = {
    "R": "it is running",
    "S": "it is waiting for something (state S)",
    "D": "it is waiting for a disk or a device (state D)",
    "T": "it is stopped (SIGSTOP?)",
    "t": "it is stopped by a debugger",
    "Z": "it has ended",
}


class Stream:
    """One output of a worker: the pipe it comes through, and where its lines go."""

    def __init__(self, worker: Worker, fd: int, target_fd: int, prefix: bytes) -> None:
        os.set_blocking(fd, False)
        self.worker = worker
        self.fd = fd
        self.target_fd = target_fd
        self.closed = False
        self._lines = Lines(prefix)

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self.fd

    def read(self) -> list[bytes]:
        """The lines that are there; sets `closed` at the end."""
        try:
            chunk = os.read(self.fd, 64 * 1024)
        except BlockingIOError:
            return []
        if chunk:
            return self._lines.feed(chunk)
        self.closed = True
        return self._lines.finish()

    def finish(self) -> list[bytes]:
        """What is left although the pipe has not ended."""
        return [] if self.closed else self._lines.finish()


class Worker:
    """A rank of this node; its process group holds whatever it starts in turn."""

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        *,
        environ: Mapping[str, str],
        channel: socket.socket,
        pass_fds: Sequence[int],
    ) -> None:
        self.rank = rank
        self.channel = Link(channel)
        self.started_at = time.monotonic()
        self.heard_at: float | None = None  # its lifeline's last message; None before the first
        self.silent_since: float | None = None  # set once a warning about its silence was printed
        self.step: int | None = None  # of which it has told last
        self.line = ""  # of its script, in which its main thread was last, where it is a script
        self.said_bye = False
        self.channel_closed_at: float | None = None
        self.failure: Failure | None = None  # what it reported
        self.exit_code: int | None = None  # negative: the signal that ended it
        self.ended_at = 0.0
        self.last_lines: deque[bytes] = deque(maxlen=_NUM_LAST_LINES)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=None if rank == 0 else subprocess.PIPE,  # rank 0 draws on the terminal itself
            stderr=subprocess.PIPE,
            bufsize=0,
            env=dict(environ),
            pass_fds=pass_fds,
            # Ctrl-C reaches the agent only, the whole group can be ended at once, and on a busy machine the scheduler,
            # which shares it out among sessions, does not starve the workers.
            start_new_session=True,
        )
        prefix = b"" if rank == 0 else b"[rank %d] " % rank
        self.streams: list[Stream] = []
        if self._process.stdout is not None:
            self.streams.append(Stream(self, self._process.stdout.fileno(), 1, prefix))
        assert self._process.stderr is not None
        self.streams.append(Stream(self, self._process.stderr.fileno(), 2, prefix))

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process had not ended when last looked at."""
        return self.exit_code is None

    def look(self) -> bool:
        """Whether the process has just ended; leaves it unreaped, so that its group's number stays its own."""
        if not self.running:
            return False
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return False
        self.exit_code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        self.ended_at = time.monotonic()
        return True

    def send_signal(self, number: int) -> None:
        """Pass a signal on to the worker itself, not to the helpers it has started."""
        if self.running:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the worker itself, now; helpers that notice it end by themselves and tidy shared memory up."""
        self.send_signal(signal.SIGKILL)

    def kill_group(self) -> None:
        """End everything that the worker has started and that still runs."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def has_helpers(self) -> bool:
        """Whether something the worker has started still runs; ask before it is reaped, while its number is its own."""
        stats = (_stat_fields(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
        return any(fields[2:3] == [str(self.pid)] and fields[0] != "Z" for fields in stats)

    def reap(self, timeout_s: float) -> bool:
        """Wait for the end of a killed worker; False if the kernel cannot end it in time."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Let go of the pipes and the channel."""
        self.channel.close()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def state(self) -> str:
        """What the process is doing, in words, as the kernel shows it."""
        fields = _stat_fields(self.pid)
        if not fields:
            return "its state is unknown"
        return _STATES.get(fields[0], f"its state is {fields[0]}")


def _stat_fields(pid: int) -> list[str]:
    """State, parent, process group and so on of a process; empty if there is none."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return status.rpartition(")")[2].split()  # the name before it may hold blanks and brackets


def start_worker(
    node: local.Node,
    local_rank: int,
    command: Sequence[str],
    *,
    environ: Mapping[str, str],
    meeting: Meeting,
) -> Worker:
    """Start one worker and tell it who it is; rank 0, or every rank of one node, gets what all ranks will meet in."""
    rank = node.rank(local_rank)
    gets_store = meeting.store is not None and (rank == 0 or node.num_nodes == 1)
    store_fd = meeting.store.fileno() if meeting.store is not None and gets_store else None
    own, theirs = socket.socketpair()
    with theirs:
        variables = local.environment(
            node,
            local_rank,
            environ=environ,
            store_addr=meeting.store_addr,
            store_port=meeting.store_port,
            script_port=meeting.script_port,
            channel_fd=theirs.fileno(),
            store_fd=store_fd,
            num_cores=len(os.sched_getaffinity(0)),
        )
        pass_fds = [theirs.fileno()] if store_fd is None else [theirs.fileno(), store_fd]
        try:
            return Worker(rank, command, environ=variables, channel=own, pass_fds=pass_fds)
        except OSError:
            own.close()
            raise
