"""A small HTTP server that no client can block: few connections, short requests, and a time limit for each."""

from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MOST_CONNECTIONS = 16
MOST_HEAD_BYTES = 8192
HEAD_WITHIN_S = 5.0
_POLL_S = 0.1  # how soon `close` is noticed

Answer = Callable[[str], tuple[str, bytes]]  # from the Accept header to the type and the content


class CappedServer(ThreadingHTTPServer):
    """Answers GET in its own thread until `close`."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, host: str, port: int, answer: Answer) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = found[0]
        self.answer = answer
        self._open: dict[Any, None] = {}  # in the order in which they came
        self._lock = threading.Lock()
        super().__init__((str(found[4][0]), port), _Handler)
        self._thread = threading.Thread(target=self.serve_forever, args=(_POLL_S,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Free the port; may be called again."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Accept a connection; where there are too many, drop the oldest, which a real client no longer needs."""
        with self._lock:
            self._open[request] = None
            oldest = next(iter(self._open)) if len(self._open) > MOST_CONNECTIONS else None
        if oldest is not None:
            self.shutdown_request(oldest)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore broken connections: the terminal shows a run."""


class _Handler(BaseHTTPRequestHandler):
    server: CappedServer
    timeout = HEAD_WITHIN_S  # also for reading the answer

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(io.BytesIO(self._head()))

    def _head(self) -> bytes:
        """The head of the request; empty if it is too long or too slow."""
        head, deadline = b"", time.monotonic() + HEAD_WITHIN_S
        while b"\r\n\r\n" not in head and b"\n\n" not in head:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or len(head) > MOST_HEAD_BYTES:
                return b""
            self.connection.settimeout(left_s)
            try:
                piece = self.connection.recv(MOST_HEAD_BYTES)
            except OSError:
                return b""
            if not piece:
                return b""
            head += piece
        self.connection.settimeout(self.timeout)
        return head

    def do_GET(self) -> None:
        kind, content = self.server.answer(self.headers.get("Accept", ""))
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
