"""The worker processes of one node: starts and watches them, and ends them with all that they have started."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stormo.errors import StormoError
from stormo.launch.control import ChannelTimeouts
from stormo.launch.environments import local
from stormo.launch.failure import Failure, printable
from stormo.launch.json_socket import JsonSocket
from stormo.launch.output import STDERR, STDOUT, LogMultiplexer, Stream, read_rest
from stormo.launch.rendezvous import Rendezvous
from stormo.launch.root_cause import SettleTimes
from stormo.system.hardware import num_cores
from stormo.system.process import process_stat, process_state

_REAP_S = 15.0  # for the kernel to end what was killed; a GPU's driver takes seconds to free its memory


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentTimeouts:
    """How long the agent waits for what."""

    silent_warning_s: float = 15.0  # without a heartbeat from a worker, until a warning
    stopped_s: float = 15.0  # more, if a signal has stopped the worker, until that ends a job of several
    stop_s: float = 30.0  # for workers to end after SIGTERM
    interrupted_s: float | None = None  # for workers to end after Ctrl-C; None for those that first save their work
    hold_s: float = 0.2  # lines on stderr, so that the cause of a failure comes before its consequences
    leftover_s: float = 1.0  # for pipes to end after their worker has
    # For the first heartbeat, or the timeout if that is longer: importing torch from a busy file system is no failure.
    # None for a script, which may do other things first.
    first_sign_s: float | None = 60.0
    settle: SettleTimes = field(default_factory=SettleTimes)
    channel: ChannelTimeouts = field(default_factory=ChannelTimeouts)

    @property
    def runs_script(self) -> bool:
        """Whether the workers run a user's script."""
        return self.first_sign_s is None


class Worker:
    """A rank of this node; its process group holds whatever it starts in turn."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self.rank = rank
        self.channel = JsonSocket(channel)
        self.started_at = time.monotonic()
        self.heard_at: float | None = None  # when the last message came
        self.silent_since: float | None = None  # set once a warning was printed
        self.stopped_since: float | None = None  # when the agent first saw it stopped
        self.step: int | None = None  # the last one it reported
        self.line = ""  # where in its script the main thread was last
        self.has_left = False
        self.channel_closed_at: float | None = None
        self.failure: Failure | None = None  # what it reported
        self.exit_code: int | None = None  # negative: the signal that ended it
        self.ended_at = 0.0
        self._process = process
        prefix = b"" if rank == 0 else b"[rank %d] " % rank
        self.streams: list[Stream] = []
        for pipe, target in ((process.stdout, STDOUT), (process.stderr, STDERR)):
            if pipe is not None:
                self.streams.append(Stream(pipe.fileno(), target, rank=rank, prefix=prefix))

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process had not exited at the last poll."""
        return self.exit_code is None

    def poll(self) -> bool:
        """Whether the process has just exited; leaves it unreaped, so that its pid is not reused."""
        if not self.running:
            return False
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return False
        self.exit_code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        self.ended_at = time.monotonic()
        return True

    def wait_anew(self) -> None:
        """Count its silence from now on."""
        self.started_at = time.monotonic()
        if self.heard_at is not None:
            self.heard_at = self.started_at

    def send_signal(self, number: int) -> None:
        """Send a signal to the worker itself, not to the helpers it has started."""
        if self.running:
            os.kill(self.pid, number)

    def kill_group(self) -> None:
        """Kill what the worker has started and what still runs."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self, timeout_s: float) -> bool:
        """Wait for the end of a killed worker; False if the kernel cannot end it in time."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Close the pipes and the channel."""
        self.channel.close()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def state(self) -> str:
        """What the process is doing, for a message."""
        return process_state(self.pid)


class WorkerGroup:
    """The workers of one node; what they write goes to the log."""

    def __init__(self, selector: selectors.BaseSelector, log: LogMultiplexer, timeouts: AgentTimeouts) -> None:
        self._selector = selector
        self._log = log
        self._timeouts = timeouts
        self._workers: list[Worker] = []

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers)

    def start(
        self,
        node: local.Node,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        rendezvous: Rendezvous,
        between: Callable[[], None],
    ) -> None:
        """Start every worker of the node; call `between` after each, as that may take long."""
        for local_rank in range(node.num_workers):
            worker = _start_worker(node, local_rank, command, environ, rendezvous)
            self._workers.append(worker)
            self._selector.register(worker.channel, selectors.EVENT_READ, worker)
            for stream in worker.streams:
                self._selector.register(stream, selectors.EVENT_READ, stream)
            between()

    @property
    def is_running(self) -> bool:
        """Whether any worker runs."""
        return any(worker.running for worker in self._workers)

    @property
    def may_write_more(self) -> bool:
        """Whether all workers exited a moment ago and a pipe of theirs is still open."""
        if all(stream.closed for stream in self._streams()):
            return False
        return time.monotonic() - max(worker.ended_at for worker in self._workers) < self._timeouts.leftover_s

    @property
    def is_vanishing(self) -> bool:
        """Whether a worker has closed its channel without a message: it is about to exit."""
        now, within_s = time.monotonic(), self._timeouts.settle.secondary_s
        return any(
            worker.running and not worker.has_left and now - worker.channel_closed_at < within_s
            for worker in self._workers
            if worker.channel_closed_at is not None
        )

    def receive(self, worker: Worker) -> Failure | None:
        """Read a worker's messages; the failure that it reports, once."""
        now, reported = time.monotonic(), None
        for message in worker.channel.receive():
            if worker.silent_since is not None:
                silent_s = now - worker.silent_since
                self._log.say(f"rank {worker.rank} (pid {worker.pid}) is back after {silent_s:.0f} s")
                worker.silent_since = None
            worker.heard_at = now
            worker.step = step if isinstance(step := message.get("step"), int) else worker.step
            worker.line = printable(line, 200) if isinstance(line := message.get("line"), str) else worker.line
            if message.get("event") == "bye":
                worker.has_left = True
            elif message.get("event") == "failure" and worker.failure is None:
                worker.failure = reported = Failure.from_message(message)
        if worker.channel.closed:
            self._selector.unregister(worker.channel)
            worker.channel.close()
            worker.channel_closed_at = now
        return reported

    def read_output(self, stream: Stream) -> None:
        """Read the lines that a worker has written."""
        if not stream.closed:
            self._log.take(stream, stream.read())
            if stream.closed:
                self._selector.unregister(stream)

    def send_signal(self, number: int) -> None:
        """Send a signal to every worker."""
        for worker in self._workers:
            worker.send_signal(number)

    def kill(self) -> None:
        """Kill every worker, and read what they left in their pipes."""
        self.send_signal(signal.SIGKILL)
        read_rest(self._streams(), self.read_output)

    def close(self) -> None:
        """Leave no process behind, whatever happened, and no line unshown."""
        self.send_signal(signal.SIGKILL)  # of a worker alone: helpers that notice it exit and remove shared memory
        self._wait_for_helpers(time.monotonic() + self._timeouts.leftover_s)
        for worker in self._workers:
            worker.kill_group()
        deadline = time.monotonic() + _REAP_S
        self._wait_for_helpers(deadline)
        for worker in self._workers:
            if not worker.reap(max(0.1, deadline - time.monotonic())):
                self._log.say(f"rank {worker.rank} (pid {worker.pid}) could not be ended: {worker.state()}")
        read_rest(self._streams(), self.read_output)
        for stream in self._streams():
            self._log.take(stream, stream.finish())
        self._log.show_held_lines(at_once=True)
        for worker in self._workers:
            worker.close()

    def _wait_for_helpers(self, deadline: float) -> None:
        while time.monotonic() < deadline and self._has_helpers():
            time.sleep(0.02)

    def _has_helpers(self) -> bool:
        """Whether something that a worker has started still runs; valid until the workers are reaped."""
        groups = {str(worker.pid) for worker in self._workers}
        # One look at /proc for all workers: a node may run thousands of processes.
        stats = (process_stat(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
        return any(fields and fields[2] in groups and fields[0] != "Z" for fields in stats)

    def _streams(self) -> list[Stream]:
        return [stream for worker in self._workers for stream in worker.streams]


def _start_worker(
    node: local.Node, local_rank: int, command: Sequence[str], environ: Mapping[str, str], rendezvous: Rendezvous
) -> Worker:
    """Start one worker; rank 0, or every rank of a single node, inherits the store."""
    rank = node.rank(local_rank)
    own, theirs = socket.socketpair()
    descriptors = {local.CHANNEL_FD: theirs.fileno()}
    if rendezvous.store is not None and (rank == 0 or node.num_nodes == 1):
        descriptors[local.STORE_FD] = rendezvous.store.fileno()
    with theirs:
        given = rendezvous.variables() | {name: str(number) for name, number in descriptors.items()}
        variables = local.environment(node, local_rank, environ=environ, given=given, num_cores=num_cores())
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 else subprocess.PIPE,  # rank 0 draws on the terminal itself
                stderr=subprocess.PIPE,
                bufsize=0,
                env=variables,
                pass_fds=list(descriptors.values()),
                # Ctrl-C reaches the agent only, the whole group can be killed at once, and a busy machine shares its
                # time among sessions.
                start_new_session=True,
            )
        except OSError as error:
            own.close()
            raise StormoError(f"The worker command {command[0]} could not be started: {error}.") from error
    return Worker(rank, process, own)
