"""Runs the same command on several hosts over ssh, as one job.

Each command ends with its connection, and each connection with this process. STORMO_SSH names another ssh, with
options. On a host, ssh runs this module: the first line of its input is the command, which it becomes; every further
line is a signal for it; at the end of the input the connection is gone, and the command gets SIGTERM.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stormo.errors import EXIT_FAILURE, EXIT_USAGE, SettingError, StormoError
from stormo.launch.failure import CLEAN_EXIT_CODES, combined_exit_code, stop_exit_code, stopped_early
from stormo.launch.output import PREFIX, STDERR, STDOUT, Stream, read_rest, say, write_all
from stormo.system.process import allow_open_files, die_with_parent
from stormo.system.signals import SignalQueue

PROGRAM = "STORMO_SSH"
_STARTED = b"stormo: started here"
_CONNECTION_FAILED = 255  # ssh's own exit code
_OTHERS_END_WITHIN_S = 15.0  # after one host has failed, of which their agents know in less
_CLOSE_WITHIN_S = 5.0
_KILL_AFTER_S = 40.0  # the end of the connections' input
# The first value of an option wins in ssh, so that the user's do. Nobody could answer a question (BatchMode).
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=20", "ServerAliveInterval=15", "ServerAliveCountMax=3")
_NUM_KEPT_LINES = 20
_ENDS_WITHIN_S = 120.0  # an agent ends its workers long before; this is for what does not listen


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
        command = ["env", *variables, *self.command] if variables else self.command
        return f"cd {shlex.quote(self.folder)} && {shlex.join(command)}"

    def over_ssh(self, program: Sequence[str]) -> list[str]:
        """The ssh command; what to run follows through its input, which other users cannot see."""
        python = [self.command[0], "-P", "-m", "stormo.launch.ssh"]
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
        self.send(json.dumps({"command": order.command, "environ": dict(order.environ)}).encode() + b"\n")

    def send(self, data: bytes) -> None:
        """Write to the command's watcher; one that is gone needs nothing."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(data)

    def close_input(self) -> None:
        """Close the input, which ends the command."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def end(self, within_s: float) -> None:
        """Wait for the process here to exit, then kill it, and close its outputs."""
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
        """Whether the connection was open at the last poll."""
        return self.exit_code is None

    def last_line(self) -> str:
        """What ssh or the remote shell wrote last."""
        lines = [line.strip() for line in self.last_lines if line.strip()]
        return lines[-1].decode("utf-8", "replace") if lines else f"exit code {self.exit_code}"


class HostStream(Stream):
    """One output of a connection."""

    def __init__(self, connection: Connection, fd: int, target_fd: int) -> None:
        super().__init__(fd, target_fd, rank=-1, prefix=connection.prefix)
        self.connection = connection
        self._started = False

    def of_command(self, blocks: list[bytes]) -> list[tuple[bytes, bytes]]:
        """The lines that come from the command, not from the login before it: each bare, and as it is to be shown."""
        prefix = self.connection.prefix
        # Without a prefix the lines come in one block.
        lines = blocks if prefix else [line for block in blocks for line in block.splitlines(keepends=True)]
        return [(line[len(prefix) :], line) for line in lines if self._is_of_command(line[len(prefix) :])]

    def _is_of_command(self, line: bytes) -> bool:
        if self.target_fd == STDERR or not self._started:
            self.connection.last_lines.append(line)
        if self._started:
            return True
        if line.strip() == _STARTED:
            self._started = self.connection.started = True
            self.connection.last_lines.clear()
        return False


def run_on_hosts(commands: Sequence[HostCommand], environ: Mapping[str, str]) -> int:
    """Run a command on every host until all have ended; the exit code of the whole."""
    try:
        program = shlex.split(environ.get(PROGRAM, "")) or ["ssh"]
    except ValueError as error:
        why = f"a shell could not read that ({str(error).lower()})"
        raise SettingError(f"{PROGRAM}={environ[PROGRAM]} was set", why, "close its quotes") from None
    if shutil.which(program[0]) is None:
        raise SettingError(
            f"{PROGRAM}={environ[PROGRAM]} was set" if environ.get(PROGRAM) else "--launcher ssh was set",
            f"there is no {program[0]} here",
            f"install it, or name another one by {PROGRAM}",
        )
    needed = 3 * len(commands) + 64  # a pipe for each stream of a host
    limit = allow_open_files(needed)
    if limit is not None:
        raise SettingError(
            f"{len(commands)} hosts were given",
            f"a process here may open only {limit} files",
            f"ask for a limit (ulimit -n) of at least {needed}",
        )
    sys.stdout.flush()
    with SignalQueue() as signals, contextlib.ExitStack() as stack:
        job = _Job(program, signals)
        stack.callback(job.close)
        job.start(commands)
        return job.watch()


class _Job:
    """The command on all hosts."""

    def __init__(self, program: Sequence[str], signals: SignalQueue) -> None:
        self._signals = signals
        self._program = program
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ)
        self._connections: list[Connection] = []
        self._pipes: list[HostStream] = []
        self._sentences: dict[bytes, Connection] = {}  # the launcher's messages, and which host wrote each first
        self._interrupts = 0
        self._forwarded: int | None = None  # the last signal that was forwarded
        self._close_input_at: float | None = None
        self._kill_at: float | None = None
        self._cause_shown = False

    def start(self, commands: Sequence[HostCommand]) -> None:
        """Open a connection to every host; where one cannot be, `close` ends the others."""
        for order in commands:
            try:
                connection = Connection(order, self._program, is_first=order is commands[0])
            except OSError as error:
                started = f"{len(self._connections)} of {len(commands)} connections were opened"
                raise StormoError(f"{self._program[0]} could not be started: {error}; {started}.") from error
            self._connections.append(connection)
            for pipe, target in ((connection.process.stdout, STDOUT), (connection.process.stderr, STDERR)):
                assert pipe is not None
                self._pipes.append(HostStream(connection, pipe.fileno(), target))
                self._selector.register(self._pipes[-1], selectors.EVENT_READ)

    def watch(self) -> int:
        """Forward lines and signals until every connection has ended."""
        while any(connection.running for connection in self._connections):
            for key, _ in self._selector.select(0.2):
                if key.fileobj is self._signals:
                    self._take_signals()
                elif isinstance(key.fileobj, HostStream):
                    self._read(key.fileobj)
            for connection in self._connections:
                self._poll(connection)
            self._check_deadlines()
        self._explain_silence()
        return self._exit_code()

    def close(self) -> None:
        """Close everything; what still runs on a host ends with its input."""
        for connection in self._connections:
            connection.close_input()
            if connection.process.poll() is None:
                connection.process.terminate()
        deadline = time.monotonic() + _CLOSE_WITHIN_S
        for connection in self._connections:
            connection.end(max(0.0, deadline - time.monotonic()))
        self._selector.close()

    # --- one round -----------------------------------------------------------------------------------------------

    def _take_signals(self) -> None:
        for number in self._signals.read():
            self._interrupts += number == signal.SIGINT
            if self._interrupts > 1 and self._kill_at is None:
                self._kill_at = time.monotonic() + _OTHERS_END_WITHIN_S
            self._forwarded = number
            for connection in self._connections:
                connection.send(signal.Signals(number).name.encode() + b"\n")

    def _read(self, pipe: HostStream) -> None:
        self._show(pipe, pipe.read())

    def _show(self, pipe: HostStream, blocks: list[bytes]) -> None:
        for bare, line in pipe.of_command(blocks):
            if pipe.target_fd == STDERR and (self._cause_shown or self._is_repeated(bare, pipe.connection)):
                continue
            # A line that names its rank needs no host.
            names_itself = bare.startswith((b"[rank ", f"{PREFIX}rank ".encode()))
            write_all(pipe.target_fd, bare if names_itself else line)
        if pipe.closed:
            self._selector.unregister(pipe)

    def _is_repeated(self, line: bytes, by: Connection) -> bool:
        """Whether another host has written the same message, as all do when the job ends."""
        return line.startswith(PREFIX.encode()) and self._sentences.setdefault(line, by) is not by

    def _poll(self, connection: Connection) -> None:
        if not connection.running or connection.process.poll() is None:
            return
        connection.exit_code = connection.process.returncode
        pipes = [pipe for pipe in self._pipes if pipe.connection is connection]
        read_rest(pipes, self._read)
        for pipe in pipes:
            if not pipe.closed:  # something else, as a shared connection, may keep it open
                self._show(pipe, pipe.finish())
        is_silent = connection.exit_code == _CONNECTION_FAILED and not connection.last_lines
        if self._forwarded is not None and connection.started and is_silent:
            if not self._sentences:
                say(f"host {connection.host} {stopped_early(self._forwarded)}")
            connection.exit_code = stop_exit_code(self._forwarded)
        if not connection.started and not self._cause_shown:
            try_it = f"; see whether this works: {shlex.join([*self._program, connection.host, 'true'])}"
            hint = try_it if connection.exit_code == _CONNECTION_FAILED else ""
            say(f"host {connection.host} did not start its workers: {connection.last_line()}{hint}")
            self._cause_shown = True  # nothing has begun: what the others say now is a consequence
            self._close_input_at = time.monotonic()
        elif self._close_input_at is None and connection.exit_code not in CLEAN_EXIT_CODES:
            self._close_input_at = time.monotonic() + _OTHERS_END_WITHIN_S

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        if self._close_input_at is not None and now >= self._close_input_at:
            for connection in self._connections:
                connection.close_input()
            self._close_input_at, self._kill_at = float("inf"), self._kill_at or now + _KILL_AFTER_S
        if self._kill_at is not None and now >= self._kill_at:
            for connection in self._connections:
                if connection.running:
                    connection.process.kill()

    # --- the end -------------------------------------------------------------------------------------------------

    def _explain_silence(self) -> None:
        """Say what is known of a host that ended without a message."""
        if self._cause_shown or self._sentences:
            return
        for connection in self._connections:
            if connection.started and connection.exit_code == _CONNECTION_FAILED:
                why = f" ({connection.last_line()})" if connection.last_lines else ""
                say(f"host {connection.host}: the connection was lost, or the command there was killed{why}")
                return

    def _exit_code(self) -> int:
        if self._cause_shown:
            return EXIT_FAILURE
        codes = [connection.exit_code or 0 for connection in self._connections]
        if set(codes) <= set(CLEAN_EXIT_CODES):
            return combined_exit_code(codes)
        return EXIT_USAGE if EXIT_USAGE in codes else EXIT_FAILURE


# --- on a host --------------------------------------------------------------------------------------------------------


def main() -> None:
    """Read what to run, fork a watcher of the connection, and become the command."""
    received = json.loads(_read_line())
    os.environ.update(received["environ"])
    for descriptor in (STDOUT, STDERR):  # the lines before it are of the login
        os.write(descriptor, _STARTED + b"\n")
    command = os.getpid()  # this very process, as ssh returns its exit code
    if os.fork() == 0:
        os.setsid()  # signals to the process group of the command are not for the watcher
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (STDOUT, STDERR):  # or ssh would wait for the watcher to close them
            os.dup2(nowhere, descriptor)
        _watch(command)
        os._exit(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.execv(received["command"][0], received["command"])


def _read_line() -> bytes:
    """One line of the input and not a byte more, as the rest is for the watcher."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit("stormo: the connection ended before the command came")
        line += byte
    return bytes(line)


def _watch(command: int) -> None:
    """Forward signals, and end the command when the input ends; this process ends with the command."""
    die_with_parent()
    if os.getppid() != command:  # gone before that
        return
    rest = b""
    while chunk := os.read(0, 4096):
        *names, rest = (rest + chunk).split(b"\n")
        for name in names:
            _send_signal(command, signal.Signals[name.decode()])
    _send_signal(command, signal.SIGTERM)
    time.sleep(_ENDS_WITHIN_S)
    _send_signal(command, signal.SIGKILL)


def _send_signal(command: int, number: int) -> None:
    if os.getppid() == command:  # else it has ended, and its number may be another's
        os.kill(command, number)


if __name__ == "__main__":
    main()
