"""Nobody gets in, is believed, or learns anything, who does not know the secret of the job."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stormo.errors import SettingError
from stormo.launch.auth import MAX_HANDSHAKE_BYTES, VARIABLE, Handshake, job_secret, new_nonce, new_secret
from stormo.launch.client import Client
from stormo.launch.control import PROTOCOL, Gone
from stormo.launch.failure import Failure, of_exit
from stormo.launch.server import _MAX_UNAUTHENTICATED, Server
from tests.launch.test_control import SECRET, TIMEOUTS, all_started, hello, poll_until

NOBODY = 65534


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path / "home")}


def key_file(home: dict[str, str]) -> Path:
    return Path(home["HOME"]) / ".config" / "stormo" / "secret"


def test_the_first_job_makes_a_key_that_only_its_user_can_read(home: dict[str, str]) -> None:
    first = job_secret(home, 29600)
    assert key_file(home).stat().st_mode & 0o777 == 0o600
    assert key_file(home).parent.stat().st_mode & 0o777 == 0o700
    assert list(key_file(home).parent.iterdir()) == [key_file(home)]
    assert job_secret(home, 29600) == first
    assert job_secret(home, 29601) != first


def test_ranks_that_start_together_get_the_same_key(home: dict[str, str]) -> None:
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(job_secret(home, 1))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len(set(found)) == 1


def test_a_secret_of_the_users_own_needs_no_home(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), VARIABLE: new_secret()}
    assert job_secret(environ, 1) == job_secret({VARIABLE: environ[VARIABLE]}, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "short", "x" * 15])
def test_a_secret_that_could_be_guessed_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="could be guessed"):
        job_secret({VARIABLE: text}, 1)


def _link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def _fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


@pytest.mark.parametrize(
    "spoil",
    [
        _link,
        _fifo,
        lambda file: file.chmod(0o640),
        lambda file: file.write_bytes(b"short"),
        lambda file: file.write_bytes(b"x" * 33),
        pytest.param(
            lambda file: os.chown(file, NOBODY, NOBODY),
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away"),
        ),
    ],
    ids=["link", "fifo", "readable", "short", "long", "another user's"],
)
def test_a_key_that_others_may_have_made_or_read_is_refused(home: dict[str, str], spoil: object) -> None:
    job_secret(home, 1)
    assert callable(spoil)
    spoil(key_file(home))
    with pytest.raises(SettingError, match=VARIABLE):
        job_secret(home, 1)


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, str], Path]:
    (tmp_path / "file").touch()  # no folder can be made below it, whoever this is
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return {"HOME": str(tmp_path / "file")}, tmp_path / f"stormo-{os.geteuid()}"


def test_without_a_home_the_key_lies_in_a_private_folder_of_this_host(homeless: tuple[dict[str, str], Path]) -> None:
    environ, folder = homeless
    assert job_secret(environ, 1) == job_secret(environ, 1)
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_that_somebody_else_has_made_first_is_refused(homeless: tuple[dict[str, str], Path]) -> None:
    environ, folder = homeless
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(SettingError, match="no folder of this user"):
        job_secret(environ, 1)


NONCE = new_nonce()
SURROGATE = json.dumps({"type": "hello", "token": "\ud800", "nonce": "\ud800", "code": "\ud800"}).encode()
MISFIT = json.dumps(hello(1, num_members=9, digest="other").to_message()).encode()


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server(socket.create_server(("127.0.0.1", 0)), hello(0, 2), secret=SECRET, timeouts=TIMEOUTS)
    yield found
    found.abandon()


def address_of(server: Server) -> tuple[str, int]:
    found: tuple[str, int] = server._listener.getsockname()
    return found


def member(address: tuple[str, int], secret: bytes = SECRET, **more: Any) -> Client:
    return Client(*address, hello(1, 2), secret=secret, timeouts=TIMEOUTS, **more)


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
        b"x" * (MAX_HANDSHAKE_BYTES + 1),
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
    assert [message["type"] for message in heard] in ([], ["challenge"], ["challenge", "unauthenticated"])
    assert all(message.keys() <= {"type", "protocol", "nonce"} for message in heard)
    require_still_good(server)


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_NAMES = st.sampled_from(["type", "nonce", "code", "protocol", "member"])
_WORDS = st.sampled_from(["answer", "hello", "proof", "challenge", "\ud800", NONCE])


@settings(max_examples=60)
@given(message=st.dictionaries(_NAMES, _ANYTHING | _WORDS))
def test_no_message_of_a_stranger_brings_the_server_down(message: dict[str, Any]) -> None:
    server = Server(socket.create_server(("127.0.0.1", 0)), hello(0, 2), secret=SECRET, timeouts=TIMEOUTS)
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
    again = Server(socket.create_server(("127.0.0.1", 0)), hello(0, 2), secret=SECRET, timeouts=TIMEOUTS)
    try:
        with socket.create_connection(address_of(again)) as stranger:
            stranger.sendall(said.partition(b"\n")[0] + b"\n")
            assert b"unauthenticated" in hear(stranger, again)
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


def test_who_passes_the_handshake_on_cannot_speak_for_either_side(server: Server) -> None:
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
    assert not any(isinstance(event, Failure) for event in events)
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
        {"type": "unauthenticated"},
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
    squatter: Any = impostor(CHALLENGE, b'{"type":"unauthenticated"}\n')
    with squatter as wrong:
        addresses = [None, wrong, address_of(server)]
        client = member(("127.0.0.1", 1), find_server=lambda: addresses.pop(0) if len(addresses) > 1 else addresses[0])
        all_started(server, client)
        client.abandon()


def test_connections_that_say_nothing_keep_no_member_out(server: Server) -> None:
    strangers: list[socket.socket] = []
    try:
        for _ in range(3 * _MAX_UNAUTHENTICATED):
            strangers.append(socket.create_connection(address_of(server), timeout=10))
            server.poll()
        assert len(server._unauthenticated) <= _MAX_UNAUTHENTICATED + 2
        require_still_good(server)
    finally:
        for stranger in strangers:
            stranger.close()


def test_the_codes_of_both_sides_and_directions_differ() -> None:
    handshake = Handshake(SECRET, new_nonce(), new_nonce())
    to_server, to_client = handshake.seals()
    codes = {
        handshake.client_code(),
        handshake.server_code(),
        to_server.code(b"x").decode(),
        to_client.code(b"x").decode(),
    }
    assert len(codes) == 4
    assert to_server.code(b"x").decode() not in codes  # the same line, but the next one
