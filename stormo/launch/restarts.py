"""`--max-restarts`: after a failure, all workers of a fixed number of nodes start again from the newest checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from stormo.errors import EXIT_FAILURE
from stormo.launch.control import JoinError, RefusedError
from stormo.launch.relay import write_all

_STDERR = 2
_TRY_AGAIN_S = 0.5


def run_with_restarts(attempt: Callable[[int], int], *, restarts: int, signals: Collection[int], join_s: float) -> int:
    """Run attempt 0, and after a failure attempt 1 and so on; the exit code of the last.

    A bad setting, divergence, and a run that was told to stop have exit codes of their own and end it.

    Args:
        attempt: runs the workers of this node, and fails on every node when one of them does.
        restarts: how many attempts may follow the first.
        signals: those that the workers were sent; whoever sent them wants an end.
        join_s: how long a restart may wait for the other nodes, which may still end their last attempt.
    """
    code = attempt(0)
    for number in range(1, restarts + 1):
        if code != EXIT_FAILURE or signals:
            return code
        write_all(_STDERR, f"stormo: restart {number} of {restarts}\n".encode())
        code = _join_and_run(attempt, number, join_s)
    if restarts and code == EXIT_FAILURE and not signals:
        write_all(_STDERR, f"stormo: no restart is left of {restarts}\n".encode())
    return code


def _join_and_run(attempt: Callable[[int], int], number: int, join_s: float) -> int:
    deadline = time.monotonic() + join_s
    while True:
        try:
            return attempt(number)
        except (JoinError, RefusedError):
            if time.monotonic() > deadline:
                raise
        time.sleep(_TRY_AGAIN_S)
