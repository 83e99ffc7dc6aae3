"""One host that runs a command over ssh, as the process that wanted it sees it: started, listened to, let go."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stormo.launch import remote
from stormo.launch.relay import Lines

# What comes first on the command line wins in ssh, so that the user's own options do. Nobody could answer a question.
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=20", "ServerAliveInterval=15", "ServerAliveCountMax=3")
_NUM_KEPT_LINES = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCommand:
    """What one host runs."""

    host: str  # as ssh takes it
    command: tuple[str, ...]
    folder: str
    environ: Mapping[str, str]

    def by_hand(self) -> str:
        """The command line to type on that host."""
        variables = [f"{name}={value}" for name, value in self.environ.items()]
        words = ["env", *variables, *self.command] if variables else self.command
        return f"cd {shlex.quote(self.folder)} && {shlex.join(words)}"

    def over_ssh(self, program: Sequence[str]) -> list[str]:
        """The words that start it from here; what it is to do follows through its input, where nobody sees it."""
        python = [self.command[0], "-P", "-m", remote.__name__]
        if self.environ.get("PYTHONPATH"):
            python = ["env", f"PYTHONPATH={self.environ['PYTHONPATH']}", *python]
        options = [word for option in _OPTIONS for word in ("-o", option)]
        return [*program, "-T", *options, self.host, f"cd {shlex.quote(self.folder)} && exec {shlex.join(python)}"]


class Connection:
    """One host, and what has come from it."""

    def __init__(self, order: HostCommand, program: Sequence[str], *, is_first: bool) -> None:
        self.host = order.host
        self.started = False
        self.exit_code: int | None = None
        self.last_lines: deque[bytes] = deque(maxlen=_NUM_KEPT_LINES)  # on stderr, and what came before the start
        self.prefix = b"" if is_first else b"[%s] " % order.host.encode()
        self.process = subprocess.Popen(
            order.over_ssh(program),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            process_group=0,  # Ctrl-C reaches this process only, which passes it on
        )
        self.send(remote.order(order.command, order.environ))

    def send(self, data: bytes) -> None:
        """Write to the command's watcher; one that is gone needs nothing."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(data)

    def let_go(self) -> None:
        """End the input, which ends the command."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def end(self, within_s: float) -> None:
        """Wait for the process here to end, then end it, and let go of its outputs."""
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    @property
    def running(self) -> bool:
        """Whether the connection stood when last looked at."""
        return self.exit_code is None

    def last_words(self) -> str:
        """What ssh or the shell over there said last."""
        lines = [line.strip() for line in self.last_lines if line.strip()]
        return lines[-1].decode("utf-8", "replace") if lines else f"exit code {self.exit_code}"


class Pipe:
    """One output of a connection."""

    def __init__(self, connection: Connection, fd: int, target_fd: int) -> None:
        os.set_blocking(fd, False)
        self.connection, self.fd, self.target_fd = connection, fd, target_fd
        self.closed = False
        self._started = False
        self._lines = Lines(connection.prefix)

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self.fd

    def read(self) -> list[tuple[bytes, bytes]]:
        """The lines of the command that are there, each bare and as it is to be shown; sets `closed` at the end."""
        try:
            chunk = os.read(self.fd, 64 * 1024)
        except BlockingIOError:
            return []
        if not chunk:
            return self.finish()
        return self._told(self._lines.feed(chunk))

    def finish(self) -> list[tuple[bytes, bytes]]:
        """The line that was not ended, as nothing more is read."""
        self.closed = True
        return self._told(self._lines.finish())

    def _told(self, blocks: list[bytes]) -> list[tuple[bytes, bytes]]:
        prefix = self.connection.prefix
        # Without a prefix the lines come in one block.
        lines = blocks if prefix else [line for block in blocks for line in block.splitlines(keepends=True)]
        return [(line[len(prefix) :], line) for line in lines if self._is_from_command(line[len(prefix) :])]

    def _is_from_command(self, line: bytes) -> bool:
        """Whether a line comes from the command, not from the login before it."""
        if self.target_fd == 2 or not self._started:
            self.connection.last_lines.append(line)
        if self._started:
            return True
        if line.strip() == remote.STARTED.encode():
            self._started = self.connection.started = True
            self.connection.last_lines.clear()
        return False
