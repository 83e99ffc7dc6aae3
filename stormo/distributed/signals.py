"""Asks a run to stop: SIGTERM, SIGUSR1 and Ctrl-C set a flag that the loop reads between steps.

Nothing is saved inside a handler. A second Ctrl-C ends the process at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from stormo.system.early_signals import hear_warning, stopping_text

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


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
