"""JSON messages, one a line, over one connected stream socket that never blocks.

Whatever arrives is untrusted: a line has a maximal length, and only JSON objects count as messages. Over a network
the first lines are a handshake, one at a time and short; once it is done, every line is sealed.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import select
import socket
import time
from collections.abc import Mapping
from typing import Any

from stormo.launch.auth import MAX_HANDSHAKE_BYTES, Seal

MAX_LINE_BYTES = 256 * 1024
_MAX_UNSENT_BYTES = 4 * MAX_LINE_BYTES
_READ_BYTES = MAX_LINE_BYTES  # at once, so that the last messages of an exited process are read whole
# What the kernel says when the other machine, or the way to it, has stopped answering.
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)


class JsonSocket:
    """One end of a connection; after `closed` nothing more will come or go."""

    def __init__(self, connected: socket.socket, *, in_handshake: bool = False) -> None:
        """`in_handshake`: the other side is not authenticated until `seal` is called."""
        self._in_handshake = in_handshake
        self._seals: tuple[Seal, Seal] | None = None  # outgoing, incoming
        self._socket = connected
        self._socket.setblocking(False)
        self._unread = bytearray()
        self._unsent = bytearray()
        self.closed = False
        self.fault: str | None = None  # what was wrong with the input
        self.unreachable = False  # closed because the other machine no longer answers

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._socket.fileno()

    def seal(self, outgoing: Seal, incoming: Seal) -> None:
        """The other side is authenticated: from now on every line is signed, and refused without its signature."""
        self._in_handshake = False
        self._seals = outgoing, incoming

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message; the rest of what the socket does not take goes with the next `flush`."""
        # An escaped character would take up to twelve bytes; in UTF-8 it takes four. A lone surrogate becomes "?".
        line = json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode(errors="replace") + b"\n"
        assert len(line) <= MAX_LINE_BYTES - Seal.SIZE, f"a message of {len(line)} bytes"
        if self.closed:
            return
        if self._seals is not None:
            line = self._seals[0].code(line[:-1]) + line
        if len(self._unsent) + len(line) > _MAX_UNSENT_BYTES:
            self._end(fault="it does not read what it is sent")
            return
        self._unsent += line
        self.flush()

    def flush(self) -> None:
        """Send as much of what waits as the socket takes now."""
        while self._unsent and not self.closed:
            try:
                sent = self._socket.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                # The last messages of the other side may still be unread: `receive` finds the end.
                self._unsent.clear()
                if error.errno in _UNREACHABLE:
                    self._end(unreachable=True)
                return
            del self._unsent[:sent]

    def drain(self, timeout_s: float) -> None:
        """Wait until everything is sent, at most so long."""
        deadline = time.monotonic() + timeout_s
        self.flush()
        while self._unsent and not self.closed and (left_s := deadline - time.monotonic()) > 0:
            self._wait(select.POLLOUT, left_s)
            self.flush()

    def receive(self) -> list[dict[str, Any]]:
        """Every whole message that is there; sets `closed` at the end of the connection."""
        if self.closed:
            return []
        try:
            chunk = self._socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            self._end(unreachable=error.errno in _UNREACHABLE)
            return []
        if not chunk:
            self._end()
            return []
        self._unread += chunk
        return self._messages()

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        *lines, rest = self._unread.split(b"\n")
        self._unread = bytearray(rest)
        longest = MAX_HANDSHAKE_BYTES if self._in_handshake else MAX_LINE_BYTES
        if self._in_handshake and len(lines) + bool(rest) > 1:
            self._end(fault="it sent more before it was answered")
            return []
        for line in lines:
            message = self._message(line) if len(line) <= longest else None
            if message is None:
                self._end(fault="it sent what is no message of stormo's")
                return messages
            messages.append(message)
        if len(self._unread) > longest:
            self._end(fault=f"it sent a line longer than {longest} bytes")
        return messages

    def _message(self, line: bytearray) -> dict[str, Any] | None:
        if self._seals is not None:
            code, line = line[: Seal.SIZE], line[Seal.SIZE :]
            if not hmac.compare_digest(code, self._seals[1].code(line)):
                return None
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None

    def finish(self, timeout_s: float) -> None:
        """Close after the last messages have arrived: closing on unread input would reset the connection."""
        deadline = time.monotonic() + timeout_s
        self.drain(timeout_s)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            while not self.closed and (left_s := deadline - time.monotonic()) > 0:
                if self._wait(select.POLLIN, left_s) and not self._socket.recv(_READ_BYTES):
                    break
        self.close()

    def _wait(self, event: int, timeout_s: float) -> bool:
        waiting = select.poll()  # not select.select, which knows no descriptor above 1023
        waiting.register(self._socket, event)
        return bool(waiting.poll(timeout_s * 1000))

    def close(self) -> None:
        """Close the socket."""
        self.closed = True
        with contextlib.suppress(OSError):
            self._socket.close()

    def _end(self, *, fault: str | None = None, unreachable: bool = False) -> None:
        self.closed = True
        self.fault = fault
        self.unreachable = unreachable
