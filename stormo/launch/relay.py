"""Cuts what a worker writes into whole lines, so that the output of several can share one terminal.

Bytes stay as they are; only what is kept for a message is decoded.
"""

from __future__ import annotations

import contextlib
import os
import select

_MAX_LINE_BYTES = 64 * 1024


class Lines:
    """Puts the lines of one stream together; a prefix names the worker they come from."""

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


def write_all(fd: int, data: bytes) -> None:
    """Write everything; output whose reader has gone away is dropped."""
    view = memoryview(data)
    with contextlib.suppress(OSError):
        while view:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:  # someone who shares the terminal made it non-blocking
                select.select([], [fd], [], 1.0)
