"""Nobody can keep the server of the metrics busy, whatever they send or do not send."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from stormo.telemetry import capped_server
from stormo.telemetry.capped_server import MOST_CONNECTIONS, MOST_HEAD_BYTES, CappedServer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[CappedServer]:
    monkeypatch.setattr(capped_server, "HEAD_WITHIN_S", 0.5)
    found = CappedServer("127.0.0.1", 0, lambda accept: ("text/plain", f"for {accept}".encode()))
    yield found
    found.close()


def ask(server: CappedServer) -> bytes:
    request = urllib.request.Request(f"http://127.0.0.1:{server.server_port}/metrics", headers={"Accept": "me"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        content: bytes = answer.read()
        return content


def connect(server: CappedServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=10)


def test_connections_that_say_nothing_are_dropped_for_new_ones(server: CappedServer) -> None:
    idle = []
    for _ in range(4 * MOST_CONNECTIONS):
        idle.append(connect(server))
    assert ask(server) == b"for me"
    assert len(server._open) <= MOST_CONNECTIONS
    for each in idle:
        each.close()


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"GET /metrics HTTP/1.1\r\n",
        b"GET /" + b"x" * (2 * MOST_HEAD_BYTES),
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * MOST_HEAD_BYTES,
        b"\xff\xfe\r\n\r\n",
        b"POST / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\nContent-Length: -1\r\n\r\n",
    ],
    ids=["nothing", "half", "long line", "many lines", "garbage", "post", "version"],
)
def test_what_is_no_request_ends_the_connection_and_nothing_else(
    server: CappedServer, words: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with connect(server) as stranger, contextlib.suppress(ConnectionError):
        stranger.sendall(words)
        while stranger.recv(65536):
            pass
    assert ask(server) == b"for me"
    assert capfd.readouterr() == ("", "")


def test_a_request_that_trickles_in_is_given_up(server: CappedServer) -> None:
    stop = threading.Event()
    with connect(server) as slow:

        def trickle() -> None:
            while not stop.wait(0.05):
                try:
                    slow.sendall(b"a")
                except OSError:
                    return

        thread = threading.Thread(target=trickle)
        thread.start()
        with contextlib.suppress(ConnectionError):
            assert slow.recv(100) == b""
        stop.set()
        thread.join()
    assert ask(server) == b"for me"
