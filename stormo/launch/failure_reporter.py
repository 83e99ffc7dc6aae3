"""Reports a rank's heartbeat, exit or failure to its agent, to the other ranks, or to nobody.

Under another launcher the ranks watch each other, as srun without -K and some mpirun let survivors wait for ever.
Rank 0 serves the control channel in a thread, at the master port or, where the launcher listens there, at a new port
that the address book names. Over it the ranks also learn where torch's store is. Imports only the standard library, so
that it works before torch is imported.
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
from types import FrameType
from typing import Any, Protocol

from stormo.errors import EXIT_FAILURE, StormoError
from stormo.launch.address import listen
from stormo.launch.auth import job_secret
from stormo.launch.client import Client
from stormo.launch.control import ChannelTimeouts, Ended, Event, Go, Hello, RefusedError
from stormo.launch.environments.local import CHANNEL_FD
from stormo.launch.environments.torchrun import note_failure
from stormo.launch.failure import Failure, of_exception
from stormo.launch.json_socket import JsonSocket
from stormo.launch.output import STDERR, write_all
from stormo.launch.rank_info import RankInfo
from stormo.launch.rendezvous import BACKLOG, StoreAddress, open_store_address, rank_0_address, received_store_address
from stormo.launch.root_cause import FailureCollector, MissingRank, SettleTimes, Severity
from stormo.launch.server import Server
from stormo.system.process import die_with_parent, process_state

PACKAGE = str(Path(__file__).parents[1]) + os.sep
_INSTALLED = (PACKAGE, str(Path(contextlib.__file__).parent), "<")
_ALIVE_EVERY_S = 1.0
_SEND_TIMEOUT_S = 2.0
_LONGEST_ADDRESS, _HIGHEST_PORT = 100, 65535
_POLL_S = 0.1
_BROKEN_S = 10.0  # after which a channel that only raises errors is given up
_SAME_ERROR_S = 0.5  # for another rank to show an error that all of them raise
_LINGER_S = 5.0  # for a failed rank to exit, and for rank 0 to wait until the others leave


class AddressBook(Protocol):
    """Where rank 0 writes at which address it listens; untrusted, as anybody may write there."""

    def write(self, text: str) -> None:
        """Write the address."""

    def read(self) -> str:
        """What was written last; empty before."""


class FailureReporter:
    """What a rank calls, whoever started it; this one reports to nobody."""

    shows_failures = False  # whether a reported failure is shown to the user, so that the caller need not
    store_address: StoreAddress | None = None  # from rank 0; None where the environment has it

    def report_failure(self, error: BaseException, *, secondary: bool) -> None:
        """Report that this rank fails; secondary when it only misses a peer. The caller then ends the process."""

    def alive(self, step: int) -> None:
        """Report progress; cheap enough for every step."""

    def close(self) -> None:
        """Report that this rank exits cleanly."""


class AgentReporter(FailureReporter):
    """Reports to the agent of the node over an inherited socket; ends the process when the agent is gone."""

    shows_failures = True

    def __init__(self, info: RankInfo, environ: MutableMapping[str, str]) -> None:
        self._info = info
        self._step: int | None = None
        self._closing = threading.Event()
        self._lock = threading.Lock()  # the thread below and the failing one may both send
        # Taken out of the environment: a program this worker starts is no worker.
        channel = socket.socket(fileno=int(environ.pop(CHANNEL_FD)))
        channel.set_inheritable(False)
        self._socket = JsonSocket(channel)
        die_with_parent()
        os.register_at_fork(after_in_child=self._socket.close)  # a forked helper must not keep it open
        self._send_alive()
        self._thread = threading.Thread(target=self._send_heartbeats, name="stormo-reporter", daemon=True)
        self._thread.start()

    def report_failure(self, error: BaseException, *, secondary: bool) -> None:
        """Report to the agent, which finds the cause, shows it, and ends the others."""
        failure = of_exception(error, rank=self._info.rank, host=self._info.host, secondary=secondary)
        self._send({"event": "failure", **failure.to_message()})

    def alive(self, step: int) -> None:
        """Note progress; the thread reports it once a second, and the first step at once."""
        is_first, self._step = self._step is None, step
        if is_first:
            self._send_alive()

    def close(self) -> None:
        """Report that this rank exits cleanly; the socket stays open, as a script may fail after that."""
        if not self._closing.is_set():
            self._send({"event": "bye"})
            self._closing.set()
            self._thread.join(_SEND_TIMEOUT_S)

    def _send_alive(self) -> None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        message: dict[str, object] = {"event": "alive", "line": line_of(frame, is_installed)}
        self._send(message if self._step is None else {**message, "step": self._step})

    def _send(self, message: dict[str, object]) -> None:
        with self._lock:
            self._socket.send(message)
            self._socket.drain(_SEND_TIMEOUT_S)

    def _send_heartbeats(self) -> None:
        while not self._closing.wait(_ALIVE_EVERY_S):
            self._send_alive()
            self._socket.receive()
            if self._socket.closed and not self._closing.is_set():
                _end_group()


def _state_of(pid: int | None, step: int | None) -> str:
    """What is known of a rank; follows its name."""
    at = "" if step is None else f"is at step {step}"
    if pid is None:
        return at
    return f"(pid {pid}){' ' if at else ''}{at}: {process_state(pid)}"


class PeerReporter(FailureReporter):
    """Reports to the other ranks; a daemon thread owns the channel, so that a rank stuck in a collective still ends."""

    shows_failures = True

    def __init__(
        self,
        info: RankInfo,
        *,
        timeout_s: float,
        address_book: AddressBook | None = None,
        digest: str = "",
        options: Mapping[str, str] | None = None,
        timeouts: ChannelTimeouts | None = None,
        settle: SettleTimes | None = None,
    ) -> None:
        self._info = info
        self._settle = settle or SettleTimes()
        # A rank may hold the interpreter lock for long without being lost; the kernel notices a lost machine.
        timeouts = timeouts or ChannelTimeouts(join_s=timeout_s, stalled_after_s=timeout_s)
        self._outbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._cause_known = threading.Event()
        self._cause: Failure | None = None
        self._printing = threading.Lock()
        self._closing = threading.Event()
        self._all_joined = threading.Event()
        self._all_left = threading.Event()
        self._exit_at: float | None = None
        self._payload: Mapping[str, Any] = {}
        hello = Hello(
            member=info.rank, num_members=info.world_size, host=info.host, digest=digest, options=options or {}
        )
        self._control = self._connect(address_book, timeouts, hello)
        settle = replace(self._settle, cause_s=0.0)
        self._failures = FailureCollector(settle, noun="rank", several_nodes=True, is_first=info.is_main)
        os.register_at_fork(after_in_child=self._control.abandon)  # a forked helper must not keep it open
        self._thread = threading.Thread(target=self._serve, name="stormo-reporter", daemon=True)
        self._thread.start()
        # From here on every death is noticed. If not all ranks join, the thread ends the process and says why.
        while not self._all_joined.wait(0.5):
            assert self._thread.is_alive(), "the reporter's thread has ended"
        if self.store_address is None:
            self.store_address = received_store_address(info, self._payload)

    def _connect(self, address_book: AddressBook | None, timeouts: ChannelTimeouts, hello: Hello) -> Client | Server:
        info = self._info
        secret, address = job_secret(os.environ, info.master_port), rank_0_address(info)
        if not info.is_main:
            look = None if address_book is None else lambda: _address_in(address_book.read())
            return Client(
                address, info.master_port, hello, secret=secret, timeouts=timeouts, noun="rank", find_server=look
            )
        listener = listen(address, info.master_port if address_book is None else 0, backlog=BACKLOG)
        self.store_address = open_store_address(info, address)
        payload = self.store_address.described()
        server = Server(listener, hello, secret=secret, timeouts=timeouts, noun="rank", payload=payload)
        if address_book is not None:
            address_book.write(f"{address} {listener.getsockname()[1]}")
        return server

    # --- what the rank calls -------------------------------------------------------------------------------------

    def report_failure(self, error: BaseException, *, secondary: bool) -> None:
        """Show why this rank fails and end the others; one that only misses a peer first waits for the cause.

        Returns for the caller to end the process, except where the failure is not the cause: then it ends here.
        """
        info = self._info
        failure = of_exception(error, rank=info.rank, host=info.host, secondary=secondary)
        if failure.kind == "setting":
            if not info.is_main and self._cause_known.wait(_SAME_ERROR_S):
                self._end_process(failure.exit_code)
        elif secondary:
            self._complain(failure)
            if self._cause_known.wait(self._settle.other_nodes_s + 0.5):
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
        self._cause_known.set()
        if secondary:
            self._end_process(EXIT_FAILURE)

    def alive(self, step: int) -> None:
        """Note progress, which the next heartbeat reports."""
        self._control.step = step

    def close(self) -> None:
        """Report that this rank exits cleanly; rank 0 waits a moment for the others."""
        if self._closing.is_set():
            return
        self._outbox.put(self._leave)
        if self._info.is_main:
            self._all_left.wait(_LINGER_S)
        self._closing.set()
        self._thread.join(_LINGER_S)

    def _leave(self) -> None:
        self._control.rank_ended(self._info.rank, 0)
        self._control.leave(0)

    def _complain(self, failure: Failure) -> None:
        if self._info.is_main:
            self._outbox.put(lambda: self._failures.add(failure))
        else:
            self._send(failure)

    def _send(self, failure: Failure) -> None:
        if self._closing.is_set():  # this rank has left
            return
        sent = threading.Event()

        def send() -> None:
            self._control.report(failure)
            self._control.drain(_SEND_TIMEOUT_S)
            sent.set()

        self._outbox.put(send)
        sent.wait(_SEND_TIMEOUT_S)

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
                        raise StormoError(f"rank {self._info.rank} has lost the control channel: {error}.") from error
                    time.sleep(_POLL_S)
                self._decide()
            self._empty_outbox()
            self._control.dismiss()
            self._control.close()
        except StormoError as error:  # not all ranks joined, or they do not fit
            failure = Failure(
                kind="setting",
                who=f"rank {self._info.rank}",
                host=self._info.host,
                what=str(error),
                exit_code=error.exit_code,
            )
            self._end_with(failure, print_here=self._info.is_main or not isinstance(error, RefusedError))

    def _empty_outbox(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._outbox.get_nowait()()

    def _take(self, event: Event) -> None:
        if isinstance(event, Go):
            self._payload = event.payload
            self._all_joined.set()
        elif isinstance(event, Ended):
            self._all_left.set()
        else:
            self._failures.add_event(event)

    def _decide(self) -> None:
        """End this process when another rank has failed, or when its own failure was reported long enough ago."""
        now = time.monotonic()
        if self._exit_at is not None and self._cause is not None:
            if now > self._exit_at:
                self._end_process(self._cause.exit_code)
            return
        found = self._failures.root_cause(self._running) if self._failures else None
        if found is None:
            return
        failure = found.failure
        note_failure(os.environ, failure.sentence, is_cause=False)
        reported_by_failed_rank = found.from_other and found.severity is Severity.CAUSE
        if self._info.is_main:
            if not reported_by_failed_rank:
                self._control.report(replace(failure, printed=True))  # noticed or decided here
            self._end_with(failure, print_here=not failure.printed)
        else:
            # The failed rank shows its failure; else rank 0 does; else, when that one has vanished, rank 1.
            self._end_with(failure, print_here=not reported_by_failed_rank and self._info.rank == 1)

    def _running(self) -> list[MissingRank]:
        """The ranks that run, as rank 0 knows them."""
        if not isinstance(self._control, Server):
            return []
        own = MissingRank(rank=0, host=self._info.host, state=_state_of(os.getpid(), self._control.step))
        others = [
            MissingRank(rank=peer.member, host=peer.host, state=_state_of(peer.pid, peer.step))
            for peer in self._control.running()
            if peer.member is not None
        ]
        return [own, *others]

    def _end_with(self, failure: Failure, *, print_here: bool) -> None:
        self._cause = failure
        self._cause_known.set()
        with self._printing:  # a failure of this rank's own that is being shown is shown to its end
            if print_here:
                write_all(STDERR, failure.text().encode())
            self._control.drain(_SEND_TIMEOUT_S)
            self._end_process(failure.exit_code)

    def _end_process(self, exit_code: int) -> None:
        """End now: the main thread may wait in a collective that will never return."""
        flushing = threading.Thread(target=flush_streams, daemon=True)
        flushing.start()
        flushing.join(0.5)  # the main thread may hold the lock of a stream
        os._exit(exit_code)


def open_failure_reporter(
    info: RankInfo,
    *,
    address_book: AddressBook | None = None,
    timeout_s: float = 600.0,
    digest: str = "",
    options: Mapping[str, str] | None = None,
    environ: MutableMapping[str, str] | None = None,
) -> FailureReporter:
    """The reporter for a rank.

    Args:
        address_book: names the port of rank 0 where the launcher itself listens at the master port.
        timeout_s: for all ranks to join, and for a rank whose process no longer answers.
        digest: of everything that must be the same on all ranks.
        options: what the digest is made of, to name a difference.
    """
    if info.launcher == "local":
        return AgentReporter(info, os.environ if environ is None else environ)
    if info.world_size == 1:
        return FailureReporter()
    return PeerReporter(info, address_book=address_book, timeout_s=timeout_s, digest=digest, options=options)


def line_of(frame: FrameType | None, is_left_out: Callable[[str], bool]) -> str:
    """The innermost line, as `train.py line 40`, in a file that is not left out; empty where there is none."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_left_out(file):
            return f"{Path(file).name} line {frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_installed(file: str) -> bool:
    """Whether a file is stormo's, Python's, or of an installed package."""
    return file.startswith(_INSTALLED) or "site-packages" in file or "dist-packages" in file


def _end_group() -> None:
    """Kill this process and its helpers: the agent that would do so is gone."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(EXIT_FAILURE)


def _address_in(text: str) -> tuple[str, int] | None:
    """The numeric address and the port in a text, if there are."""
    address, _, port = text[:_LONGEST_ADDRESS].partition(" ")
    with contextlib.suppress(ValueError):
        if 0 < int(port) <= _HIGHEST_PORT:
            return str(ipaddress.ip_address(address)), int(port)
    return None


def flush_streams() -> None:
    """Write what was printed; a stream that cannot be written to is left alone."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
