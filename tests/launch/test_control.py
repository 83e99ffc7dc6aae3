"""Server and client in one thread, poll by poll: joining, refusing, ending; and untrusted input."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from stormo.errors import SettingError
from stormo.launch.client import Client
from stormo.launch.control import (
    ChannelTimeouts,
    Ended,
    Event,
    Go,
    Gone,
    Hello,
    JoinError,
    RankEnded,
    RefusedError,
    validate_member,
)
from stormo.launch.failure import Failure, of_exit
from stormo.launch.server import Server

SECRET = b"s" * 32
TIMEOUTS = ChannelTimeouts(join_s=10.0, heartbeat_s=0.1, lost_after_s=5.0, stalled_after_s=5.0)
Make = Callable[..., Any]


def hello(member: int, num_members: int = 3, **more: Any) -> Hello:
    return Hello(member=member, num_members=num_members, host=f"h{member}", **more)


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes a server (member 0) or clients of it, and closes them without waiting for each other."""
    made: list[Client | Server] = []
    port = 0

    def make_one(member: int, **more: Any) -> Any:
        nonlocal port
        timeouts, secret = more.pop("timeouts", TIMEOUTS), more.pop("secret", SECRET)
        own = hello(member, **more)
        if member == 0 and port == 0:
            listener = socket.create_server(("127.0.0.1", 0))
            port = listener.getsockname()[1]
            made.append(Server(listener, own, secret=secret, timeouts=timeouts, payload={"store_port": 7}))
        else:
            made.append(Client("127.0.0.1", port, own, secret=secret, timeouts=timeouts))
        return made[-1]

    yield make_one
    for control in made:
        control.abandon()


def poll_until(
    condition: Callable[[dict[int, list[Event]]], bool], *members: Client | Server
) -> dict[int, list[Event]]:
    seen: dict[int, list[Event]] = {index: [] for index in range(len(members))}
    deadline = time.monotonic() + 20.0
    while not condition(seen):
        assert time.monotonic() < deadline, seen
        for index, member in enumerate(members):
            seen[index] += member.poll(0.01)
    return seen


def all_started(*members: Client | Server) -> None:
    poll_until(lambda seen: all(member.started for member in members), *members)


def test_all_start_together_and_get_what_member_0_shares(make: Make) -> None:
    server, first, second = make(0), make(1), make(2)
    seen = poll_until(lambda seen: all(seen.values()), server, first, second)
    assert all(events == [Go(payload={"store_port": 7})] for events in seen.values())


def test_a_failure_reaches_all_but_its_sender_and_a_complaint_only_member_0(make: Make) -> None:
    server, first, second = make(0), make(1), make(2)
    all_started(server, first, second)
    complaint = of_exit(1, rank=1, host="h1")
    first.report(type(complaint)(**{**complaint.to_message(), "secondary": True}))
    seen = poll_until(lambda seen: bool(seen[0]), server, first, second)
    assert [type(event) for event in seen[0]] == [Failure]
    second.report(of_exit(9, rank=2, host="h2"))
    seen = poll_until(lambda seen: bool(seen[0]) and bool(seen[1]), server, first, second)
    assert seen[0] == seen[1] == [of_exit(9, rank=2, host="h2")]
    assert seen[2] == []


def test_all_end_together_with_the_exit_code_of_the_whole(make: Make) -> None:
    server, first, second = make(0), make(1), make(2)
    all_started(server, first, second)
    first.rank_ended(1, 75)
    first.leave(75)
    server.leave(0)
    seen = poll_until(lambda seen: bool(seen[0]), server, first, second)
    assert seen[0] == [RankEnded(rank=1, host="h1", exit_code=75)]
    second.leave(0)
    seen = poll_until(lambda seen: all(seen.values()), server, first, second)
    assert all(events == [Ended(exit_code=75)] for events in seen.values())


def test_a_member_that_goes_without_a_word_is_gone_and_one_that_left_is_not(make: Make) -> None:
    server, first, second = make(0), make(1), make(2)
    all_started(server, first, second)
    first.leave(0)
    first.drain(1.0)
    first.abandon()
    second.abandon()
    until = time.monotonic() + 0.5
    events = poll_until(lambda seen: time.monotonic() > until, server)[0]
    assert [(event.member, event.host) for event in events if isinstance(event, Gone)] == [(2, "h2")]
    assert len(events) == 1


def test_a_server_that_goes_without_a_word_is_gone_and_one_that_dismisses_is_not(make: Make) -> None:
    server, first = make(0, num_members=2), make(1, num_members=2)
    all_started(server, first)
    server.abandon()
    seen = poll_until(lambda seen: bool(seen[0]), first)
    assert isinstance(seen[0][0], Gone)
    assert seen[0][0].member == 0


def test_a_dismissed_member_goes_on_alone(make: Make) -> None:
    server, first = make(0, num_members=2), make(1, num_members=2)
    all_started(server, first)
    server.dismiss()
    server.drain(1.0)
    server.abandon()
    assert poll_until(lambda seen: bool(seen[0]), first)[0] == [Ended(exit_code=0)]
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        assert first.poll(0.05) == []


def test_a_silent_member_is_lost(make: Make) -> None:
    timeouts = ChannelTimeouts(join_s=10.0, heartbeat_s=0.1, lost_after_s=5.0, stalled_after_s=0.6)
    server, first = make(0, num_members=2, timeouts=timeouts), make(1, num_members=2, timeouts=timeouts)
    all_started(server, first)
    seen = poll_until(lambda seen: bool(seen[0]), server)  # nobody polls the client any more
    (gone,) = seen[0]
    assert isinstance(gone, Gone)
    assert gone.member == 1
    assert gone.why.startswith(f"is lost: no heartbeat for 0.6 s; pid {os.getpid()}: it is ")  # they share a process


def test_a_member_that_was_stopped_waits_anew_for_the_others(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    server, first = make(0, num_members=2), make(1, num_members=2)
    all_started(server, first)
    real = time.monotonic
    for pause_s in (60.0, 120.0):  # longer than a silent member is waited for
        monkeypatch.setattr("stormo.launch.control.time.monotonic", lambda pause_s=pause_s: real() + pause_s)
        for member in (server, first):
            assert member.poll() == []
            assert member.poll() == []


def test_heartbeats_keep_an_idle_channel_alive(make: Make) -> None:
    timeouts = ChannelTimeouts(join_s=10.0, heartbeat_s=0.1, lost_after_s=5.0, stalled_after_s=0.6)
    server, first = make(0, num_members=2, timeouts=timeouts), make(1, num_members=2, timeouts=timeouts)
    all_started(server, first)
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        assert server.poll(0.02) == []
        assert first.poll(0.02) == []


def test_a_member_with_another_secret_is_told_so_and_does_no_harm(make: Make) -> None:
    server = make(0, num_members=2)
    wrong = make(1, num_members=2, secret=b"w" * 32)
    with pytest.raises(SettingError, match=r"does not have the secret of this job.*STORMO_SECRET"):
        poll_until(lambda seen: False, server, wrong)
    right = make(1, num_members=2)
    all_started(server, right)


def test_a_member_that_vanishes_while_others_are_awaited_ends_the_joining(make: Make) -> None:
    server, first = make(0), make(1)
    poll_until(lambda seen: len(server._members) == 1, server, first)
    first.abandon()
    with pytest.raises(JoinError, match="node 1 on host h1 was killed, or ended without a message"):
        poll_until(lambda seen: False, server)


def test_an_admitted_member_waits_as_long_as_the_server_does_and_ends_with_it(make: Make) -> None:
    impatient = replace(TIMEOUTS, join_s=1.0, lost_after_s=0.1, stalled_after_s=1.0)
    server, first = make(0), make(1, timeouts=impatient)
    until = time.monotonic() + 2.0
    poll_until(lambda seen: time.monotonic() > until, server, first)
    with pytest.raises(JoinError, match=r"node 0 on host h0 is lost: no heartbeat for 1 s.* before the job began"):
        poll_until(lambda seen: False, first)


def test_a_refusal_reaches_those_who_came_before(make: Make) -> None:
    server, first = make(0), make(1)
    poll_until(lambda seen: len(server._members) == 1, server, first)
    twin = make(1)
    with pytest.raises(SettingError, match="has already joined as node 1") as at_server:
        poll_until(lambda seen: False, server, twin)
    for member in (first, twin):
        with pytest.raises(RefusedError) as refused:
            poll_until(lambda seen: False, member)
        assert str(refused.value) == str(at_server.value)
        assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"protocol": 9}, "Host h1 speaks version 9"),
        ({"protocol": None}, "speaks version None"),
        ({"member": "1"}, "came without its node id"),
        ({"num_members": 4}, "Host h1 was started with --num-nodes 4 and host h0 with --num-nodes 3"),
        ({"member": 3}, "node ids run from 0 to 2"),
        ({"member": -1}, "node ids run from 0 to 2"),
        ({"member": 2}, "host h2 has already joined as node 2"),
        ({"member": 0}, "host h0 has already joined as node 0"),
        ({"digest": "x", "options": {"--lr": "0.2"}}, "--lr is 0.1 on node 0 (host h0) and 0.2 on node 1 (host h1)"),
        ({"digest": "x", "options": {}}, "--lr is 0.1 on node 0 (host h0) and not set on node 1"),
        ({"digest": "x", "options": [3]}, "not set on node 1"),
        ({"digest": "x"}, "its settings differ in something that is no option"),
    ],
)
def test_a_member_that_does_not_fit_is_told_why(change: dict[str, Any], sentence: str) -> None:
    own = hello(0, options={"--lr": "0.1"})
    fitting = hello(1, options={"--lr": "0.1"}).to_message()
    taken = {0: "h0", 2: "h2"}
    assert validate_member(own, fitting, taken, "node") is None
    refusal = validate_member(own, {**fitting, **change}, taken, "node")
    assert refusal is not None
    assert sentence in str(refusal)


def _command(word: str) -> dict[str, str]:
    """The options of a script with a command line of hundreds of kilobytes; `word` is in its middle."""
    return {"the script and its flags": f"train.py {'data/part.pt ' * 15_000}{word}{'data/part.pt ' * 15_000}"}


def test_members_with_a_long_command_line_join(make: Make) -> None:
    options = _command("\udcff\ud800\U0001f600\n")  # a file's name may have any bytes but one
    all_started(*(make(member, num_members=2, digest="a", options=options) for member in (0, 1)))


def test_a_difference_within_a_long_command_line_is_named(make: Make) -> None:
    server = make(0, num_members=2, digest="a", options=_command("a"))
    first = make(1, num_members=2, digest="b", options=_command("b"))
    named = r"the script and its flags is train\.py data.*\(digest \w{8}\) on node 0 .* and train\.py data.*\(digest "
    with pytest.raises(SettingError, match=f"(?s){named}"):
        poll_until(lambda seen: False, server, first)
    with pytest.raises(RefusedError, match=f"(?s){named}"):
        poll_until(lambda seen: False, first)


def test_a_long_command_to_start_the_missing_member_reaches_those_who_came(make: Make) -> None:
    server, first = make(0, timeouts=replace(TIMEOUTS, join_s=0.5)), make(1)
    server._how_to_start = lambda missing: f"start there: stormo run {_command('a')}"
    with pytest.raises(JoinError, match="node 2 has not joined"):
        poll_until(lambda seen: False, server, first)
    with pytest.raises(RefusedError, match="node 2 has not joined"):
        poll_until(lambda seen: False, first)


def test_many_differences_are_cut_to_a_readable_number() -> None:
    own = hello(0, digest="a", options={f"--o{number}": "1" for number in range(9)})
    refusal = validate_member(own, hello(1, digest="b").to_message(), {0: "h0"}, "node")
    assert refusal is not None
    assert "and 4 more differ" in str(refusal)


def test_a_connection_to_itself_is_not_taken_for_a_server(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may give a client the very port it calls as its own: then the port answers, though nobody listens."""

    class Narcissus(socket.socket):
        def connect_ex(self, address: Any) -> int:
            self.bind(address)
            return super().connect_ex(address)

    client = Client("127.0.0.1", free_port, hello(1), secret=SECRET, timeouts=TIMEOUTS)
    monkeypatch.setattr(socket, "socket", Narcissus)
    poll_until(lambda seen: client._last_error == "nothing listens there", client)
    assert client._server is None
    client.close()
