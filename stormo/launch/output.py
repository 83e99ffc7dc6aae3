"""What the user sees of a job: whole lines of the workers, the launcher's messages, the cause of a failure first.

Lines on stderr are held for a moment: a survivor often complains before the death of its peer is seen. Bytes stay as
they are; only what is kept for a message is decoded.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from stormo.errors import note_error
from stormo.launch.failure import Failure
from stormo.launch.torch_errors import is_native_trace, is_nccl_error, wants_native_traces

STDOUT, STDERR = 1, 2
_MAX_LINE_BYTES = 64 * 1024
_NUM_LAST_LINES = 20
_READ_REST_S, _QUIET_MS = 1.0, 50
PREFIX = "stormo: "  # of the launcher's messages
# What a Python program writes before it exits, which takes a while for a process that has loaded torch: an error, a
# syntax error, a flag that it does not know.
_LAST_WORDS = re.compile(
    rb"""(?m)^(?:\[rank \d+\] )?(?:(?:  \+ Exception Group )?Traceback \(most|  File "|(?i:usage): .*\[)"""
)
_LAST_WORDS_HOLD_S = 5.0
_TRACE_HOLD_S = 5.0  # for another node to report the cause of a trace
_NCCL_ERROR_HOLD_S = 30.0  # torch's watchdog of NCCL logs an error 6 s before it ends the process, on busy cores more


class LineBuffer:
    """Assembles the lines of one stream; a prefix names the worker."""

    def __init__(self, prefix: bytes = b"") -> None:
        self._prefix = prefix
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """Every line completed by a chunk, ready to be written."""
        self._rest += chunk
        end = self._rest.rfind(b"\n") + 1
        if not self._prefix:
            end = max(end, self._rest.rfind(b"\r") + 1)  # a progress bar redraws its line without ever ending it
        if end == 0 and len(self._rest) > _MAX_LINE_BYTES:
            return self.finish()
        whole = bytes(self._rest[:end])
        del self._rest[:end]
        if not self._prefix:
            return [whole] if whole else []
        return [self._shown(line) for line in whole.split(b"\n")[:-1]]

    def finish(self) -> list[bytes]:
        """What is left of an unfinished line, finished."""
        rest = bytes(self._rest)
        self._rest.clear()
        return [self._shown(rest)] if rest else []

    def _shown(self, line: bytes) -> bytes:
        # Of a line that was redrawn the last drawing counts.
        return self._prefix + line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n"


class Stream:
    """One output of a process: the pipe it comes through, and where its lines go."""

    def __init__(self, fd: int, target_fd: int, *, rank: int, prefix: bytes) -> None:
        os.set_blocking(fd, False)
        self.fd, self.target_fd, self.rank = fd, target_fd, rank
        self.closed = False
        self._lines = LineBuffer(prefix)

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self.fd

    def read(self) -> list[bytes]:
        """The lines that are there; sets `closed` at the end."""
        try:
            chunk = os.read(self.fd, 64 * 1024)
        except BlockingIOError:
            return []
        return self._lines.feed(chunk) if chunk else self.finish()

    def finish(self) -> list[bytes]:
        """The unfinished line, if there is one; nothing more is read."""
        self.closed = True
        return self._lines.finish()


_StreamT = TypeVar("_StreamT", bound=Stream)


def read_rest(streams: Sequence[_StreamT], read: Callable[[_StreamT], None]) -> None:
    """Read what ended processes left in their pipes, which something that outlives them may keep open."""
    deadline = time.monotonic() + _READ_REST_S
    while (still_open := [stream for stream in streams if not stream.closed]) and time.monotonic() < deadline:
        poll = select.poll()  # select.select knows no descriptor above 1023
        for stream in still_open:
            poll.register(stream, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(_QUIET_MS)}
        for stream in still_open:
            if stream.fd in ready:
                read(stream)
        if not ready:
            return


def _cause_s(line: bytes) -> float:
    """How long a line on stderr waits for the cause of what it says."""
    if is_nccl_error(line):
        return _NCCL_ERROR_HOLD_S
    if is_native_trace(line):
        return _TRACE_HOLD_S
    return _LAST_WORDS_HOLD_S if _LAST_WORDS.search(line) else 0.0


class LogMultiplexer:
    """Writes the lines of all workers of a node; remembers the last ones of each."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._held: deque[tuple[float, int, bytes]] = deque()  # until when, whose, what
        self._last_lines: dict[int, deque[bytes]] = defaultdict(lambda: deque(maxlen=_NUM_LAST_LINES))
        self._cause_shown = False

    @property
    def holds_lines(self) -> bool:
        """Whether lines wait to be shown."""
        return bool(self._held)

    def take(self, stream: Stream, lines: list[bytes]) -> None:
        """Write what goes to stdout, hold what goes to stderr."""
        if stream.target_fd == STDOUT:
            write_all(STDOUT, b"".join(lines))
        elif not self._cause_shown:  # afterwards only consequences come
            until = time.monotonic() + max([self._hold_s, *map(_cause_s, lines)])
            self._held.extend((until, stream.rank, line) for line in lines)

    def show_held_lines(self, *, at_once: bool = False) -> None:
        """Show the lines that have waited long enough, those of a worker in their order."""
        now, held, waiting = time.monotonic(), self._held, set[int]()
        self._held = deque()
        for until, rank, line in held:
            is_later = rank in waiting or (waiting and is_native_trace(line))  # of a worker that misses another
            if not at_once and (now < until or is_later):
                waiting.add(rank)
                self._held.append((until, rank, line))
                continue
            self._last_lines[rank].append(line)
            write_all(STDERR, line)

    def last_lines(self, rank: int) -> str:
        """What a worker wrote last on stderr: all that is held, or else the last few lines."""
        held = [line for _, whose, line in self._held if whose == rank]
        num_lines = max(len(held), _NUM_LAST_LINES)
        return b"".join([*self._last_lines[rank], *held][-num_lines:]).decode("utf-8", "replace")

    def show_cause(self, failure: Failure, *, and_lines_of: Callable[[int], bool]) -> None:
        """Show what ended the job, and below it the held lines of some ranks; the others' are dropped."""
        if os.isatty(STDOUT):
            # Rank 0 may have been killed while it drew its progress: show the cursor, begin a new line.
            write_all(STDOUT, b"\x1b[?25h\n")
        lines = [line for _, rank, line in self._held if and_lines_of(rank)]
        if not wants_native_traces():
            lines = [line for line in lines if not is_native_trace(line)]
        note_error(failure.sentence, failure.exit_code)
        write_all(STDERR, failure.text().encode() + b"".join(lines))
        self._held.clear()
        self._cause_shown = True

    def say(self, sentence: str) -> None:
        """Write a message of the agent."""
        say(sentence, before="\r\x1b[K" if os.isatty(STDERR) else "")  # rank 0 may have left its progress there


def say(sentence: str, *, before: str = "") -> None:
    """Write a message of the launcher."""
    write_all(STDERR, f"{before}{PREFIX}{sentence}\n".encode())


def write_all(fd: int, data: bytes) -> None:
    """Write everything; output whose reader has gone away is dropped."""
    view = memoryview(data)
    with contextlib.suppress(OSError):
        while view:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:  # someone who shares the terminal made it non-blocking
                select.select([], [fd], [], 1.0)
