"""The lifeline between ranks that a foreign launcher started: a failure in one ends all within seconds.

srun without -K, and some mpirun, let the others wait for ever. Rank 0 serves the control channel in a thread, at the
master port or, where the launcher itself listens there, on a fresh port that the caller makes known to the other ranks.
Over it the ranks also learn where torch's store is.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from stormo.errors import EXIT_FAILURE, StormoError
from stormo.launch.address import listen
from stormo.launch.client import Client
from stormo.launch.control import Control, Ended, Event, Go, Gone, Hello, RankEnded, RefusedError, Reported, Timing
from stormo.launch.environments.torchrun import note_failure
from stormo.launch.failure import Failure, of_exception
from stormo.launch.meeting_point import BACKLOG, MeetingPoint, address_of_rank_0, opened_by_rank_0, told_by_rank_0
from stormo.launch.place import Place
from stormo.launch.relay import write_all
from stormo.launch.secret import job_secret
from stormo.launch.server import Server
from stormo.launch.verdict import Ending, Settling, Sign, Weight, cause, decide_at

_STDERR = 2
_LONGEST_ADDRESS, _HIGHEST_PORT = 100, 65535
_POLL_S = 0.1
_BROKEN_S = 10.0  # after which a channel that only raises errors is given up
_SENT_S = 2.0  # for a report to be on its way
_SAME_SENTENCE_S = 0.5  # for another rank to show a sentence that all of them raise
_LINGER_S = 5.0  # for a failed rank to end by itself, and for rank 0 to wait for the others' goodbye


class Board(Protocol):
    """Where rank 0 says at which address it listens; anybody may read it there, and write."""

    def write(self, text: str) -> None:
        """Say it."""

    def read(self) -> str:
        """What was said last; empty where nothing was."""


class RanksLifeline:
    """One rank's end of the channel; a daemon thread owns it, so that a rank stuck in a collective still ends."""

    shows_failures = True

    def __init__(
        self,
        place: Place,
        *,
        timeout_s: float,
        board: Board | None = None,
        digest: str = "",
        options: Mapping[str, str] | None = None,
        timing: Timing | None = None,
        settling: Settling | None = None,
    ) -> None:
        self._place = place
        self._settling = settling or Settling()
        # A rank may hold the interpreter for long without being lost; a lost machine is noticed by the kernel.
        timing = timing or Timing(join_s=timeout_s, stalled_after_s=timeout_s)
        self._outbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._told = threading.Event()  # why the job ends is known, here or from another rank
        self._cause: Failure | None = None
        self._printing = threading.Lock()
        self._closing = threading.Event()
        self._all_came = threading.Event()
        self._all_left = threading.Event()
        self._signs: list[Sign] = []
        self._endings: list[Ending] = []
        self._exit_at: float | None = None
        self._step = 0
        self.meeting_point: MeetingPoint | None = None
        self._payload: Mapping[str, Any] = {}
        self._control = self._connect(board, timing, digest, options or {})
        os.register_at_fork(after_in_child=self._control.abandon)  # a forked helper must not keep the line open
        self._thread = threading.Thread(target=self._serve, name="stormo-lifeline", daemon=True)
        self._thread.start()
        # From here on every death is noticed. If they do not come together, the thread ends the process and says why.
        while not self._all_came.wait(0.5):
            assert self._thread.is_alive(), "the lifeline's thread has ended"
        if self.meeting_point is None:
            self.meeting_point = told_by_rank_0(place, self._payload)

    def _connect(self, board: Board | None, timing: Timing, digest: str, options: Mapping[str, str]) -> Control:
        place = self._place
        hello = Hello(member=place.rank, num_members=place.world_size, host=place.host, digest=digest, options=options)
        secret = job_secret(os.environ, place.master_port)
        if not place.is_main:
            look = None if board is None else lambda: _address_in(board.read())
            address = address_of_rank_0(place)
            return Client(address, place.master_port, hello, secret=secret, timing=timing, noun="rank", look=look)
        number = address_of_rank_0(place)
        listener = listen(number, place.master_port if board is None else 0, backlog=BACKLOG)
        self.meeting_point = opened_by_rank_0(place, number)
        payload = self.meeting_point.described()
        server = Server(listener, hello, secret=secret, timing=timing, noun="rank", payload=payload)
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
            if self._told.wait(self._settling.other_nodes_s + 0.5):
                time.sleep(_LINGER_S)  # the thread is about to end this process
                self._end_process(EXIT_FAILURE)
            failure = failure.as_cause()
        note_failure(os.environ, failure.sentence)
        failure = replace(failure, printed=True)
        self._exit_at = time.monotonic() + _LINGER_S
        self._cause = self._cause or failure
        with self._printing:
            write_all(_STDERR, failure.text().encode())
        self._send(failure)
        self._told.set()
        if secondary:
            self._end_process(EXIT_FAILURE)

    def alive(self, step: int) -> None:
        """Note progress; the channel's own heartbeat tells that this rank lives."""
        self._step = step

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
            sign = Sign(failure=failure, weight=Weight.SECONDARY, seen_at=time.monotonic(), rank=0)
            self._outbox.put(lambda: self._signs.append(sign))
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
        now = time.monotonic()
        if isinstance(event, Go):
            self._payload = event.payload
            self._all_came.set()
        elif isinstance(event, Reported):
            weight = Weight.SECONDARY if event.failure.secondary else Weight.CAUSE
            self._signs.append(Sign(failure=event.failure, weight=weight, seen_at=now, from_other_node=True))
        elif isinstance(event, RankEnded):
            self._endings.append(Ending(rank=event.rank, host=event.host, exit_code=event.exit_code))
        elif isinstance(event, Gone):
            failure = Failure(kind="gone", who=f"rank {event.member}", host=event.host, what=event.why)
            self._signs.append(Sign(failure=failure, weight=Weight.CAUSE, seen_at=now))
        elif isinstance(event, Ended):
            self._all_left.set()

    def _decide(self) -> None:
        """End this process when another rank is known to have failed, or its own failure was told long enough ago."""
        now = time.monotonic()
        if self._exit_at is not None and self._cause is not None:
            if now > self._exit_at:
                self._end_process(self._cause.exit_code)
            return
        if not self._signs:
            return
        settling = replace(self._settling, cause_s=0.0, other_nodes_s=self._settling.other_nodes_s * 0.8)
        if now < decide_at(self._signs, settling, several_nodes=True):
            return
        sign = cause(self._signs, self._endings)
        failure = sign.failure
        note_failure(os.environ, failure.sentence, is_cause=False)
        told_by_culprit = sign.from_other_node and sign.weight is Weight.CAUSE
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
                write_all(_STDERR, failure.text().encode())
            self._control.drain(_SENT_S)
            self._end_process(failure.exit_code)

    def _end_process(self, exit_code: int) -> None:
        """End now: the main thread may wait in a collective that will never return."""
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        flushing.join(0.5)  # the main thread may hold the lock of a stream
        os._exit(exit_code)


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
