"""Messages arrive whole, and input from anyone is bounded."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stormo.launch.json_socket import MAX_LINE_BYTES, JsonSocket

Pair = tuple[JsonSocket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    link = JsonSocket(ours)
    yield link, theirs
    link.close()
    theirs.close()


def receive_all(link: JsonSocket) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    while not link.closed:
        new = link.receive()
        if not new:
            break
        messages += new
    return messages


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(values=st.lists(st.text(max_size=50), max_size=5), cut=st.integers(1, 20))
def test_messages_arrive_in_order_whatever_pieces_they_come_in(values: list[str], cut: int) -> None:
    ours, theirs = socket.socketpair()
    link = JsonSocket(ours)
    text = b"".join(json.dumps({"value": value}).encode() + b"\n" for value in values)
    received: list[dict[str, Any]] = []
    for start in range(0, len(text), cut):
        theirs.sendall(text[start : start + cut])
        received += link.receive()
    assert [message["value"] for message in received] == values
    link.close()
    theirs.close()


def test_the_last_words_of_a_process_that_has_ended_are_read_at_once(pair: Pair) -> None:
    link, other = pair
    other.setblocking(False)
    sent = JsonSocket(other)
    sent.send({"event": "bye"})
    sent.send({"event": "failure", "details": "ü" * 20_000})  # a long traceback, each letter of which takes six bytes
    sent.close()
    assert [message["event"] for message in link.receive()] == ["bye", "failure"]


@pytest.mark.parametrize(
    "words",
    [b"hello\n", b"[1]\n", b"\xff\n", b"3\n", b"null\n", b"[" * 100_000 + b"\n", b"{" * 10_000 + b"\n", b"\n"],
)
def test_what_is_no_message_ends_the_conversation(pair: Pair, words: bytes) -> None:
    link, other = pair
    other.sendall(b'{"a":1}\n')
    other.sendall(words)
    received = receive_all(link) + link.receive()
    assert received == [{"a": 1}]
    assert link.closed
    assert link.fault is not None


@pytest.mark.parametrize("ended", [True, False])
def test_a_line_may_only_be_so_long(pair: Pair, ended: bool) -> None:
    link, other = pair
    words = b'{"a":"' + b"x" * MAX_LINE_BYTES + b'"}' + (b"\n" if ended else b"")
    thread = threading.Thread(target=lambda: other.sendall(words))
    thread.start()
    while not link.closed:
        assert link.receive() == []
    assert link.fault is not None
    link.close()  # lets the sender go, which then meets a closed pipe
    other.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_the_end_is_seen_after_the_last_message(pair: Pair) -> None:
    link, other = pair
    other.sendall(b'{"last":1}\n')
    other.close()
    assert link.receive() == [{"last": 1}]
    assert not link.closed
    assert link.receive() == []
    assert link.closed
    assert link.fault is None


def test_sending_to_someone_who_does_not_read_never_blocks_and_gives_up(pair: Pair) -> None:
    link, _ = pair
    for _ in range(1000):
        link.send({"filler": "x" * 10_000})
        if link.closed:
            break
    assert link.closed
    assert link.fault == "it does not read what it is sent"


def test_sending_to_someone_who_is_gone_is_no_error_and_leaves_their_last_words(pair: Pair) -> None:
    link, other = pair
    other.sendall(b'{"last":1}\n')
    other.close()
    link.send({"a": 1})
    link.send({"a": 2})
    assert link.receive() == [{"last": 1}]


def test_last_words_arrive_although_the_sender_never_read(pair: Pair) -> None:
    link, other = pair
    other.sendall(b'{"unread":1}\n')
    link.send({"last": "x" * 200_000})
    received = bytearray()

    def read() -> None:
        while chunk := other.recv(65536):
            received.extend(chunk)
        other.close()

    thread = threading.Thread(target=read)
    thread.start()
    link.finish(5.0)
    thread.join()
    assert json.loads(received)["last"] == "x" * 200_000
