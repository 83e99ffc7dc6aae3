"""The words of the control channel, over which the members of a job meet, agree, and hear of each other's end.

Members are agents (one a node) or, under a foreign launcher, ranks. JSON lines over TCP: member 0 serves (`server`),
the others are clients (`client`). Nothing runs by itself: the owner waits on `fileno` and calls `poll` a few times a
second, which reads, sends heartbeats and returns what happened. A joining that cannot succeed raises out of `poll`,
with the same sentence on every member. Carries no data of the training. Nothing is believed, or even judged, before
both sides have shown that they know the secret of the job (`handshake`).
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stormo.errors import SettingError, StormoError, counted
from stormo.launch.failure import OUT_OF_MEMORY, Failure, printable, signal_name
from stormo.launch.json_socket import JsonSocket
from stormo.system.process import fatal_signal, process_space, process_state

PROTOCOL = 2
_MAX_OPTIONS_SHOWN = 5


class JoinError(StormoError):
    """The members did not find together in time."""

    def __init__(self, sentence: str) -> None:
        super().__init__(f"{sentence}.")


class RefusedError(StormoError):
    """The members do not fit together; carries the sentence of the member that noticed."""

    def __init__(self, sentence: str, exit_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """Who a member is and what it was asked to run."""

    member: int
    num_members: int
    host: str
    digest: str = ""
    options: Mapping[str, str] = field(default_factory=dict)  # what the digest is made of, to name a difference
    pid: int = field(default_factory=os.getpid)
    process_space: str = field(default_factory=process_space)  # within which the pid means something

    def to_message(self) -> dict[str, Any]:
        """As JSON-ready values."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {"type": "hello", "protocol": PROTOCOL, **values, "options": dict(self.options)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelTimeouts:
    """How long the members of a channel wait for what."""

    join_s: float = 600.0
    heartbeat_s: float = 1.0
    lost_after_s: float = 10.0  # the other machine acknowledges nothing
    stalled_after_s: float = 10.0  # the machine answers, but its member says nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class Go:
    """All members have come; what member 0 has to share."""

    payload: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reported:
    """A member, or one of its ranks, has failed and says how."""

    failure: Failure


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnded:
    """A rank of another member has ended in order (member 0 is told)."""

    rank: int
    host: str
    exit_code: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Gone:
    """A member has vanished without a word."""

    member: int
    host: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """All members have ended in order; the exit code of the whole."""

    exit_code: int


Event = Go | Reported | RankEnded | Gone | Ended


class Peer:
    """The other end of one connection, and when it was last heard."""

    def __init__(self, socket: JsonSocket, *, host: str = "") -> None:
        self.socket = socket
        self.host = host  # first the address, later the name
        self.nonce = ""  # this side's, of the handshake
        self.is_known = False  # whether it has shown that it knows the secret of the job
        self.member: int | None = None
        self.pid: int | None = None  # where its process can be seen from here
        self.step: int | None = None  # of which it has told last
        self.started_at = self.heard_at = self.beaten_at = time.monotonic()
        self.left: int | None = None  # the exit code it said goodbye with
        self.settled = False  # its failure is known: that it then vanishes is no news

    def introduce(self, message: Mapping[str, Any]) -> None:
        """Take its name, and its process id where that means something here, from its hello or welcome."""
        self.host, pid = host_of(message), message.get("pid")
        self.pid = pid if isinstance(pid, int) and message.get("process_space") == process_space() else None

    def receive(self) -> list[dict[str, Any]]:
        """The messages that are there; any of them is a sign of life."""
        messages = self.socket.receive()
        if messages:
            self.heard_at = time.monotonic()
        for message in messages:
            self.step = step if isinstance(step := message.get("step"), int) else self.step
        return messages

    def beat(self, *, step: int | None = None, after_s: float = 0.0) -> None:
        """Send a heartbeat unless the last one was sent less than so long ago."""
        self.socket.flush()
        now = time.monotonic()
        if now - self.beaten_at >= after_s:
            self.beaten_at = now
            self.socket.send({"type": "beat"} if step is None else {"type": "beat", "step": step})

    def gone(self, now: float, timeouts: ChannelTimeouts) -> str | None:
        """Why the peer counts as gone, or None while it is there or has ended in order."""
        if self.left is not None or self.settled:
            return None
        if self.socket.unreachable:
            return f"is lost: its machine has not answered for {timeouts.lost_after_s:g} s"
        if self.socket.fault:
            return f"broke the control channel: {self.socket.fault}"
        if self.socket.closed:
            return self._how_it_died()
        if now - self.heard_at > timeouts.stalled_after_s:
            state = "" if self.pid is None else f"; pid {self.pid}: {process_state(self.pid)}"
            return f"is lost: no heartbeat for {timeouts.stalled_after_s:g} s{state}"
        return None

    def _how_it_died(self) -> str:
        number = None if self.pid is None else fatal_signal(self.pid)
        if number is None:
            return f"was killed, or ended without a message; {OUT_OF_MEMORY}"
        hint = f"; {OUT_OF_MEMORY}" if number == signal.SIGKILL else ""
        return f"was killed by {signal_name(number)} (signal {number}){hint}"


class Control:
    """What server and client have in common."""

    def __init__(self, hello: Hello, *, secret: bytes, timeouts: ChannelTimeouts, noun: str) -> None:
        self.started = False
        self.step: int | None = None  # of this member, told with every heartbeat
        self._hello = hello
        self._secret = secret
        self._timeouts = timeouts
        self._noun = noun
        self._deadline = time.monotonic() + timeouts.join_s
        self._events: list[Event] = []
        self._selector = selectors.EpollSelector()  # its own descriptor can be waited on

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._selector.fileno()

    def poll(self, timeout_s: float = 0.0) -> list[Event]:
        """Wait for events at most so long; those that happened."""
        raise NotImplementedError

    def report(self, failure: Failure) -> None:
        """Tell the others what has failed."""

    def rank_ended(self, rank: int, exit_code: int) -> None:
        """Tell member 0 that a rank has ended in order; on member 0 its owner keeps the book itself."""

    def leave(self, exit_code: int) -> None:
        """Say that this member has ended in order; `Ended` follows when all have."""

    def drain(self, timeout_s: float) -> None:
        """Wait until everything said is on its way, at most so long."""

    def dismiss(self) -> None:
        """Member 0 ends in order and no longer serves the others, who continue without the channel."""

    def close(self) -> None:
        """Let go of every connection after the last words have arrived."""

    def abandon(self) -> None:
        """Let go of every descriptor without a word, in a forked child that shares them with its parent."""

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def configure(connected: socket.socket, timeouts: ChannelTimeouts) -> None:
    """Send small messages at once, and let the kernel give a silent machine up in time."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Heartbeats keep data on its way, at most two periods apart, so that this is also a limit for a machine that
        # is switched off. It tells such a machine from a process merely stopped, whose kernel still acknowledges.
        limit_s = max(timeouts.lost_after_s - 2 * timeouts.heartbeat_s, 0.5 * timeouts.lost_after_s)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limit_s * 1000))


def validate_member(own: Hello, message: Mapping[str, Any], taken: Mapping[int, str], noun: str) -> SettingError | None:
    """Why a member that says hello cannot be one of this job; `taken` maps the ids that have come to their hosts."""
    member, count, host = message.get("member"), message.get("num_members"), host_of(message)
    if message.get("protocol") != PROTOCOL:
        return SettingError(
            f"Host {host} speaks version {printable(repr(message.get('protocol')), 20)} of stormo's control channel",
            f"host {own.host} speaks version {PROTOCOL}",
            f"install the same release of stormo on every {noun}",
        )
    if not isinstance(member, int) or not isinstance(count, int):
        return SettingError(
            f"Host {host} came without its {noun} id",
            "every member has one",
            f"install the same release of stormo on every {noun}",
        )
    # Nodes are numbered by the user's flags, ranks by their launcher.
    own_count, their_count, their_id = (
        (f"--num-nodes {own.num_members}", f"--num-nodes {count}", f"--node-id {member}")
        if noun == "node"
        else (*(f"a world of {counted(number, 'rank')}" for number in (own.num_members, count)), f"rank {member}")
    )
    if count != own.num_members:
        return SettingError(
            f"Host {host} was started with {their_count} and host {own.host} with {own_count}",
            "both come to the same job",
            f"start every {noun} with the same number of {noun}s",
        )
    if not 0 <= member < own.num_members:
        return SettingError(
            f"Host {host} was started with {their_id} of {count}",
            f"{noun} ids run from 0 to {count - 1}",
            f"give every {noun} its own id from that range",
        )
    if member in taken:
        return SettingError(
            f"Host {host} was started with {their_id}",
            f"host {taken[member]} has already come as {noun} {member}",
            f"give every {noun} its own id from 0 to {count - 1}",
        )
    return None if message.get("digest") == own.digest else _difference(own, message, noun)


def _difference(own: Hello, message: Mapping[str, Any], noun: str) -> SettingError:
    member, host, theirs = message["member"], host_of(message), message.get("options")
    theirs = theirs if isinstance(theirs, dict) else {}
    names = [name for name in sorted({*own.options, *theirs}) if own.options.get(name) != theirs.get(name)]
    if not names:
        return SettingError(
            f"{noun.capitalize()} {member} (host {host}) was started with the same options as {noun} {own.member}",
            "its settings differ in something that is no option",
            f"use the same release of stormo and the same files on every {noun}",
        )
    differences = "; ".join(
        f"{printable(name, 100)} is {_value(own.options.get(name))} on {noun} {own.member} (host {own.host}) "
        f"and {_value(theirs.get(name))} on {noun} {member} (host {host})"
        for name in names[:_MAX_OPTIONS_SHOWN]
    )
    more = f", and {len(names) - _MAX_OPTIONS_SHOWN} more differ" if len(names) > _MAX_OPTIONS_SHOWN else ""
    return SettingError(
        differences + more, f"all {noun}s must run the same job", f"start every {noun} with the same options"
    )


def host_of(message: Mapping[str, Any]) -> str:
    """The host name a message gives, fit to be shown."""
    return printable(str(message.get("host", "?")), 300)


def _value(value: Any) -> str:
    return "not set" if value is None else printable(str(value), 200) or "empty"
