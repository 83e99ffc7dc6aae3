"""Workers that are started before it is known whether they will be needed, and that wait to be told so.

They load their libraries meanwhile. One that is not needed, or whose agent has gone, ends without a word.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack

from stormo.launch.lifeline import die_with_parent
from stormo.launch.local import Node
from stormo.launch.meeting import meet_alone
from stormo.launch.worker import Worker, start_worker

_GO_FD = "STORMO_GO_FD"  # the end of a pipe, on which a byte means go, and its end that nobody needs this worker
_REAP_S = 5.0


class WaitingWorkers:
    """The workers of a job on one node, started ahead of time."""

    def __init__(self, command: Sequence[str], node: Node, environ: Mapping[str, str]) -> None:
        self.command = list(command)
        self.node = node
        self.workers: list[Worker] = []
        self._is_needed = False
        with ExitStack() as stack:
            theirs, self._go = os.pipe()
            stack.callback(os.close, self._go)
            try:
                self.meeting = meet_alone(node, stack)
                stack.callback(self._end)
                told = {**environ, _GO_FD: str(theirs)}
                for local_rank in range(node.num_workers):
                    self.workers.append(
                        start_worker(node, local_rank, command, environ=told, meeting=self.meeting, more_fds=(theirs,))
                    )
            finally:
                os.close(theirs)
            self._opened = stack.pop_all()

    def fit(self, command: Sequence[str], node: Node) -> bool:
        """Whether they are what is to be started."""
        return (self.command, self.node) == (list(command), node)

    def go(self) -> list[Worker]:
        """Let them go, and hand them to an agent that will end them."""
        self._is_needed = True
        for worker in self.workers:
            worker.started_at = time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # all have died, as the agent will see
            os.write(self._go, b"g" * len(self.workers))
        return self.workers

    def close(self) -> None:
        """End those that nobody needed, and let go of what was opened."""
        self._opened.close()

    def _end(self) -> None:
        if self._is_needed:
            return
        for worker in self.workers:
            worker.kill()
            worker.kill_group()
        for worker in self.workers:
            worker.reap(_REAP_S)
            worker.close()


def starts_ahead(environ: Mapping[str, str]) -> bool:
    """Whether this process is a worker that may turn out not to be needed."""
    return _GO_FD in environ


def wait_until_needed(environ: MutableMapping[str, str], load: Callable[[], object]) -> None:
    """Load what takes long, and return when the agent says so; end this process if it does not."""
    die_with_parent()
    descriptor = int(environ.pop(_GO_FD))
    os.set_inheritable(descriptor, False)
    load()
    is_needed = os.read(descriptor, 1)
    os.close(descriptor)
    if not is_needed:
        os._exit(0)
