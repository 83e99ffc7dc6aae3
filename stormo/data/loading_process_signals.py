"""Imported by the server that forks loading processes: they ignore stop signals.

Schedulers and torchrun signal every process of a job, and the trainer still needs its data to stop in order. Loading
processes end with the trainer.
"""

from __future__ import annotations

import signal
import sys


def ignore_stop_signals() -> None:
    """Also called by each process, as torch sets handlers of its own."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


if "multiprocessing.forkserver" in " ".join(sys.orig_argv):  # an import changes nothing anywhere else
    ignore_stop_signals()
