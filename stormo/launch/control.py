"""The control channel, over which the members of a job join, compare settings, and learn of each other's end.

Members are agents (one a node) or, under another launcher, ranks. JSON lines over TCP: member 0 serves (`server`), the
others are clients (`client`). There is no thread: the owner waits on `fileno` and calls `poll` a few times a second,
which reads, sends heartbeats and returns events. If joining fails, `poll` raises the same error on every member. No
training data passes here. Nothing is read before both sides have shown that they know the secret of the job (`auth`).
"""

from __future__ import annotations

import hashlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stormo.errors import EXIT_FAILURE, SettingError, StormoError, pluralize
from stormo.launch.failure import OUT_OF_MEMORY, Failure, printable, signal_name
from stormo.launch.json_socket import JsonSocket
from stormo.system.process import fatal_signal, pid_namespace, process_state

PROTOCOL = 2
MAX_REFUSAL_CHARACTERS = 4000
AWAY_S = 5.0  # between two looks at the heartbeats: this process was stopped
_MAX_OPTIONS_SHOWN = 5
_MAX_OPTION_CHARACTERS = 200


class JoinError(StormoError):
    """Not all members joined in time."""

    def __init__(self, sentence: str) -> None:
        super().__init__(f"{sentence}.")


class RefusedError(StormoError):
    """The members do not fit together; carries the message of the member that noticed."""

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
    pid_namespace: str = field(default_factory=pid_namespace)  # in which the pid is valid

    def to_message(self) -> dict[str, Any]:
        """As JSON-ready values."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {"type": "hello", "protocol": PROTOCOL, **values, "options": self.short_options()}

    def short_options(self) -> dict[str, str]:
        """The options as they are sent and compared by name: one may hold a whole command line."""
        return {name: _short(value) for name, value in self.options.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelTimeouts:
    """How long the members of a channel wait for what."""

    join_s: float = 600.0
    heartbeat_s: float = 1.0
    lost_after_s: float = 10.0  # the other machine acknowledges nothing
    stalled_after_s: float = 10.0  # the machine answers, but its member sends nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class Go:
    """All members have joined; `payload` comes from member 0."""

    payload: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnded:
    """A rank has exited cleanly, perhaps too early; only member 0 learns of those of other members."""

    rank: int
    host: str
    exit_code: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Gone:
    """A member has vanished without a message."""

    member: int
    host: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """All members have exited cleanly; the exit code of the job."""

    exit_code: int


Event = Go | Failure | RankEnded | Gone | Ended  # a failure is one that another member reports


class Peer:
    """The other end of one connection."""

    def __init__(self, socket: JsonSocket, *, host: str = "") -> None:
        self.socket = socket
        self.host = host  # first the address, later the name
        self.nonce = ""  # this side's, of the handshake
        self.is_authenticated = False
        self.member: int | None = None
        self.pid: int | None = None  # None where its process cannot be seen from here
        self.step: int | None = None  # the last one it reported
        self.started_at = self.heard_at = self.beaten_at = time.monotonic()
        self.left: int | None = None  # the exit code with which it left
        self.settled = False  # its failure is known, so that its vanishing means nothing

    def introduce(self, message: Mapping[str, Any]) -> None:
        """Take its host, and its process id where that is valid here, from its hello or welcome."""
        self.host, pid = host_of(message), message.get("pid")
        self.pid = pid if isinstance(pid, int) and message.get("pid_namespace") == pid_namespace() else None

    def receive(self) -> list[dict[str, Any]]:
        """The messages that are there; each counts as a heartbeat."""
        messages = self.socket.receive()
        if messages:
            self.heard_at = time.monotonic()
        for message in messages:
            self.step = step if isinstance(step := message.get("step"), int) else self.step
        return messages

    def beat(self, *, step: int | None = None, after_s: float = 0.0) -> None:
        """Send a heartbeat unless the last one is younger than `after_s`."""
        self.socket.flush()
        now = time.monotonic()
        if now - self.beaten_at >= after_s:
            self.beaten_at = now
            self.socket.send({"type": "beat"} if step is None else {"type": "beat", "step": step})

    def gone(self, now: float, timeouts: ChannelTimeouts) -> str | None:
        """Why the peer counts as gone; None while it is there or after it has left."""
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
        self.step: int | None = None  # of this member, sent with every heartbeat
        self._hello = hello
        self._secret = secret
        self._timeouts = timeouts
        self._noun = noun
        self._polled_at = time.monotonic()
        self._deadline = self._polled_at + timeouts.join_s
        self._events: list[Event] = []
        self._selector = selectors.EpollSelector()  # its own descriptor can be waited on

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._selector.fileno()

    def rank_ended(self, rank: int, exit_code: int) -> None:
        """Report to member 0 that a rank has exited cleanly; member 0 itself knows."""

    def dismiss(self) -> None:
        """Stop serving: member 0 exits cleanly, and the others continue without the channel."""

    def _wait_anew_after_pause(self, now: float, peers: Iterable[Peer]) -> None:
        """Count the silence of the others from now on, if this process was stopped, perhaps with the whole job."""
        away_s, self._polled_at = now - self._polled_at, now
        if away_s > AWAY_S:
            for peer in peers:
                peer.heard_at = now

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _disconnect(self, peer: Peer) -> None:
        if peer.socket.fileno() >= 0:
            self._selector.unregister(peer.socket)
            peer.socket.close()


def configure(connected: socket.socket, timeouts: ChannelTimeouts) -> None:
    """Send small messages at once, and let the kernel close the connection to a silent machine in time."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # The limit counts from unacknowledged data, which heartbeats send every two periods at least. It tells a dead
        # machine from a stopped process, whose kernel still acknowledges.
        limit_s = max(timeouts.lost_after_s - 2 * timeouts.heartbeat_s, 0.5 * timeouts.lost_after_s)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limit_s * 1000))


def validate_member(own: Hello, message: Mapping[str, Any], taken: Mapping[int, str], noun: str) -> SettingError | None:
    """Why a member cannot join; `taken` maps the ids of those that have joined to their hosts."""
    member, count, host = message.get("member"), message.get("num_members"), host_of(message)
    if message.get("protocol") != PROTOCOL:
        return other_release(f"Host {host}", own, message, noun)
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
        else (*(f"a world of {pluralize(number, 'rank')}" for number in (own.num_members, count)), f"rank {member}")
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
            f"host {taken[member]} has already joined as {noun} {member}",
            f"give every {noun} its own id from 0 to {count - 1}",
        )
    return None if message.get("digest") == own.digest else _difference(own, message, noun)


def other_release(who: str, own: Hello, message: Mapping[str, Any], noun: str) -> SettingError:
    """The error for a member whose release speaks another version of the protocol."""
    return SettingError(
        f"{who} speaks version {printable(repr(message.get('protocol')), 20)} of stormo's control channel",
        f"host {own.host} speaks version {PROTOCOL}",
        f"install the same release of stormo on every {noun}",
    )


def _difference(own: Hello, message: Mapping[str, Any], noun: str) -> SettingError:
    member, host, theirs = message["member"], host_of(message), message.get("options")
    theirs = theirs if isinstance(theirs, dict) else {}
    ours = own.short_options()
    names = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    if not names:
        return SettingError(
            f"{noun.capitalize()} {member} (host {host}) was started with the same options as {noun} {own.member}",
            "its settings differ in something that is no option",
            f"use the same release of stormo and the same files on every {noun}",
        )
    differences = "; ".join(
        f"{printable(name, 100)} is {_value(ours.get(name))} on {noun} {own.member} (host {own.host}) "
        f"and {_value(theirs.get(name))} on {noun} {member} (host {host})"
        for name in names[:_MAX_OPTIONS_SHOWN]
    )
    more = f", and {len(names) - _MAX_OPTIONS_SHOWN} more differ" if len(names) > _MAX_OPTIONS_SHOWN else ""
    return SettingError(
        differences + more, f"all {noun}s must run the same job", f"start every {noun} with the same options"
    )


def host_of(message: Mapping[str, Any]) -> str:
    """The host name in a message, printable."""
    return printable(str(message.get("host", "?")), 300)


def exit_code_of(message: Mapping[str, Any]) -> int:
    """The exit code in a message; that of a failure where it is none."""
    code = message.get("exit_code")
    return code if isinstance(code, int) else EXIT_FAILURE


def _short(text: str) -> str:
    """A bounded text; where that is not the whole, a digest still tells two apart."""
    short = printable(text, _MAX_OPTION_CHARACTERS)
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return short if short == text else f"{short} (digest {digest[:8]})"


def _value(value: Any) -> str:
    return "not set" if value is None else printable(str(value), 2 * _MAX_OPTION_CHARACTERS) or "empty"
