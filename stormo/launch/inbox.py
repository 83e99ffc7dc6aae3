"""Signals as something to wait on next to sockets and pipes: caught, written to a socket, read in the main loop.

Nothing is decided inside a signal handler, and no system call is cut short by one.
"""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Sequence
from types import FrameType
from typing import Any

from stormo.system.early_signals import hear_warning


class SignalInbox:
    """Collects the given signals while it is open; only the main thread may open one."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def __enter__(self) -> SignalInbox:
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
