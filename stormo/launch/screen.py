"""What the user sees of a node: the workers' lines, the agent's own sentences, and the cause of a failure first.

Lines on stderr are held for a moment: a survivor often complains before the death that made it complain is seen.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable

from stormo.launch.failure import Failure
from stormo.launch.relay import write_all
from stormo.launch.worker import Stream, Worker

_STDOUT, _STDERR = 1, 2
# How a script begins to say that it does not know a flag. It ends then, and all workers say the same; but the end of a
# process that has loaded torch takes its time.
_USAGE = re.compile(rb"(?:\[rank \d+\] )?usage: .*\[", re.IGNORECASE)  # [-h], [OPTIONS]
_USAGE_HOLD_S = 5.0


class Screen:
    """Writes for all workers of a node; remembers the last lines of each."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._held: deque[tuple[float, Stream, bytes]] = deque()  # with the time until which
        self._cause_shown = False

    @property
    def holds_lines(self) -> bool:
        """Whether lines wait to be shown."""
        return bool(self._held)

    def take(self, stream: Stream, lines: list[bytes]) -> None:
        """Write what goes to stdout, hold what goes to stderr."""
        if stream.target_fd == _STDOUT:
            write_all(_STDOUT, b"".join(lines))
        elif not self._cause_shown:  # afterwards only consequences come
            hold_s = max(self._hold_s, _USAGE_HOLD_S if any(map(_USAGE.match, lines)) else 0.0)
            until = time.monotonic() + hold_s
            self._held.extend((until, stream, line) for line in lines)

    def show_held_lines(self, *, at_once: bool = False) -> None:
        """Show the lines that have waited long enough."""
        now = time.monotonic()
        while self._held and (at_once or now >= self._held[0][0]):
            _, stream, line = self._held.popleft()
            stream.worker.last_lines.append(line)
            write_all(_STDERR, line)

    def last_lines(self, worker: Worker) -> str:
        """What a worker wrote last on stderr: all that is held, or else the last few lines."""
        held = [line for _, stream, line in self._held if stream.worker is worker]
        num_lines = max(len(held), worker.last_lines.maxlen or 0)
        return b"".join([*worker.last_lines, *held][-num_lines:]).decode("utf-8", "replace")

    def show_cause(self, failure: Failure, *, and_lines_of: Callable[[Worker], bool]) -> None:
        """Show what ended the job, and below it the held lines of some workers; the others' are dropped."""
        if os.isatty(_STDOUT):
            # Rank 0 may have been killed while it drew its progress: show the cursor, begin a new line.
            write_all(_STDOUT, b"\x1b[?25h\n")
        lines = b"".join(line for _, stream, line in self._held if and_lines_of(stream.worker))
        write_all(_STDERR, failure.text().encode() + lines)
        self._held.clear()
        self._cause_shown = True

    def say(self, sentence: str) -> None:
        """One sentence of the agent's own."""
        fresh = "\r\x1b[K" if os.isatty(_STDERR) else ""  # rank 0 may have left its progress in this line
        write_all(_STDERR, f"{fresh}stormo: {sentence}\n".encode())
