"""Stop signals (SIGTERM, SIGUSR1, Ctrl-C): before torch is imported, as a flag for training, as a queue for an agent.

Nothing is decided or saved inside a signal handler.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from stormo.errors import EXIT_INTERRUPTED, EXIT_RESUMABLE

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
BY_SCRIPT = 1  # a stop without a signal; below every number in STOP_SIGNALS
_QUEUED = (signal.SIGCHLD, *STOP_SIGNALS, signal.SIGHUP)
_deferred: list[int] = []
_had_listener: list[bool] = []


# --- before anybody listens: torch imports for seconds; no signal may be lost or break an import ----------------------


def defer_sigusr1() -> None:
    """Keep SIGUSR1, whose default would end this process, until somebody listens."""
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, lambda number, _: _deferred.append(number))


def deliver_sigusr1() -> None:
    """Raise the deferred signal again, now that somebody listens."""
    _had_listener.append(True)
    if _deferred:
        _deferred.clear()
        signal.raise_signal(signal.SIGUSR1)


def exit_if_sigusr1_came() -> None:
    """Exit as resumable if the signal was deferred and nobody will listen."""
    if _deferred:
        _exit_resumable(signal.SIGUSR1)


def exit_on_sigterm() -> None:
    """Until somebody listens, SIGTERM exits as resumable: nothing has been done yet."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


def exit_on_sigint() -> None:
    """Until somebody listens, Ctrl-C exits at once; torch's imports would swallow an exception, or break by it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_sigint)


def _on_sigterm(number: int, _: FrameType | None) -> None:
    if _had_listener:  # it has left: there is nothing to save
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
        return
    _exit_resumable(signal.SIGTERM)


def _on_sigint(number: int, frame: FrameType | None) -> None:
    if _had_listener:
        signal.default_int_handler(number, frame)
    os._exit(EXIT_INTERRUPTED)


def _exit_resumable(number: signal.Signals) -> None:
    text = f"stormo: stopped by {number.name} before training began; the same command starts it again\n"
    os.write(2, text.encode())
    os._exit(EXIT_RESUMABLE)  # an exception would be taken for one of the file that is being imported


# --- in the training, or in a script ----------------------------------------------------------------------------------


def stopping_text(*, is_training: bool | None) -> str:
    """The answer to the first Ctrl-C; None: a script decides."""
    if is_training is None:
        when = "where the script next reads world.stop_requested, or now if it has not read it before"
    else:
        when = "after this step" if is_training else "after the first step at the latest"
    return f"stopping {when}; press Ctrl-C again to stop at once"


class StopFlag:
    """The last stop signal that came; BY_SCRIPT if only the script has asked for a stop, else 0."""

    def __init__(self, *, announces: bool = False, is_training: bool | None = None) -> None:
        self.signal_number = 0
        self.is_training = is_training  # whether steps have begun; None in a script
        self._announces = announces  # an agent does it for its workers
        self._listens = False

    def listen(self) -> None:
        """From now on a signal is noted, and no longer ends the process; Python lets only the main thread do this."""
        if not self._listens and threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                signal.signal(number, self.handle)
            self._listens = True

    def request(self) -> None:
        """Stop without a signal."""
        self.signal_number = self.signal_number or BY_SCRIPT

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Remember the signal; a second Ctrl-C, or one after another signal, raises KeyboardInterrupt."""
        if number == signal.SIGINT and self.signal_number > BY_SCRIPT:
            raise KeyboardInterrupt
        if number == signal.SIGINT and self._announces:
            os.write(2, f"\nstormo: {stopping_text(is_training=self.is_training)}\n".encode())
        self.signal_number = number


@contextmanager
def stop_flag(*, announces: bool = False) -> Iterator[StopFlag]:
    """Turn stop signals into a flag while the body runs; then the process ends, which a late signal does not change."""
    flag = StopFlag(announces=announces, is_training=False)
    flag.listen()
    deliver_sigusr1()
    try:
        yield flag
    finally:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


# --- in an agent ------------------------------------------------------------------------------------------------------


class SignalQueue:
    """Collects stop signals, SIGHUP and SIGCHLD while it is open; only the main thread may open one."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def __enter__(self) -> SignalQueue:
        # The interpreter writes the number of every handled signal here, even while the main thread is busy.
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in _QUEUED:
            if signal.getsignal(number) == signal.SIG_IGN and number != signal.SIGCHLD:
                continue  # started under nohup, or in the background of a script
            self._before[number] = signal.signal(number, lambda *_: None)  # without a handler nothing is written
        deliver_sigusr1()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._reader.fileno()

    def read(self) -> list[int]:
        """The stop signals that came, in order; SIGHUP, of a closed terminal, counts as SIGTERM."""
        numbers = b""
        with contextlib.suppress(BlockingIOError):
            while chunk := self._reader.recv(4096):
                numbers += chunk
        return [signal.SIGTERM if number == signal.SIGHUP else number for number in numbers if number != signal.SIGCHLD]
