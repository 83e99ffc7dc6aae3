"""The agent of one node: starts the node's workers, passes their output and the user's signals on, and ends all of
them within seconds when one fails, naming the cause first.

One thread, one loop, nothing shared. Trains nothing and imports nothing heavy.
"""

from __future__ import annotations

import os
import selectors
import shlex
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from stormo.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_RESUMABLE, StormoError
from stormo.launch import local
from stormo.launch.address import LOOPBACK, listen, listening_address
from stormo.launch.client import Client
from stormo.launch.control import Control, Ended, Event, Gone, Hello, RankEnded, Reported, Timing
from stormo.launch.failure import Failure, combined_exit_code, of_exit, of_signal, printable, signal_name
from stormo.launch.inbox import SignalInbox
from stormo.launch.place import host_name
from stormo.launch.relay import write_all
from stormo.launch.server import Server
from stormo.launch.verdict import Ending, Settling, Sign, Weight, cause, decide_at, is_orderly, weigh
from stormo.launch.worker import Stream, Worker

_SIGNALS = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_STDERR = 2
_REAP_S = 5.0
_STORE_BACKLOG = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long the agent waits for what."""

    silent_warning_s: float = 15.0  # without a sign of life from a worker, until a warning
    stop_s: float = 30.0  # for workers to end after SIGTERM
    hold_s: float = 0.2  # lines on stderr, so that the cause of a failure is shown before its consequences
    leftover_s: float = 1.0  # for pipes to end after their worker has
    settling: Settling = field(default_factory=Settling)
    timing: Timing = field(default_factory=Timing)


def run_node(
    command: Sequence[str],
    node: local.Node,
    *,
    digest: str = "",
    options: Mapping[str, str] | None = None,
    timeout_s: float = 600.0,
    environ: Mapping[str, str] | None = None,
    patience: Patience | None = None,
) -> int:
    """Run the workers of one node to their end and return the exit code of the whole job.

    Args:
        command: what each worker runs; the environment tells it which rank it is.
        node: which node of the job this is, and how many workers it has.
        digest: stands for everything that must be the same on all nodes.
        options: what the digest is made of, to name a difference.
        timeout_s: for all nodes to come together, and for a worker without a sign of life.
    """
    patience = patience or Patience()
    patience = replace(patience, timing=replace(patience.timing, join_s=timeout_s))
    sys.stdout.flush()
    sys.stderr.flush()
    with ExitStack() as stack:
        agent = Agent(
            command,
            node,
            hello=Hello(
                member=node.node_id,
                num_members=node.num_nodes,
                host=host_name(),
                digest=f"{digest} {node.num_workers}",
                options={"--num-gpus": str(node.num_workers), **(options or {})},
            ),
            timeout_s=timeout_s,
            environ=os.environ if environ is None else environ,
            patience=patience,
            stack=stack,
        )
        return agent.run()


class Agent:
    """The state of one node's run; everything it opens is closed by the stack it is given."""

    def __init__(
        self,
        command: Sequence[str],
        node: local.Node,
        *,
        hello: Hello,
        timeout_s: float,
        environ: Mapping[str, str],
        patience: Patience,
        stack: ExitStack,
    ) -> None:
        self._command = list(command)
        self._node = node
        self._hello = hello
        self._timeout_s = timeout_s
        self._environ = environ
        self._patience = patience
        self._stack = stack
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._control: Control | None = None
        self._workers: list[Worker] = []
        self._signs: list[Sign] = []
        self._endings: list[Ending] = []
        self._held: deque[tuple[float, Stream, bytes]] = deque()
        self._forwarded: set[int] = set()
        self._num_interrupts = 0
        self._stop_deadline: float | None = None
        self._left = False
        self._failed = False
        self._exit_code: int | None = None  # once known, the loop ends
        # Rank 0 writes to the terminal from a background process group; `stty tostop` must not stop it for that.
        stack.callback(signal.signal, signal.SIGTTOU, signal.signal(signal.SIGTTOU, signal.SIG_IGN))
        self._inbox = stack.enter_context(SignalInbox(_SIGNALS))
        self._selector.register(self._inbox, selectors.EVENT_READ)

    def run(self) -> int:
        """Meet the other nodes, start the workers, and watch them to the end."""
        store_addr, store_port, store = self._meet()
        if self._exit_code is not None:
            return self._exit_code
        self._stack.callback(self._end_workers)
        self._start_workers(store_addr, store_port, store)
        while self._exit_code is None:
            self._wait()
            self._look_for_exits()
            self._look_for_silence()
            self._look_at_stop_deadline()
            self._show_held_lines()
            self._decide()
        return self._exit_code

    # --- the beginning -------------------------------------------------------------------------------------------

    def _meet(self) -> tuple[str, int, socket.socket | None]:
        """Agree with the other nodes on where the ranks meet; node 0 already listens there, so no port is raced for."""
        node = self._node
        if node.num_nodes == 1:
            only_store = self._stack.enter_context(listen(LOOPBACK, 0, backlog=_STORE_BACKLOG))
            return LOOPBACK, int(only_store.getsockname()[1]), only_store
        assert node.master_addr is not None
        timing = self._patience.timing
        store: socket.socket | None = None
        payload: Mapping[str, object] = {}
        if node.node_id == 0:
            number = listening_address(node.master_addr, all_on_this_host=False)
            listener = self._stack.enter_context(listen(number, node.master_port))
            store = self._stack.enter_context(listen(number, 0, backlog=_STORE_BACKLOG))
            payload = {"store_addr": number, "store_port": int(store.getsockname()[1])}
            self._control = Server(
                listener, self._hello, payload=payload, timing=timing, how_to_start=self._how_to_start
            )
        else:
            self._control = Client(node.master_addr, node.master_port, self._hello, timing=timing)
        self._stack.callback(self._control.close)
        self._selector.register(self._control, selectors.EVENT_READ)
        while not self._control.started:
            for key, _ in self._selector.select(0.1):
                if key.fileobj is self._inbox:
                    self._take_signals_before_start()
            if self._exit_code is not None:
                return "", 0, None
            for event in self._control.poll():
                payload = getattr(event, "payload", payload)
                self._take_event(event)
        address, port = payload.get("store_addr"), payload.get("store_port")
        if not isinstance(address, str) or not isinstance(port, int):
            raise StormoError("node 0 did not say where the ranks meet; use the same release of stormo on every node.")
        return address, port, store

    def _take_signals_before_start(self) -> None:
        for number in self._inbox.read():
            if number == signal.SIGINT:
                self._exit_code = EXIT_INTERRUPTED
            elif number != signal.SIGCHLD:
                self._exit_code = EXIT_RESUMABLE  # nothing was begun, so nothing is lost

    def _how_to_start(self, missing: Sequence[int]) -> str:
        return f"start there: {command_for(self._command, missing[0])}"

    def _start_workers(self, store_addr: str, store_port: int, store: socket.socket | None) -> None:
        num_cores = len(os.sched_getaffinity(0))
        for local_rank in range(self._node.num_workers):
            own, theirs = socket.socketpair()
            with theirs:
                is_main = self._node.rank(local_rank) == 0
                store_fd = store.fileno() if is_main and store is not None else None
                environ = local.environment(
                    self._node,
                    local_rank,
                    environ=self._environ,
                    store_addr=store_addr,
                    store_port=store_port,
                    channel_fd=theirs.fileno(),
                    store_fd=store_fd,
                    num_cores=num_cores,
                )
                try:
                    worker = Worker(
                        self._node.rank(local_rank),
                        self._command,
                        environ=environ,
                        channel=own,
                        pass_fds=[theirs.fileno()] + ([] if store_fd is None else [store_fd]),
                    )
                except OSError as error:
                    own.close()
                    raise StormoError(f"The command {self._command[0]} could not be started: {error}.") from error
            self._workers.append(worker)
            self._selector.register(worker.channel, selectors.EVENT_READ, worker)
            for stream in worker.streams:
                self._selector.register(stream, selectors.EVENT_READ, stream)
        if store is not None:
            store.close()  # rank 0 holds it now: when rank 0 is gone, nobody may still seem to listen

    # --- one round of the loop -----------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Sleep until something happens, and take it in."""
        busy = bool(self._held or self._signs)
        ready = [key for key, _ in self._selector.select(0.05 if busy else 0.25)]
        for key in ready:
            if key.fileobj is self._inbox:
                self._take_signals()
            elif isinstance(key.data, Worker):
                self._take_messages(key.data)
            elif isinstance(key.data, Stream):
                self._take_output(key.data)
        if self._control is not None:
            for event in self._control.poll():
                self._take_event(event)

    def _take_signals(self) -> None:
        for number in self._inbox.read():
            if number == signal.SIGCHLD:
                continue  # `_look_for_exits` looks at every worker anyway
            if number == signal.SIGINT:
                self._num_interrupts += 1
                if self._num_interrupts > 1:
                    self._stop_at_once()
                    return
                self._say("stopping after this step; press Ctrl-C again to stop at once")
            # A closed terminal means what SIGTERM means: save and stop.
            passed_on = signal.SIGTERM if number == signal.SIGHUP else number
            if passed_on == signal.SIGTERM and self._stop_deadline is None:
                self._stop_deadline = time.monotonic() + self._patience.stop_s
            self._forwarded.add(passed_on)
            for worker in self._workers:
                worker.send_signal(passed_on)

    def _stop_at_once(self) -> None:
        failure = Failure(
            kind="stopped",
            who=f"node {self._node.node_id}",
            host=self._hello.host,
            what="was stopped at once by Ctrl-C",
            exit_code=EXIT_INTERRUPTED,
        )
        self._end_with(Sign(failure=failure, weight=Weight.CAUSE, seen_at=time.monotonic()))

    def _take_messages(self, worker: Worker) -> None:
        now = time.monotonic()
        for message in worker.channel.receive():
            if worker.silent_since is not None:
                self._say(f"rank {worker.rank} (pid {worker.pid}) is back after {now - worker.silent_since:.0f} s")
                worker.silent_since = None
            worker.heard_at = now
            if message.get("event") == "bye":
                worker.said_bye = True
            elif message.get("event") == "failure" and worker.failure is None:
                failure = Failure.from_message(message)
                if failure is not None:
                    worker.failure = failure
                    weight = Weight.SECONDARY if failure.secondary else Weight.CAUSE
                    self._add(Sign(failure=failure, weight=weight, seen_at=now, rank=worker.rank))
        if worker.channel.closed:
            self._selector.unregister(worker.channel)
            worker.channel.close()
            worker.channel_closed_at = now

    def _take_output(self, stream: Stream) -> None:
        if stream.closed:  # found ready in the same round in which a failure had it read to its end
            return
        lines = stream.read()
        if stream.closed:
            self._selector.unregister(stream)
        self._pass_on(stream, lines)

    def _pass_on(self, stream: Stream, lines: Sequence[bytes]) -> None:
        """Write what goes to stdout; hold what goes to stderr for a moment."""
        if stream.target_fd != _STDERR:
            write_all(stream.target_fd, b"".join(lines))
            return
        now = time.monotonic()
        self._held.extend((now, stream, line) for line in lines)

    def _take_event(self, event: Event) -> None:
        now = time.monotonic()
        if isinstance(event, Reported):
            weight = Weight.SECONDARY if event.failure.secondary else Weight.CAUSE
            self._signs.append(Sign(failure=event.failure, weight=weight, seen_at=now, from_other_node=True))
        elif isinstance(event, RankEnded):
            self._endings.append(Ending(rank=event.rank, host=event.host, exit_code=event.exit_code))
        elif isinstance(event, Gone):
            failure = Failure(kind="gone", who=f"node {event.member}", host=event.host, what=event.why)
            # Noticed here first: the other nodes are yet to be told.
            self._signs.append(Sign(failure=failure, weight=Weight.CAUSE, seen_at=now))
        elif isinstance(event, Ended):
            self._exit_code = event.exit_code

    def _look_for_exits(self) -> None:
        for worker in self._workers:
            if not worker.look():
                continue
            code = worker.exit_code
            assert code is not None
            if worker.failure is not None:
                continue
            if is_orderly(code):
                self._endings.append(Ending(rank=worker.rank, host=self._hello.host, exit_code=code))
                if self._control is not None:
                    self._control.rank_ended(worker.rank, code)
                continue
            self._add(
                Sign(failure=self._describe(worker), weight=weigh(code), seen_at=worker.ended_at, rank=worker.rank)
            )

    def _describe(self, worker: Worker) -> Failure:
        """The end of a worker that never reported one."""
        code, rank, host = worker.exit_code, worker.rank, self._hello.host
        assert code is not None
        if code >= 0:
            return of_exit(code, rank=rank, host=host)
        if -code not in self._forwarded:
            return of_signal(-code, rank=rank, host=host)
        return Failure(
            kind="stopped",
            who=f"rank {rank}",
            host=host,
            what=f"was ended by {signal_name(-code)}, which reached it before it was ready to stop in order",
            exit_code=EXIT_INTERRUPTED if -code == signal.SIGINT else EXIT_FAILURE,
        )

    def _look_for_silence(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if not worker.running or worker.said_bye or worker.failure is not None:
                continue
            heard_at = worker.started_at if worker.heard_at is None else worker.heard_at
            silent_s = now - heard_at
            if silent_s <= min(self._timeout_s, self._patience.silent_warning_s):
                continue
            name = f"rank {worker.rank} (pid {worker.pid})"
            what = f"has sent no sign of life for {silent_s:.0f} s: {worker.state()}"
            if silent_s > self._timeout_s:
                worker.failure = Failure(kind="silent", who=name, host=self._hello.host, what=what)
                self._add(Sign(failure=worker.failure, weight=Weight.CAUSE, seen_at=now, rank=worker.rank))
            elif worker.heard_at is not None and worker.silent_since is None:  # before, it still loads its libraries
                worker.silent_since = heard_at
                self._say(f"{name} {what}")

    def _look_at_stop_deadline(self) -> None:
        if self._stop_deadline is None or time.monotonic() < self._stop_deadline:
            return
        late = [worker for worker in self._workers if worker.running]
        if not late:
            return
        names = ", ".join(str(worker.rank) for worker in late)
        states = "; ".join(f"rank {worker.rank} (pid {worker.pid}): {worker.state()}" for worker in late)
        failure = Failure(
            kind="stopped",
            who=f"rank{'s' if len(late) > 1 else ''} {names}",
            host=self._hello.host,
            what=f"did not end within {self._patience.stop_s:g} s of SIGTERM and had to be killed ({states})",
        )
        self._end_with(Sign(failure=failure, weight=Weight.CAUSE, seen_at=time.monotonic()))

    def _add(self, sign: Sign) -> None:
        self._signs.append(sign)
        if self._control is not None and sign.weight is Weight.SECONDARY:
            self._control.report(sign.failure)  # node 0 may know the cause

    def _show_held_lines(self) -> None:
        """Show the lines on stderr that have waited long enough, unless something is about to fail."""
        now = time.monotonic()
        if self._signs or any(self._is_vanishing(worker) for worker in self._workers):
            return
        while self._held and now - self._held[0][0] >= self._patience.hold_s:
            _, stream, line = self._held.popleft()
            stream.worker.last_lines.append(line)
            write_all(_STDERR, line)

    def _is_vanishing(self, worker: Worker) -> bool:
        """Whether a worker has closed its channel without a word: its end is about to be seen, and how it ended."""
        if worker.channel_closed_at is None or worker.said_bye or not worker.running:
            return False
        return time.monotonic() - worker.channel_closed_at < self._patience.settling.secondary_s

    # --- the end -------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """End the run when its cause is clear, or when every worker has ended in order."""
        now = time.monotonic()
        if self._exit_code is not None:
            return
        if self._signs:
            several = self._node.num_nodes > 1
            all_seen = not several and not any(worker.running for worker in self._workers)
            settling = self._patience.settling
            if several and self._node.node_id == 0:
                # Node 0 decides a little before the others would on their own, so that all name the same cause.
                settling = replace(settling, other_nodes_s=settling.other_nodes_s * 0.8)
            if all_seen or now >= decide_at(self._signs, settling, several_nodes=several):
                self._end_with(cause(self._signs, self._endings))
            return
        if self._left or any(worker.running for worker in self._workers):
            return
        open_pipes = any(not stream.closed for worker in self._workers for stream in worker.streams)
        if open_pipes and now - max(worker.ended_at for worker in self._workers) < self._patience.leftover_s:
            return
        code = combined_exit_code(worker.exit_code or 0 for worker in self._workers)
        if self._control is None:
            self._exit_code = code
        else:
            self._left = True
            self._control.leave(code)

    def _end_with(self, sign: Sign) -> None:
        """Tell the other nodes, end all workers of this one, and only then write: the cause comes first."""
        failure = sign.failure
        self._exit_code, self._failed = failure.exit_code, True
        for worker in self._workers:
            worker.kill()
        self._read_rest()
        if failure.kind in ("signal", "exit", "stopped") and sign.rank is not None:
            failure = replace(failure, details=self._last_lines(sign.rank))
        if self._control is not None and not sign.from_other_node:
            self._control.report(failure)
        _restore_terminal()
        shown = replace(failure, details="") if sign.from_other_node else failure
        write_all(_STDERR, shown.text().encode())
        # What the failed rank wrote last goes below its traceback; with no better cause than a complaint, all do.
        for _, stream, line in self._held:
            if sign.weight is Weight.SECONDARY or (failure.kind == "exception" and stream.worker.rank == sign.rank):
                write_all(_STDERR, line)
        self._held.clear()
        if self._control is not None:
            self._control.drain(1.0)

    def _last_lines(self, rank: int) -> str:
        worker = next(worker for worker in self._workers if worker.rank == rank)
        held = [line for _, stream, line in self._held if stream.worker is worker]
        num_lines = max(len(held), worker.last_lines.maxlen or 0)
        lines = [*worker.last_lines, *held][-num_lines:]
        text = printable(b"".join(lines).decode("utf-8", "replace"), 20_000)
        return f"Its last lines on stderr:\n{text}" if text.strip() else ""

    def _read_rest(self) -> None:
        """Read what ended workers have left in their pipes; a helper that escaped may keep one open."""
        deadline = time.monotonic() + 0.3
        streams = [stream for worker in self._workers for stream in worker.streams if not stream.closed]
        while streams and time.monotonic() < deadline:
            with selectors.DefaultSelector() as selector:
                for stream in streams:
                    selector.register(stream, selectors.EVENT_READ, stream)
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    self._take_output(key.data)
            streams = [stream for stream in streams if not stream.closed]

    def _end_workers(self) -> None:
        """Leave no process behind, whatever happened, and no line unshown that is not a consequence of a failure."""
        for worker in self._workers:
            worker.kill()
        deadline = time.monotonic() + _REAP_S
        for worker in self._workers:
            if not worker.reap(max(0.1, deadline - time.monotonic())):
                self._say(f"rank {worker.rank} (pid {worker.pid}) could not be ended: {worker.state()}")
        self._read_rest()
        for stream in (stream for worker in self._workers for stream in worker.streams):
            self._pass_on(stream, stream.finish())
        if not self._failed:
            write_all(_STDERR, b"".join(line for _, _, line in self._held))
        for worker in self._workers:
            worker.close()

    def _say(self, sentence: str) -> None:
        write_all(_STDERR, f"stormo: {sentence}\n".encode())


def command_for(command: Sequence[str], node_id: int) -> str:
    """The command line to type on another node."""
    words = list(command)
    if words[1:3] == ["-m", "stormo"]:
        words[:3] = ["stormo"]
    for position, word in enumerate(words):
        if word == "--node-id" and position + 1 < len(words):
            words[position + 1] = str(node_id)
            break
        if word.startswith("--node-id="):
            words[position] = f"--node-id={node_id}"
            break
    else:
        words += ["--node-id", str(node_id)]
    return shlex.join(words)


def _restore_terminal() -> None:
    """Show the cursor again and begin a new line: rank 0 may have been killed while it drew its progress."""
    if os.isatty(1):
        write_all(1, b"\x1b[?25h\n")
