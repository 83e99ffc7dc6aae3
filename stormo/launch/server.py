"""Member 0's side of the control channel: lets the others in, relays failures, knows when all have ended."""

from __future__ import annotations

import os
import resource
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stormo.errors import EXIT_FAILURE, EXIT_USAGE, StormoError
from stormo.launch.address import is_loopback, shown
from stormo.launch.auth import Handshake, has_code, new_nonce, nonce_in, remedy
from stormo.launch.control import (
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
    Reported,
    configure,
    validate_member,
)
from stormo.launch.failure import Failure, combined_exit_code
from stormo.launch.json_socket import JsonSocket
from stormo.launch.rank_info import host_name

_HELLO_TIMEOUT_S = 10.0  # a connection that has not said who it is by then is dropped
_MAX_UNAUTHENTICATED = 64  # beside one for each member that has not come
_ACCEPTED_AT_ONCE = 16
_SPARE_DESCRIPTORS = 512  # for everything else the process opens
_LAST_WORDS_S = 1.0


class Server(Control):
    """Serves the channel; owns the listening socket it is given."""

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
        _make_room(hello.num_members)
        self._listener = listener
        self._listener.setblocking(False)
        self._payload = dict(payload or {})
        self._how_to_start = how_to_start
        self._unauthenticated: dict[Peer, None] = {}  # in the order in which they came
        self._unknown: str | None = None  # the address of one who does not know the secret
        self._members: dict[int, Peer] = {}  # those that have come, also when they have gone again
        self._own_exit_code: int | None = None
        self._ended = False
        self._swept_at = 0.0
        self._selector.register(listener, selectors.EVENT_READ)

    def poll(self, timeout_s: float = 0.0) -> list[Event]:
        """Wait for events at most so long; those that happened."""
        # Those who are there first: one that has just said who it is must not have to make way for another.
        for key, _ in sorted(self._selector.select(timeout_s), key=lambda event: event[0].data is None):
            if key.data is None:
                self._accept()
            else:
                self._read(key.data)
        now = time.monotonic()
        if now - self._swept_at >= 0.5 * self._timeouts.heartbeat_s:  # not at every message: there may be thousands
            self._swept_at = now
            self._sweep(now)
        self._start(now)
        self._finish()
        return self._take_events()

    def running(self) -> list[Peer]:
        """The members that have come and neither left nor vanished."""
        return [peer for peer in self._members.values() if peer.left is None and not peer.socket.closed]

    def report(self, failure: Failure) -> None:
        """Tell every other member what has failed; a complaint stays here, where the cause is decided."""
        if not failure.secondary:
            self._relay({"type": "failure", **failure.to_message()})

    def leave(self, exit_code: int) -> None:
        """Say that this member has ended in order; `Ended` follows when all have."""
        self._own_exit_code = exit_code

    def drain(self, timeout_s: float) -> None:
        """Wait until everything said is on its way, at most so long."""
        deadline = time.monotonic() + timeout_s
        for peer in self._members.values():
            peer.socket.drain(max(0.0, deadline - time.monotonic()))

    def dismiss(self) -> None:
        """End in order and no longer serve the others, who continue without the channel."""
        if not self._ended:
            self._relay({"type": "end", "exit_code": self._own_exit_code or 0})

    def abandon(self) -> None:
        """Let go of every descriptor without a word, in a forked child that shares them with its parent."""
        # Unregistering would act on the parent's selector too.
        for peer in (*self._unauthenticated, *self._members.values()):
            peer.socket.close()
        self._listener.close()
        self._selector.close()

    def close(self) -> None:
        """Let go of every connection and of the port."""
        self._listener.close()
        for peer in self._unauthenticated:
            peer.socket.close()
        deadline = time.monotonic() + _LAST_WORDS_S
        for peer in self._members.values():
            peer.socket.finish(max(0.0, deadline - time.monotonic()))
        self._selector.close()

    def _sweep(self, now: float) -> None:
        """Look at every connection: send heartbeats, notice silence, drop those who never authenticated."""
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
            self._make_way()
            configure(connected, self._timeouts)
            peer = Peer(JsonSocket(connected, in_handshake=True), host=address)
            peer.nonce = new_nonce()
            peer.socket.send({"type": "challenge", "protocol": PROTOCOL, "nonce": peer.nonce})
            self._unauthenticated[peer] = None
            self._selector.register(peer.socket, selectors.EVENT_READ, peer)

    def _make_way(self) -> None:
        """Where too many are unauthenticated, drop the oldest of the address that has most of them.

        A member says at once who it is, and comes again if it was dropped.
        """
        missing = self._hello.num_members - len(self._members)
        if len(self._unauthenticated) >= _MAX_UNAUTHENTICATED + missing:
            crowded = Counter(peer.host for peer in self._unauthenticated).most_common(1)[0][0]
            self._drop(next(peer for peer in self._unauthenticated if peer.host == crowded))

    def _read(self, peer: Peer) -> None:
        for message in peer.receive():
            kind = message.get("type")
            if not peer.is_known:
                self._authenticate(peer, message)
            elif peer.member is None:
                if peer.settled:
                    continue  # was sent away and has yet to go
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
                code = message.get("exit_code")
                peer.left = code if isinstance(code, int) else EXIT_FAILURE
        if peer.socket.closed:
            self._notice_end(peer, time.monotonic())

    def _authenticate(self, peer: Peer, message: Mapping[str, Any]) -> None:
        """Let a peer prove that it knows the secret of the job, and prove it in turn."""
        theirs = nonce_in(message)
        if message.get("type") != "answer" or theirs is None:
            self._drop(peer)
            return
        handshake = Handshake(self._secret, peer.nonce, theirs)
        if not has_code(message, handshake.client_code()):
            self._unknown = peer.host
            peer.socket.send({"type": "stranger"})
            self._drop(peer)
            return
        peer.socket.send({"type": "proof", "code": handshake.server_code()})
        incoming, outgoing = handshake.seals()
        peer.socket.seal(outgoing, incoming)
        peer.is_known = True

    def _take_failure(self, peer: Peer, message: Mapping[str, Any]) -> None:
        failure = Failure.from_message(message)
        if failure is None:
            return
        self._events.append(Reported(failure=failure))
        if not failure.secondary:
            # A survivor's complaint goes no further: its owner waits for the cause here, and then tells all.
            peer.settled = True
            self._relay({"type": "failure", **failure.to_message()}, but=peer)

    def _admit(self, peer: Peer, message: Mapping[str, Any]) -> None:
        """Take a member in. One that does not fit ends the joining of all; once the job runs, only it is sent away."""
        taken = {self._hello.member: self._hello.host} | {id_: other.host for id_, other in self._members.items()}
        refusal = validate_member(self._hello, message, taken, self._noun)
        if refusal is None:
            self._unauthenticated.pop(peer, None)
            peer.introduce(message)
            peer.member = int(message["member"])
            self._members[peer.member] = peer
            own = self._hello
            peer.socket.send({"type": "welcome", "host": own.host, "pid": own.pid, "process_space": own.process_space})
            return
        words = {"type": "refuse", "sentence": str(refusal), "exit_code": EXIT_USAGE}
        peer.socket.send(words)
        if self.started:
            peer.settled = True  # it closes the connection itself, or is dropped like one that never spoke
            return
        peer.socket.finish(_LAST_WORDS_S)
        self._relay(words)
        self.drain(_LAST_WORDS_S)
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
        unknown = f"; somebody at {self._unknown} came without the job's secret: " if self._unknown else ""
        return (
            f"the job has {self._hello.num_members} {self._noun}s, but {which} not come to "
            f"{shown(address, port)}{note} within {self._timeouts.join_s:g} s"
            f"{unknown}{remedy(os.environ) if unknown else ''}{start}"
        )

    def _give_up(self, sentence: str) -> JoinError:
        error = JoinError(sentence)
        self._relay({"type": "refuse", "sentence": str(error), "exit_code": EXIT_FAILURE})
        self.drain(_LAST_WORDS_S)
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
        if peer.socket.fileno() >= 0:
            self._selector.unregister(peer.socket)
            peer.socket.close()


def _make_room(num_members: int) -> None:
    """Allow this process the descriptors that so many connections need."""
    needed = num_members + _SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise StormoError(
            f"{num_members} members connect to host {host_name()}, but a process there may open only {hard} files; "
            f"ask for a limit (ulimit -n) of at least {needed}."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
