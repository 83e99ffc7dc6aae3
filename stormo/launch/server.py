"""The server of the control channel, in member 0: admits the others, relays failures, knows when all have left."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stormo.errors import StormoError
from stormo.launch.address import is_loopback, shown
from stormo.launch.auth import Handshake, has_code, new_nonce, nonce_in, remedy
from stormo.launch.control import (
    MAX_REFUSAL_CHARACTERS,
    PROTOCOL,
    ChannelTimeouts,
    Control,
    Ended,
    Event,
    Go,
    Gone,
    Hello,
    JoinError,
    Peer,
    RankEnded,
    configure,
    exit_code_of,
    validate_member,
)
from stormo.launch.failure import Failure, combined_exit_code, printable
from stormo.launch.json_socket import JsonSocket
from stormo.launch.rank_info import host_name
from stormo.system.process import allow_open_files

_HELLO_TIMEOUT_S = 10.0  # for a connection to say hello
_MAX_UNAUTHENTICATED = 64  # beside one for each member that has not joined
_ACCEPTED_AT_ONCE = 16
_SPARE_DESCRIPTORS = 512  # for everything else the process opens
_SEND_TIMEOUT_S = 1.0


class Server(Control):
    """Serves the channel; owns the listening socket."""

    def __init__(
        self,
        listener: socket.socket,
        hello: Hello,
        *,
        secret: bytes,
        timeouts: ChannelTimeouts,
        payload: Mapping[str, Any] | None = None,
        noun: str = "node",
        how_to_start: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        super().__init__(hello, secret=secret, timeouts=timeouts, noun=noun)
        needed = hello.num_members + _SPARE_DESCRIPTORS
        limit = allow_open_files(needed)
        if limit is not None:
            raise StormoError(
                f"{hello.num_members} members connect to host {host_name()}, but a process there may open only {limit} "
                f"files; ask for a limit (ulimit -n) of at least {needed}."
            )
        self._listener = listener
        self._listener.setblocking(False)
        self._payload = dict(payload or {})
        self._how_to_start = how_to_start
        self._unauthenticated: dict[Peer, None] = {}  # oldest first
        self._refused_host: str | None = None  # the address of a peer without the secret
        self._members: dict[int, Peer] = {}  # all that have joined, also after they have gone
        self._own_exit_code: int | None = None
        self._ended = False
        self._swept_at = 0.0
        self._selector.register(listener, selectors.EVENT_READ)

    def poll(self, timeout_s: float = 0.0) -> list[Event]:
        """Wait at most so long; the events that happened."""
        # Known connections first: one that has just said hello must not be dropped for a new one.
        for key, _ in sorted(self._selector.select(timeout_s), key=lambda event: event[0].data is None):
            if key.data is None:
                self._accept()
            else:
                self._read(key.data)
        now = time.monotonic()
        self._wait_anew_after_pause(now, self._members.values())
        if now - self._swept_at >= 0.5 * self._timeouts.heartbeat_s:  # not at every message: there may be thousands
            self._swept_at = now
            self._sweep(now)
        self._start(now)
        self._finish()
        return self._take_events()

    def running(self) -> list[Peer]:
        """The members that have joined and neither left nor vanished."""
        return [peer for peer in self._members.values() if peer.left is None and not peer.socket.closed]

    def report(self, failure: Failure) -> None:
        """Report a failure to every other member; a complaint stays here, where the cause is decided."""
        if not failure.secondary:
            self._relay({"type": "failure", **failure.to_message()})

    def leave(self, exit_code: int) -> None:
        """Report that this member exits cleanly; `Ended` follows when all have left."""
        self._own_exit_code = exit_code

    def drain(self, timeout_s: float) -> None:
        """Wait until everything is sent, at most so long."""
        deadline = time.monotonic() + timeout_s
        for peer in self._members.values():
            peer.socket.drain(max(0.0, deadline - time.monotonic()))

    def dismiss(self) -> None:
        """Stop serving; the others continue without the channel."""
        if not self._ended:
            self._relay({"type": "end", "exit_code": self._own_exit_code or 0})

    def abandon(self) -> None:
        """Close every descriptor in a forked child; unregistering one would change the parent's selector too."""
        for peer in (*self._unauthenticated, *self._members.values()):
            peer.socket.close()
        self._listener.close()
        self._selector.close()

    def close(self) -> None:
        """Close every connection and the port."""
        self._listener.close()
        for peer in self._unauthenticated:
            peer.socket.close()
        deadline = time.monotonic() + _SEND_TIMEOUT_S
        for peer in self._members.values():
            peer.socket.finish(max(0.0, deadline - time.monotonic()))
        self._selector.close()

    def _sweep(self, now: float) -> None:
        """Send heartbeats, notice silent members, drop connections that never authenticated."""
        for peer in list(self._unauthenticated):
            if now - peer.started_at > _HELLO_TIMEOUT_S:
                self._drop(peer)
        for peer in self._members.values():
            peer.beat(after_s=0.9 * self._timeouts.heartbeat_s)
            self._notice_end(peer, now)

    def _notice_end(self, peer: Peer, now: float) -> None:
        why = None if peer.member is None else peer.gone(now, self._timeouts)
        if why is not None and peer.member is not None:
            peer.settled = True
            self._events.append(Gone(member=peer.member, host=peer.host, why=why))
        if why is not None or peer.socket.closed:
            self._drop(peer)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connected, (address, *_) = self._listener.accept()
            except OSError:  # there is none, or it has gone again meanwhile
                return
            self._limit_unauthenticated()
            configure(connected, self._timeouts)
            peer = Peer(JsonSocket(connected, in_handshake=True), host=address)
            peer.nonce = new_nonce()
            peer.socket.send({"type": "challenge", "protocol": PROTOCOL, "nonce": peer.nonce})
            self._unauthenticated[peer] = None
            self._selector.register(peer.socket, selectors.EVENT_READ, peer)

    def _limit_unauthenticated(self) -> None:
        """Where too many are unauthenticated, drop the oldest one of the address that has most of them.

        A member authenticates at once, and retries if it was dropped.
        """
        missing = self._hello.num_members - len(self._members)
        if len(self._unauthenticated) >= _MAX_UNAUTHENTICATED + missing:
            crowded = Counter(peer.host for peer in self._unauthenticated).most_common(1)[0][0]
            self._drop(next(peer for peer in self._unauthenticated if peer.host == crowded))

    def _read(self, peer: Peer) -> None:
        for message in peer.receive():
            kind = message.get("type")
            if not peer.is_authenticated:
                self._authenticate(peer, message)
            elif peer.member is None:
                if peer.settled:
                    continue  # refused, and still connected
                if kind != "hello":
                    self._drop(peer)
                    return
                self._admit(peer, message)
            elif kind == "failure":
                self._take_failure(peer, message)
            elif kind == "ended":
                rank, code = message.get("rank"), message.get("exit_code")
                if isinstance(rank, int) and isinstance(code, int):
                    self._events.append(RankEnded(rank=rank, host=peer.host, exit_code=code))
            elif kind == "bye":
                peer.left = exit_code_of(message)
        if peer.socket.closed:
            self._notice_end(peer, time.monotonic())

    def _authenticate(self, peer: Peer, message: Mapping[str, Any]) -> None:
        """Check that a peer knows the secret of the job, and prove it in turn."""
        theirs = nonce_in(message)
        if message.get("type") != "answer" or theirs is None:
            self._drop(peer)
            return
        handshake = Handshake(self._secret, peer.nonce, theirs)
        if not has_code(message, handshake.client_code()):
            self._refused_host = peer.host
            peer.socket.send({"type": "unauthenticated"})
            self._drop(peer)
            return
        peer.socket.send({"type": "proof", "code": handshake.server_code()})
        incoming, outgoing = handshake.seals()
        peer.socket.seal(outgoing, incoming)
        peer.is_authenticated = True

    def _take_failure(self, peer: Peer, message: Mapping[str, Any]) -> None:
        failure = Failure.from_message(message)
        if failure is None:
            return
        self._events.append(failure)
        if not failure.secondary:
            # A complaint goes no further: this member waits for the cause and then reports it to all.
            peer.settled = True
            self._relay({"type": "failure", **failure.to_message()}, but=peer)

    def _admit(self, peer: Peer, message: Mapping[str, Any]) -> None:
        """Admit a member. One that does not fit ends the join of all; once the job runs, only it is refused."""
        taken = {self._hello.member: self._hello.host} | {id_: other.host for id_, other in self._members.items()}
        refusal = validate_member(self._hello, message, taken, self._noun)
        if refusal is None:
            self._unauthenticated.pop(peer, None)
            peer.introduce(message)
            peer.member = int(message["member"])
            self._members[peer.member] = peer
            own = self._hello
            peer.socket.send({"type": "welcome", "host": own.host, "pid": own.pid, "pid_namespace": own.pid_namespace})
            return
        message = _refusal(refusal)
        peer.socket.send(message)
        if self.started:
            peer.settled = True  # it closes the connection, or is dropped after the hello timeout
            return
        peer.socket.finish(_SEND_TIMEOUT_S)
        self._relay(message)
        self.drain(_SEND_TIMEOUT_S)
        raise refusal

    def _start(self, now: float) -> None:
        if self.started:
            return
        for event in self._events:
            if isinstance(event, Gone):
                raise self._give_up(f"{self._noun} {event.member} on host {event.host} {event.why}")
        missing = [member for member in range(self._hello.num_members) if member not in self._members]
        missing.remove(self._hello.member)
        if not missing:
            self.started = True
            self._relay({"type": "go", "payload": self._payload})
            self._events.insert(0, Go(payload=self._payload))
        elif now > self._deadline:
            raise self._give_up(self._who_is_missing(missing))

    def _who_is_missing(self, missing: Sequence[int]) -> str:
        address, port = self._listener.getsockname()[:2]
        names = ", ".join(map(str, missing[:20])) + (", ..." if len(missing) > 20 else "")
        which = f"{self._noun} {names} has" if len(missing) == 1 else f"{self._noun}s {names} have"
        note = " (which only this machine can reach)" if is_loopback(address) else ""
        start = f"; {self._how_to_start(missing)}" if self._how_to_start else ""
        unknown = f"; {self._refused_host} connected without the secret of the job: " if self._refused_host else ""
        return (
            f"the job has {self._hello.num_members} {self._noun}s, but {which} not joined at "
            f"{shown(address, port)}{note} within {self._timeouts.join_s:g} s"
            f"{unknown}{remedy(os.environ) if unknown else ''}{start}"
        )

    def _give_up(self, sentence: str) -> JoinError:
        error = JoinError(sentence)
        self._relay(_refusal(error))
        self.drain(_SEND_TIMEOUT_S)
        return error

    def _finish(self) -> None:
        if self._ended or not self.started or self._own_exit_code is None:
            return
        codes = [peer.left for peer in self._members.values()]
        if None in codes:
            return
        self._ended = True
        exit_code = combined_exit_code([self._own_exit_code, *(code for code in codes if code is not None)])
        self._relay({"type": "end", "exit_code": exit_code})
        self._events.append(Ended(exit_code=exit_code))

    def _relay(self, message: Mapping[str, Any], *, but: Peer | None = None) -> None:
        for peer in self._members.values():
            if peer is not but:
                peer.socket.send(message)

    def _drop(self, peer: Peer) -> None:
        self._unauthenticated.pop(peer, None)
        self._disconnect(peer)


def _refusal(error: StormoError) -> dict[str, Any]:
    """What ends a member that waits; the sentence may hold a whole command line."""
    sentence = printable(str(error), MAX_REFUSAL_CHARACTERS)
    return {"type": "refuse", "sentence": sentence, "exit_code": error.exit_code}
