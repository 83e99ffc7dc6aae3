"""The same command on several hosts over ssh: started, shown, stopped and ended as one.

Every host's command hangs on its connection (`remote`), and the connection on this process: nothing outlives it. Which
ssh, and what else it is to be told, may be said by STORMO_SSH.
"""

from __future__ import annotations

import contextlib
import resource
import select
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

from stormo.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_RESUMABLE, EXIT_USAGE, SettingError, StormoError
from stormo.launch import remote
from stormo.launch.failure import ORDERLY_EXIT_CODES, combined_exit_code
from stormo.launch.output import STDERR, STDOUT, Stream, write_all
from stormo.launch.signals import SignalQueue

PROGRAM = "STORMO_SSH"
_SIGNALS = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_NAMES = {signal.SIGINT: b"INT", signal.SIGTERM: b"TERM", signal.SIGUSR1: b"USR1", signal.SIGHUP: b"TERM"}
_CONNECTION_FAILED = 255  # ssh's own exit code
_OTHERS_END_WITHIN_S = 15.0  # after one host has failed, of which their agents know in less
_READ_REST_S, _NEXT_PIECE_MS = 1.0, 50
_CLOSE_WITHIN_S = 5.0
_LET_GO_WITHIN_S = 40.0  # of the end of the connections' input
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
        """The command that starts it from here; the order follows through its input, where nobody sees it."""
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
        if line.strip() == remote.STARTED.encode():
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
    _allow_many_pipes()
    sys.stdout.flush()
    with SignalQueue(_SIGNALS) as signals, contextlib.ExitStack() as stack:
        job = _Job(program, signals)
        stack.callback(job.close)
        job.start(commands)
        return job.watch()


def _allow_many_pipes() -> None:
    """Allow three pipes for each host; a thousand hosts need more than most shells allow at first."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Job:
    """All hosts."""

    def __init__(self, program: Sequence[str], signals: SignalQueue) -> None:
        self._signals = signals
        self._program = program
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ)
        self._connections: list[Connection] = []
        self._pipes: list[HostStream] = []
        self._sentences: dict[bytes, Connection] = {}  # of stormo's own, and who said each first
        self._interrupts = 0
        self._asked: signal.Signals | None = None  # the last signal that was passed on
        self._let_go_at: float | None = None
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
        """Pass on lines and signals until every connection has ended."""
        while any(connection.running for connection in self._connections):
            for key, _ in self._selector.select(0.2):
                if key.fileobj is self._signals:
                    self._take_signals()
                elif isinstance(key.fileobj, HostStream):
                    self._show(key.fileobj, key.fileobj.read())
            for connection in self._connections:
                self._look(connection)
            self._keep_time()
        self._explain_silence()
        return self._exit_code()

    def close(self) -> None:
        """Let go of everything; what still runs over there ends by itself when its input does."""
        for connection in self._connections:
            connection.let_go()
            if connection.process.poll() is None:
                connection.process.terminate()
        deadline = time.monotonic() + _CLOSE_WITHIN_S
        for connection in self._connections:
            connection.end(max(0.0, deadline - time.monotonic()))
        self._selector.close()

    # --- one round -----------------------------------------------------------------------------------------------

    def _take_signals(self) -> None:
        for number in self._signals.read():
            if number not in _NAMES:
                continue
            self._interrupts += number == signal.SIGINT
            if self._interrupts > 1 and self._kill_at is None:
                self._kill_at = time.monotonic() + _OTHERS_END_WITHIN_S
            self._asked = signal.Signals(number)
            for connection in self._connections:
                connection.send(_NAMES[self._asked] + b"\n")

    def _show(self, pipe: HostStream, blocks: list[bytes]) -> None:
        for bare, line in pipe.of_command(blocks):
            if pipe.target_fd == STDERR and (self._cause_shown or self._was_said(bare, pipe.connection)):
                continue
            # A line that names its rank needs no host.
            names_itself = bare.startswith((b"[rank ", b"stormo: rank "))
            write_all(pipe.target_fd, bare if names_itself else line)
        if pipe.closed:
            self._selector.unregister(pipe)

    def _was_said(self, line: bytes, by: Connection) -> bool:
        """Whether another host has said the same sentence, as all do when the whole job ends."""
        return line.startswith(b"stormo: ") and self._sentences.setdefault(line, by) is not by

    def _look(self, connection: Connection) -> None:
        if not connection.running or connection.process.poll() is None:
            return
        connection.exit_code = connection.process.returncode
        self._read_rest(connection)
        if (
            self._asked
            and connection.started
            and connection.exit_code == _CONNECTION_FAILED
            and not connection.last_lines
        ):
            if not self._sentences:
                why = "which reached it before it was ready to stop in order"
                self._say(f"host {connection.host} was ended by {self._asked.name}, {why}")
            connection.exit_code = EXIT_INTERRUPTED if self._asked == signal.SIGINT else EXIT_RESUMABLE
        if connection.started and connection.exit_code == 0:
            return
        if not connection.started and not self._cause_shown:
            try_it = f"; see whether this works: {shlex.join([*self._program, connection.host, 'true'])}"
            hint = try_it if connection.exit_code == _CONNECTION_FAILED else ""
            self._say(f"host {connection.host} did not start its workers: {connection.last_words()}{hint}")
            self._cause_shown = True  # nothing has begun: what the others say now is a consequence
            self._let_go_at = time.monotonic()
        elif self._let_go_at is None and connection.exit_code not in ORDERLY_EXIT_CODES:
            self._let_go_at = time.monotonic() + _OTHERS_END_WITHIN_S

    def _keep_time(self) -> None:
        now = time.monotonic()
        if self._let_go_at is not None and now >= self._let_go_at:
            for connection in self._connections:
                connection.let_go()
            self._let_go_at, self._kill_at = float("inf"), self._kill_at or now + _LET_GO_WITHIN_S
        if self._kill_at is not None and now >= self._kill_at:
            for connection in self._connections:
                if connection.running:
                    connection.process.kill()

    # --- the end -------------------------------------------------------------------------------------------------

    def _read_rest(self, connection: Connection) -> None:
        """Read what an ended connection has left in its pipes."""
        for pipe in self._pipes:
            if pipe.connection is connection:
                deadline = time.monotonic() + _READ_REST_S  # something else, as a shared connection, may keep it open
                poll = select.poll()  # select itself knows no descriptor above 1023
                poll.register(pipe, select.POLLIN)
                while not pipe.closed and time.monotonic() < deadline and poll.poll(_NEXT_PIECE_MS):
                    self._show(pipe, pipe.read())
                if not pipe.closed:
                    self._show(pipe, pipe.finish())

    def _explain_silence(self) -> None:
        """Say what is known where a host ended without a sentence of stormo's."""
        if self._cause_shown or self._sentences:
            return
        for connection in self._connections:
            if connection.started and connection.exit_code == _CONNECTION_FAILED:
                why = f" ({connection.last_words()})" if connection.last_lines else ""
                self._say(f"host {connection.host}: the connection was lost, or the command there was killed{why}")
                return

    def _say(self, sentence: str) -> None:
        write_all(STDERR, f"stormo: {sentence}\n".encode())

    def _exit_code(self) -> int:
        if self._cause_shown:
            return EXIT_FAILURE
        codes = [connection.exit_code or 0 for connection in self._connections]
        if set(codes) <= set(ORDERLY_EXIT_CODES):
            return combined_exit_code(codes)
        return EXIT_USAGE if EXIT_USAGE in codes else EXIT_FAILURE
