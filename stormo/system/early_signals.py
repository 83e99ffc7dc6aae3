"""Signals that come before anybody listens, while torch is imported: none may be lost, and none may break an import."""

from __future__ import annotations

import os
import signal
from types import FrameType

from stormo.errors import EXIT_INTERRUPTED, EXIT_RESUMABLE

_held: list[int] = []
_listened: list[bool] = []  # somebody has, once


def hold_warning() -> None:
    """From now on keep SIGUSR1, which would end a process that does not listen yet; torch alone imports for seconds."""
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, lambda number, _: _held.append(number))


def hear_warning() -> None:
    """Have the signal that was kept come again, now that somebody listens."""
    _listened.append(True)
    if _held:
        _held.clear()
        signal.raise_signal(signal.SIGUSR1)


def leave_if_warned() -> None:
    """End as a run that may go on, where the signal was kept and nobody will listen."""
    if _held:
        _end_resumable(signal.SIGUSR1)


def leave_when_told() -> None:
    """Until somebody listens, SIGTERM ends this process as a run that may go on: nothing has been done yet."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _leave)


def leave_when_interrupted() -> None:
    """Until somebody listens, Ctrl-C ends this process; torch's imports would swallow an exception, or break by it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def stopping_text(*, is_training: bool) -> str:
    """What is said to the first Ctrl-C; before the first step, what a worker is at may end it, or else that step."""
    when = "after this step" if is_training else "after the first step at the latest"
    return f"stopping {when}; press Ctrl-C again to stop at once"


def _leave(number: int, _: FrameType | None) -> None:
    if _listened:  # and does not any more: there is nothing left to be stopped in order
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
        return
    _end_resumable(signal.SIGTERM)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _listened:
        signal.default_int_handler(number, frame)
    os._exit(EXIT_INTERRUPTED)


def _end_resumable(number: signal.Signals) -> None:
    text = f"stormo: stopped by {number.name} before training began; the same command starts it again\n"
    os.write(2, text.encode())
    os._exit(EXIT_RESUMABLE)  # an exception would be taken for one of the file that is being imported
