"""For processes that load data: what stops a run is said to its workers, which still need their data to end in order.

Schedulers and torchrun signal every process of a job. The server that forks these processes imports this module.
"""

from __future__ import annotations

import signal
import sys


def ignore_stop_signals() -> None:
    """Go on whatever is sent; the process ends with the worker that it loads for."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


if "multiprocessing.forkserver" in " ".join(sys.orig_argv):  # nowhere else may an import change this
    ignore_stop_signals()
