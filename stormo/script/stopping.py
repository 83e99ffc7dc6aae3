"""A script that is asked to stop: by a signal that any of its workers gets, or by one of them."""

from __future__ import annotations

import signal
import threading

from stormo.errors import EXIT_INTERRUPTED, EXIT_RESUMABLE
from stormo.launch.signals import STOP_SIGNALS, StopFlag

_ASKED_BY_SCRIPT = 1  # below every signal's number


class Stopping:
    """What one worker knows of it, to be told to the others with its next announcement."""

    def __init__(self, *, announces: bool) -> None:
        self._flag = StopFlag(announces=announces)
        self._asked = 0
        self._listens = False

    def wanted(self) -> int:
        """The signal that this worker got, or 1 where the script has asked; else 0."""
        return self._flag.signal_number or self._asked

    def ask(self) -> None:
        """Ask without a signal."""
        self._asked = _ASKED_BY_SCRIPT

    def listen(self) -> None:
        """From now on a signal is noted, and no longer ends the script."""
        if not self._listens and threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                signal.signal(number, self._flag.handle)
            self._listens = True


def exit_code_of(agreed: int) -> int:
    """What a script ends with after what its workers have agreed on."""
    if agreed <= _ASKED_BY_SCRIPT:
        return 0
    return EXIT_INTERRUPTED if agreed == signal.SIGINT else EXIT_RESUMABLE
