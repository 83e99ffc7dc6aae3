"""Stop signals: SIGTERM, SIGUSR1 and Ctrl-C, as a flag that the training reads, or as a queue that an agent waits on.

Nothing is decided or saved inside a signal handler.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from stormo.system.early_signals import hear_warning, stopping_text

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class SignalQueue:
    """Collects the given signals while it is open; only the main thread may open one."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def __enter__(self) -> SignalQueue:
        # The interpreter writes the number of every caught signal here, however long the main thread is busy.
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in self._numbers:
            if signal.getsignal(number) == signal.SIG_IGN and number != signal.SIGCHLD:
                continue  # started under nohup, or in the background of a script
            self._before[number] = signal.signal(number, _note)
        hear_warning()
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
        """The signals that came, in order."""
        numbers = b""
        with contextlib.suppress(BlockingIOError):
            while chunk := self._reader.recv(4096):
                numbers += chunk
        return list(numbers)


def _note(number: int, frame: FrameType | None) -> None:
    """A handler must exist for the interpreter to write to the wakeup descriptor."""


class StopFlag:
    """The last stop signal that came, or 0."""

    def __init__(self, *, announces: bool = False, is_training: bool = True) -> None:
        self.signal_number = 0
        self.is_training = is_training  # steps are made, between which the flag is read
        self._announces = announces  # an agent does it for its workers

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Remember the signal; give up at once on a second Ctrl-C."""
        if number == signal.SIGINT and self.signal_number:  # whatever came first, this is somebody at the keyboard
            raise KeyboardInterrupt
        if number == signal.SIGINT and self._announces:
            os.write(2, f"\nstormo: {stopping_text(is_training=self.is_training)}\n".encode())
        self.signal_number = number


@contextmanager
def stop_flag(*, announces: bool = False, is_last: bool = False) -> Iterator[StopFlag]:
    """Turn stop signals into a flag while the body runs.

    `is_last`: nothing follows but the end of the process, which a late signal must not turn into a failure.
    """
    flag = StopFlag(announces=announces, is_training=False)
    before = {number: signal.signal(number, flag.handle) for number in STOP_SIGNALS}
    hear_warning()
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if is_last else handler)
