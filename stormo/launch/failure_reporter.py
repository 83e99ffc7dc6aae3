"""A rank's line to whoever must know that it lives, ends or fails: its agent, the other ranks, or nobody.

Under a foreign launcher the ranks watch each other, as srun without -K and some mpirun let survivors wait for ever.
Rank 0 serves the control channel in a thread, at the master port or, where the launcher itself listens there, on a
fresh port that the caller makes known. Over it the ranks also learn where torch's store is. Standard library only: all
this works before anything heavy is imported.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from stormo.errors import EXIT_FAILURE, StormoError
from stormo.launch.address import listen
from stormo.launch.auth import job_secret
from stormo.launch.client import Client
from stormo.launch.control import ChannelTimeouts, Ended, Event, Go, Hello, RefusedError
from stormo.launch.environments.local import CHANNEL_FD
from stormo.launch.environments.torchrun import note_failure
from stormo.launch.failure import Failure, of_exception
from stormo.launch.failure_collector import FailureCollector
from stormo.launch.json_socket import JsonSocket
from stormo.launch.output import STDERR, write_all
from stormo.launch.rank_info import RankInfo
from stormo.launch.rendezvous import BACKLOG, StoreAddress, open_store_address, rank_0_address, received_store_address
from stormo.launch.root_cause import MissingRank, SettleTimes, Severity
from stormo.launch.server import Server
from stormo.system.process import die_with_parent, process_state

_INSTALLED = (str(Path(__file__).parents[1]) + os.sep, str(Path(contextlib.__file__).parent), "<")
_ALIVE_EVERY_S = 1.0
_LAST_WORDS_S = 2.0
_LONGEST_ADDRESS, _HIGHEST_PORT = 100, 65535
_POLL_S = 0.1
_BROKEN_S = 10.0  # after which a channel that only raises errors is given up
_SENT_S = 2.0  # for a report to be on its way
_SAME_SENTENCE_S = 0.5  # for another rank to show a sentence that all of them raise
_LINGER_S = 5.0  # for a failed rank to end by itself, and for rank 0 to wait for the others' goodbye


class AddressBook(Protocol):
    """Where rank 0 says at which address it listens; anybody may read it there, and write."""

    def write(self, text: str) -> None:
        """Say it."""

    def read(self) -> str:
        """What was said last; empty where nothing was."""


class FailureReporter:
    """What a rank calls, whoever started it; here nobody is told."""

    shows_failures = False  # whether a reported failure is shown to the user, so that the caller need not
    store_address: StoreAddress | None = None  # of which rank 0 has told; None where the environment does

    def report_failure(self, error: BaseException, *, secondary: bool) -> None:
        """Say that this rank fails; secondary when it only misses a peer. The caller ends the process after it."""

    def alive(self, step: int) -> None:
        """Note progress; cheap enough for every step."""

    def close(self) -> None:
        """Say that this rank ends in order."""


class NoReporter(FailureReporter):
    """For a process that is the whole job."""


class AgentReporter(FailureReporter):
    """To the agent of the node, over the socket it gave; ends the process when the agent is gone."""

    shows_failures = True

    def __init__(self, place: RankInfo, environ: MutableMapping[str, str]) -> None:
        self._place = place
        self._step: int | None = None
        self._closing = threading.Event()
        self._lock = threading.Lock()  # the thread below and the failing one may both send
        # Taken out of the environment: a program this worker starts is no worker.
        channel = socket.socket(fileno=int(environ.pop(CHANNEL_FD)))
        channel.set_inheritable(False)
        self._socket = JsonSocket(channel)
        die_with_parent()
        os.register_at_fork(after_in_child=self._socket.close)  # a forked helper must not keep the line open
        self._send_alive()
        self._thread = threading.Thread(target=self._keep_in_touch, name="stormo-lifeline", daemon=True)
        self._thread.start()

    def report_failure(self, error: BaseException, *, secondary: bool) -> None:
        """Tell the agent, which finds the cause, shows it, and ends the others."""
        failure = of_exception(error, rank=self._place.rank, host=self._place.host, secondary=secondary)
        self._send({"event": "failure", **failure.to_message()})

    def alive(self, step: int) -> None:
        """Note progress; the thread tells the agent once a second, and of the first at once."""
        is_first, self._step = self._step is None, step
        if is_first:
            self._send_alive()

    def close(self) -> None:
        """Say that this rank ends in order; the line itself ends with the process, as a script may fail after that."""
        if not self._closing.is_set():
            self._send({"event": "bye"})
            self._closing.set()
            self._thread.join(_LAST_WORDS_S)

    def _send_alive(self) -> None:
        message: dict[str, object] = {"event": "alive", "line": _line_of_script()}
        self._send(message if self._step is None else {**message, "step": self._step})

    def _send(self, message: dict[str, object]) -> None:
        with self._lock:
            self._socket.send(message)
            self._socket.drain(_LAST_WORDS_S)

    def _keep_in_touch(self) -> None:
        while not self._closing.wait(_ALIVE_EVERY_S):
            self._send_alive()
            self._socket.receive()
            if self._socket.closed and not self._closing.is_set():
                _end_group()


class _PeerFailures(FailureCollector):
    """The failures that a rank without an agent knows of; rank 0 hears of all."""

    def __init__(self, place: RankInfo, control: Client | Server, settle: SettleTimes) -> None:
        # Rank 0 decides a little before the others would on their own.
        settle = replace(settle, cause_s=0.0, other_nodes_s=0.8 * settle.other_nodes_s)
        super().__init__(settle, noun="rank", several_nodes=True)
        self._place = place
        self._control = control

    def _missing(self, waiting: set[int]) -> list[MissingRank]:
        if not isinstance(self._control, Server):
            return []
        host, step = self._place.host, self._control.step
        found = [MissingRank(rank=0, host=host, state=_state_of(os.getpid(), step))]
        for peer in self._control.running():
            if peer.member is not None:
                found.append(MissingRank(rank=peer.member, host=peer.host, state=_state_of(peer.pid, peer.step)))
        return [one for one in found if one.rank not in waiting]


def _state_of(pid: int | None, step: int | None) -> str:
    """What is known of a rank, to follow its name."""
    at = "" if step is None else f"is at step {step}"
    if pid is None:
        return at
    return f"(pid {pid}){' ' if at else ''}{at}: {process_state(pid)}"


class PeerReporter(FailureReporter):
    """One rank's end of the channel; a daemon thread owns it, so that a rank stuck in a collective still ends."""

    shows_failures = True

    def __init__(
        self,
        place: RankInfo,
        *,
        timeout_s: float,
        board: AddressBook | None = None,
        digest: str = "",
        options: Mapping[str, str] | None = None,
        timeouts: ChannelTimeouts | None = None,
        settle: SettleTimes | None = None,
    ) -> None:
        self._place = place
        self._settle = settle or SettleTimes()
        # A rank may hold the interpreter for long without being lost; a lost machine is noticed by the kernel.
        timeouts = timeouts or ChannelTimeouts(join_s=timeout_s, stalled_after_s=timeout_s)
        self._outbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._told = threading.Event()  # why the job ends is known, here or from another rank
        self._cause: Failure | None = None
        self._printing = threading.Lock()
        self._closing = threading.Event()
        self._all_came = threading.Event()
        self._all_left = threading.Event()
        self._exit_at: float | None = None
        self._payload: Mapping[str, Any] = {}
        hello = Hello(
            member=place.rank, num_members=place.world_size, host=place.host, digest=digest, options=options or {}
        )
        self._control = self._connect(board, timeouts, hello)
        self._failures = _PeerFailures(place, self._control, self._settle)
        os.register_at_fork(after_in_child=self._control.abandon)  # a forked helper must not keep the line open
        self._thread = threading.Thread(target=self._serve, name="stormo-lifeline", daemon=True)
        self._thread.start()
        # From here on every death is noticed. If they do not come together, the thread ends the process and says why.
        while not self._all_came.wait(0.5):
            assert self._thread.is_alive(), "the lifeline's thread has ended"
        if self.store_address is None:
            self.store_address = received_store_address(place, self._payload)

    def _connect(self, board: AddressBook | None, timeouts: ChannelTimeouts, hello: Hello) -> Client | Server:
        place = self._place
        secret = job_secret(os.environ, place.master_port)
        if not place.is_main:
            look = None if board is None else lambda: _address_in(board.read())
            address = rank_0_address(place)
            return Client(address, place.master_port, hello, secret=secret, timeouts=timeouts, noun="rank", look=look)
        number = rank_0_address(place)
        listener = listen(number, place.master_port if board is None else 0, backlog=BACKLOG)
        self.store_address = open_store_address(place, number)
        payload = self.store_address.described()
        server = Server(listener, hello, secret=secret, timeouts=timeouts, noun="rank", payload=payload)
        if board is not None:
            board.write(f"{number} {listener.getsockname()[1]}")
        return server

    # --- what the rank calls -------------------------------------------------------------------------------------

    def report_failure(self, error: BaseException, *, secondary: bool) -> None:
        """Show why this rank fails and end the others; a rank that only misses a peer leaves that to the culprit.

        Returns for the caller to end the process, except in a rank whose failure is not the cause: that one ends here.
        """
        place = self._place
        failure = of_exception(error, rank=place.rank, host=place.host, secondary=secondary)
        if failure.kind == "setting":
            if not place.is_main and self._told.wait(_SAME_SENTENCE_S):
                self._end_process(failure.exit_code)
        elif secondary:
            self._complain(failure)
            # Rank 0 decides, a little earlier than the others would on their own.
            if self._told.wait(self._settle.other_nodes_s + 0.5):
                time.sleep(_LINGER_S)  # the thread is about to end this process
                self._end_process(EXIT_FAILURE)
            failure = failure.as_cause()
        note_failure(os.environ, failure.sentence)
        failure = replace(failure, printed=True)
        self._exit_at = time.monotonic() + _LINGER_S
        self._cause = self._cause or failure
        with self._printing:
            write_all(STDERR, failure.text().encode())
        self._send(failure)
        self._told.set()
        if secondary:
            self._end_process(EXIT_FAILURE)

    def alive(self, step: int) -> None:
        """Note progress; the channel's own heartbeat tells it."""
        self._control.step = step

    def close(self) -> None:
        """Say that this rank ends in order; rank 0 waits a moment for the others to say so too."""
        if self._closing.is_set():
            return
        self._outbox.put(self._say_goodbye)
        if self._place.is_main:
            self._all_left.wait(_LINGER_S)
        self._closing.set()
        self._thread.join(_LINGER_S)

    def _say_goodbye(self) -> None:
        self._control.rank_ended(self._place.rank, 0)
        self._control.leave(0)

    def _complain(self, failure: Failure) -> None:
        if self._place.is_main:
            self._outbox.put(lambda: self._failures.add(failure))
        else:
            self._send(failure)

    def _send(self, failure: Failure) -> None:
        if self._closing.is_set():  # this rank has left, and nobody listens to it any more
            return
        sent = threading.Event()

        def send() -> None:
            self._control.report(failure)
            self._control.drain(_SENT_S)
            sent.set()

        self._outbox.put(send)
        sent.wait(_SENT_S)

    # --- what the thread does ------------------------------------------------------------------------------------

    def _serve(self) -> None:
        broken_since: float | None = None
        try:
            while not self._closing.is_set():
                try:
                    for event in self._control.poll(_POLL_S):
                        self._take(event)
                    self._empty_outbox()
                    broken_since = None
                except OSError as error:  # a connection that broke as it was made, no descriptors left, ...
                    broken_since = broken_since or time.monotonic()
                    if time.monotonic() - broken_since > _BROKEN_S:
                        raise StormoError(
                            f"rank {self._place.rank} cannot hear the other ranks any more: {error}."
                        ) from error
                    time.sleep(_POLL_S)
                self._decide()
            self._empty_outbox()
            self._control.dismiss()
            self._control.close()
        except StormoError as error:  # the ranks did not come together, or do not fit
            failure = Failure(
                kind="setting",
                who=f"rank {self._place.rank}",
                host=self._place.host,
                what=str(error),
                exit_code=error.exit_code,
            )
            self._end_with(failure, print_here=self._place.is_main or not isinstance(error, RefusedError))

    def _empty_outbox(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._outbox.get_nowait()()

    def _take(self, event: Event) -> None:
        if isinstance(event, Go):
            self._payload = event.payload
            self._all_came.set()
        elif isinstance(event, Ended):
            self._all_left.set()
        else:
            self._failures.take_event(event)

    def _decide(self) -> None:
        """End this process when another rank is known to have failed, or its own failure was told long enough ago."""
        now = time.monotonic()
        if self._exit_at is not None and self._cause is not None:
            if now > self._exit_at:
                self._end_process(self._cause.exit_code)
            return
        found = self._failures.root_cause() if self._failures else None
        if found is None:
            return
        failure = found.failure
        note_failure(os.environ, failure.sentence, is_cause=False)
        told_by_culprit = found.from_other and found.severity is Severity.CAUSE
        if self._place.is_main:
            if not told_by_culprit:
                self._control.report(replace(failure, printed=True))  # noticed or decided here: tell the others
            self._end_with(failure, print_here=not failure.printed)
        else:
            # The culprit shows its own failure, or else rank 0 does, or else, when that one has vanished, rank 1.
            self._end_with(failure, print_here=not told_by_culprit and self._place.rank == 1)

    def _end_with(self, failure: Failure, *, print_here: bool) -> None:
        self._cause = failure
        self._told.set()
        with self._printing:  # a failure of this rank's own that is being shown is shown to its end
            if print_here:
                write_all(STDERR, failure.text().encode())
            self._control.drain(_SENT_S)
            self._end_process(failure.exit_code)

    def _end_process(self, exit_code: int) -> None:
        """End now: the main thread may wait in a collective that will never return."""
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        flushing.join(0.5)  # the main thread may hold the lock of a stream
        os._exit(exit_code)


def open_failure_reporter(
    place: RankInfo,
    *,
    board: AddressBook | None = None,
    timeout_s: float = 600.0,
    digest: str = "",
    options: Mapping[str, str] | None = None,
    environ: MutableMapping[str, str] | None = None,
) -> FailureReporter:
    """The lifeline that fits a place.

    Args:
        board: under a launcher that listens at the master port itself, makes a text of rank 0 known to all ranks.
        timeout_s: for all ranks to come, and for a rank whose process no longer answers.
        digest: stands for everything that must be the same on all ranks.
        options: what the digest is made of, to name a difference.
    """
    if place.launcher == "local":
        return AgentReporter(place, os.environ if environ is None else environ)
    if place.world_size == 1:
        return NoReporter()
    return PeerReporter(place, board=board, timeout_s=timeout_s, digest=digest, options=options)


def _line_of_script() -> str:
    """Where the main thread is, as `train.py line 40`: in a file that is not installed, or nowhere."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_INSTALLED) and not any(part in file for part in ("site-packages", "dist-packages")):
            return f"{Path(file).name} line {frame.f_lineno}"
        frame = frame.f_back
    return ""


def _end_group() -> None:
    """End this process and its helpers at once: the agent that would do so is gone."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(EXIT_FAILURE)


def _address_in(text: str) -> tuple[str, int] | None:
    """The numeric address and the port that a text names, if it does."""
    address, _, port = text[:_LONGEST_ADDRESS].partition(" ")
    with contextlib.suppress(ValueError):
        if 0 < int(port) <= _HIGHEST_PORT:
            return str(ipaddress.ip_address(address)), int(port)
    return None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
