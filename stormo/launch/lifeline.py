"""A rank's line to whoever must know that it lives, ends or fails: its agent, the other ranks, or nobody.

Standard library only, so that it can be taken up before anything heavy is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Protocol

from stormo.errors import EXIT_FAILURE
from stormo.launch.failure import of_exception
from stormo.launch.link import Link
from stormo.launch.local import CHANNEL_FD
from stormo.launch.meeting_point import MeetingPoint
from stormo.launch.place import Place
from stormo.launch.ranks import Board, RanksLifeline

_INSTALLED = (str(Path(__file__).parents[1]) + os.sep, str(Path(contextlib.__file__).parent), "<")
_PR_SET_PDEATHSIG = 1
_ALIVE_EVERY_S = 1.0
_LAST_WORDS_S = 2.0


class Lifeline(Protocol):
    """What a rank calls, whoever started it."""

    shows_failures: bool  # whether a reported failure is shown to the user, so that the caller need not
    meeting_point: MeetingPoint | None  # of which the other ranks have told; None where the environment does

    def report_failure(self, error: BaseException, *, secondary: bool) -> None:
        """Say that this rank fails; secondary when it only misses a peer. The caller ends the process after it."""

    def alive(self, step: int) -> None:
        """Note progress; cheap enough for every step."""

    def close(self) -> None:
        """Say that this rank ends in order."""


class NoLifeline:
    """For a process that is the whole job: nobody else needs to know."""

    shows_failures = False
    meeting_point: MeetingPoint | None = None

    def report_failure(self, error: BaseException, *, secondary: bool) -> None:
        """Nobody to tell; the caller shows the error."""

    def alive(self, step: int) -> None:
        """Nobody to tell."""

    def close(self) -> None:
        """Nobody to tell."""


class AgentLifeline:
    """To the agent of the node, over the socket it gave; ends the process when the agent is gone."""

    shows_failures = True
    meeting_point: MeetingPoint | None = None

    def __init__(self, place: Place, environ: MutableMapping[str, str]) -> None:
        self._place = place
        self._step: int | None = None
        self._closing = threading.Event()
        self._lock = threading.Lock()  # the thread below and the failing one may both send
        # Taken out of the environment: a program this worker starts is no worker.
        channel = socket.socket(fileno=int(environ.pop(CHANNEL_FD)))
        channel.set_inheritable(False)
        self._link = Link(channel)
        die_with_parent()
        os.register_at_fork(after_in_child=self._link.close)  # a forked helper must not keep the line open
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
            self._link.send(message)
            self._link.drain(_LAST_WORDS_S)

    def _keep_in_touch(self) -> None:
        while not self._closing.wait(_ALIVE_EVERY_S):
            self._send_alive()
            self._link.receive()
            if self._link.closed and not self._closing.is_set():
                _end_group()


def open_lifeline(
    place: Place,
    *,
    board: Board | None = None,
    timeout_s: float = 600.0,
    digest: str = "",
    options: Mapping[str, str] | None = None,
    environ: MutableMapping[str, str] | None = None,
) -> Lifeline:
    """The lifeline that fits a place.

    Args:
        board: under a launcher that listens at the master port itself, makes a text of rank 0 known to all ranks.
        timeout_s: for all ranks to come, and for a rank whose process no longer answers.
        digest: stands for everything that must be the same on all ranks.
        options: what the digest is made of, to name a difference.
    """
    if place.launcher == "local":
        return AgentLifeline(place, os.environ if environ is None else environ)
    if place.world_size == 1:
        return NoLifeline()
    return RanksLifeline(place, board=board, timeout_s=timeout_s, digest=digest, options=options)


def _line_of_script() -> str:
    """Where the main thread is, as `train.py line 40`: in a file that is not installed, or nowhere."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_INSTALLED) and not any(part in file for part in ("site-packages", "dist-packages")):
            return f"{Path(file).name} line {frame.f_lineno}"
        frame = frame.f_back
    return ""


def die_with_parent() -> None:
    """Have the kernel kill this process the moment its agent is gone, however that came about."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _end_group() -> None:
    """End this process and its helpers at once: the agent that would do so is gone."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(EXIT_FAILURE)
