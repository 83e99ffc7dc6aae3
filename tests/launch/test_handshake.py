"""Members know each other by the secret of their job; whoever does not know it is neither heard nor told anything."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stormo.errors import SettingError
from stormo.launch.client import Client
from stormo.launch.control import PROTOCOL, Gone, Reported
from stormo.launch.failure import of_exit
from stormo.launch.handshake import MAX_GREETING_BYTES, Greeting, new_nonce
from stormo.launch.server import _MAX_STRANGERS, Server
from tests.launch.test_control import SECRET, TIMING, all_started, hello, poll_until

NONCE = new_nonce()
SURROGATE = json.dumps({"type": "hello", "token": "\ud800", "nonce": "\ud800", "code": "\ud800"}).encode()
MISFIT = json.dumps(hello(1, num_members=9, digest="other").to_message()).encode()


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server(socket.create_server(("127.0.0.1", 0)), hello(0, 2), secret=SECRET, timing=TIMING)
    yield found
    found.abandon()


def address_of(server: Server) -> tuple[str, int]:
    found: tuple[str, int] = server._listener.getsockname()
    return found


def member(address: tuple[str, int], secret: bytes = SECRET, **more: Any) -> Client:
    return Client(*address, hello(1, 2), secret=secret, timing=TIMING, **more)


def require_still_good(server: Server) -> None:
    """The real member joins, whatever a stranger has done before."""
    client = member(address_of(server))
    try:
        all_started(server, client)
    finally:
        client.abandon()


def hear(stranger: socket.socket, server: Server) -> bytes:
    """Whatever a server says to a stranger until it hangs up."""
    heard = bytearray()
    stranger.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(stranger, selectors.EVENT_READ)
        for _ in range(500):
            server.poll(0.01)
            if selector.select(0):
                try:
                    chunk = stranger.recv(65536)
                except ConnectionError:
                    break
                if not chunk:
                    break
                heard += chunk
    return bytes(heard)


@pytest.mark.parametrize(
    "words",
    [
        b"\xff\xfe garbage\n",
        b"x" * (MAX_GREETING_BYTES + 1),
        b"[" * 900 + b"\n",
        SURROGATE + b"\n",
        MISFIT + b"\n",
        b'{"type":"answer"}\n',
        b'{"type":"answer","nonce":"\\ud800","code":"\\ud800"}\n',
        b'{"type":"answer","nonce":1e999,"code":[]}\n',
        json.dumps({"type": "answer", "nonce": NONCE, "code": "0" * 64}).encode() + b"\n",
        json.dumps({"type": "answer", "nonce": NONCE, "code": "0" * 64}).encode() + b"\n" + MISFIT + b"\n",
        b'{"type":"failure","kind":"exception"}\n',
    ],
    ids=lambda words: words[:24].decode("latin-1"),
)
def test_a_stranger_is_dropped_alone_and_told_nothing(server: Server, words: bytes) -> None:
    with socket.create_connection(address_of(server)) as stranger:
        stranger.sendall(words)
        heard = [json.loads(line) for line in hear(stranger, server).splitlines()]
    assert [message["type"] for message in heard] in ([], ["challenge"], ["challenge", "stranger"])
    assert all(message.keys() <= {"type", "protocol", "nonce"} for message in heard)
    require_still_good(server)


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_NAMES = st.sampled_from(["type", "nonce", "code", "protocol", "member"])
_WORDS = st.sampled_from(["answer", "hello", "proof", "challenge", "\ud800", NONCE])


@settings(max_examples=60, deadline=None)
@given(message=st.dictionaries(_NAMES, _ANYTHING | _WORDS))
def test_no_message_of_a_stranger_brings_the_server_down(message: dict[str, Any]) -> None:
    server = Server(socket.create_server(("127.0.0.1", 0)), hello(0, 2), secret=SECRET, timing=TIMING)
    try:
        with socket.create_connection(address_of(server)) as stranger:
            stranger.sendall(json.dumps(message).encode() + b"\n")
            for _ in range(3):
                server.poll(0.01)
        assert not server._members
    finally:
        server.abandon()


def recorded(server: Server) -> bytes:
    """What an honest member has sent, as somebody on the way has seen it."""
    seen = bytearray()
    with Relay(address_of(server), lambda data, to_server: seen.extend(data) if to_server else None) as address:
        client = member(address)
        all_started(server, client)
        client.abandon()
        poll_until(lambda events: bool(events[0]), server)
    return bytes(seen)


def test_what_an_honest_member_has_said_is_of_no_use_to_who_says_it_again(server: Server) -> None:
    said = recorded(server)
    again = Server(socket.create_server(("127.0.0.1", 0)), hello(0, 2), secret=SECRET, timing=TIMING)
    try:
        with socket.create_connection(address_of(again)) as stranger:
            stranger.sendall(said.partition(b"\n")[0] + b"\n")
            assert b"stranger" in hear(stranger, again)
        require_still_good(again)
    finally:
        again.abandon()


class Relay:
    """Somebody on the way between client and server, who sees everything and may change it."""

    def __init__(self, target: tuple[str, int], change: Callable[[bytes, bool], bytes | None]) -> None:
        self._target, self._change = target, change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.heard = b""

    def __enter__(self) -> tuple[str, int]:
        self._start(self._accept)
        found: tuple[str, int] = self._listener.getsockname()
        return found

    def __exit__(self, *_: object) -> None:
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        try:
            client = self._listener.accept()[0]
        except OSError:
            return
        server = socket.create_connection(self._target)
        self._sockets += [client, server]
        self._start(self._pass_on, client, server, True)
        self._start(self._pass_on, server, client, False)

    def _pass_on(self, source: socket.socket, target: socket.socket, to_server: bool) -> None:
        try:
            while data := source.recv(65536):
                changed = self._change(data, to_server)
                target.sendall(data if changed is None else changed)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return


def test_who_passes_the_greeting_on_cannot_speak_for_either_side(server: Server) -> None:
    forged = json.dumps({"type": "failure", **of_exit(9, rank=1, host="h1").to_message()}).encode() + b"\n"
    speaks = threading.Event()

    def change(data: bytes, to_server: bool) -> bytes | None:
        return data + forged if to_server and speaks.is_set() else None

    with Relay(address_of(server), change) as address:
        client = member(address)
        all_started(server, client)
        speaks.set()
        client.rank_ended(1, 0)
        events = poll_until(lambda seen: any(isinstance(event, Gone) for event in seen[0]), server, client)[0]
        client.abandon()
    assert not any(isinstance(event, Reported) for event in events)
    assert "no message of stormo's" in next(event.why for event in events if isinstance(event, Gone))


def impostor(*answers: bytes) -> Relay:
    """A program at the port of a job: it speaks like stormo, but has no secret."""

    class Impostor(Relay):
        def _accept(self) -> None:
            try:
                client = self._listener.accept()[0]
                self._sockets.append(client)
                for answer in answers:
                    client.sendall(answer)
                    self.heard += client.recv(65536)
            except OSError:
                return

    return Impostor(("", 0), lambda data, to_server: None)


CHALLENGE = json.dumps({"type": "challenge", "protocol": PROTOCOL, "nonce": NONCE}).encode() + b"\n"


@pytest.mark.parametrize(
    "second",
    [
        {"type": "proof", "code": "0" * 64},
        {"type": "proof", "code": "\ud800"},
        {"type": "proof"},
        {"type": "stranger"},
        {"type": "go", "payload": {}},
        {"type": "refuse", "sentence": "you are mine", "exit_code": 2},
    ],
    ids=lambda message: str(message)[:40],
)
def test_a_program_that_only_speaks_like_stormo_is_named_and_told_nothing(second: dict[str, Any]) -> None:
    squatter: Any = impostor(CHALLENGE, json.dumps(second).encode() + b"\n")
    with squatter as address:
        client = member(address)
        with pytest.raises(SettingError, match=r"does not have the secret of this job.*another user's program"):
            poll_until(lambda seen: False, client)
        client.abandon()
    assert json.loads(squatter.heard).keys() == {"type", "nonce", "code"}


def test_an_answer_that_is_only_sent_back_is_no_proof() -> None:
    class Mirror(Relay):
        def _accept(self) -> None:
            client = self._listener.accept()[0]
            self._sockets.append(client)
            client.sendall(CHALLENGE)
            code = json.loads(client.recv(65536))["code"]
            client.sendall(json.dumps({"type": "proof", "code": code}).encode() + b"\n")

    with Mirror(("", 0), lambda data, to_server: None) as address:
        client = member(address)
        with pytest.raises(SettingError, match="does not have the secret"):
            poll_until(lambda seen: False, client)
        client.abandon()


def test_an_address_that_leads_to_a_stranger_is_looked_up_again(server: Server) -> None:
    squatter: Any = impostor(CHALLENGE, b'{"type":"stranger"}\n')
    with squatter as wrong:
        addresses = [None, wrong, address_of(server)]
        client = member(("127.0.0.1", 1), look=lambda: addresses.pop(0) if len(addresses) > 1 else addresses[0])
        all_started(server, client)
        client.abandon()


def test_connections_that_say_nothing_keep_no_member_out(server: Server) -> None:
    strangers: list[socket.socket] = []
    try:
        for _ in range(3 * _MAX_STRANGERS):
            strangers.append(socket.create_connection(address_of(server), timeout=10))
            server.poll()
        assert len(server._strangers) <= _MAX_STRANGERS + 2
        require_still_good(server)
    finally:
        for stranger in strangers:
            stranger.close()


def test_the_codes_of_both_sides_and_directions_differ() -> None:
    greeting = Greeting(SECRET, new_nonce(), new_nonce())
    to_server, to_client = greeting.seals()
    codes = {
        greeting.client_code(),
        greeting.server_code(),
        to_server.code(b"x").decode(),
        to_client.code(b"x").decode(),
    }
    assert len(codes) == 4
    assert to_server.code(b"x").decode() not in codes  # the same line, but the next one
