"""The client of the control channel, in every member but member 0: connects to the server, joins, and listens."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from stormo.errors import EXIT_FAILURE, EXIT_USAGE, SettingError
from stormo.launch.address import family_of, resolve, shown
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
    RefusedError,
    configure,
    exit_code_of,
    other_release,
)
from stormo.launch.failure import Failure, printable
from stormo.launch.json_socket import JsonSocket

_ATTEMPT_TIMEOUT_S = 5.0  # for one connection to be accepted and welcomed
_FIRST_RETRY_AFTER_S = 0.1
_LAST_RETRY_AFTER_S = 1.0
_SEND_TIMEOUT_S = 1.0


class Client(Control):
    """One member's connection to member 0; retries until the join timeout, as member 0 may start last."""

    def __init__(
        self,
        address: str,
        port: int,
        hello: Hello,
        *,
        secret: bytes,
        timeouts: ChannelTimeouts,
        noun: str = "node",
        find_server: Callable[[], tuple[str, int] | None] | None = None,
    ) -> None:
        """`find_server` gives the address of member 0 before every attempt; it is untrusted."""
        super().__init__(hello, secret=secret, timeouts=timeouts, noun=noun)
        self._address, self._port = address, port
        self._find_server = find_server
        self._handshake: Handshake | None = None  # once the server has challenged
        self._attempt_at = 0.0  # start of the current attempt, or earliest start of the next
        self._num_attempts = -1
        self._connecting: socket.socket | None = None
        self._server: Peer | None = None
        self._last_error = "nothing was tried"

    def poll(self, timeout_s: float = 0.0) -> list[Event]:
        """Wait at most so long; the events that happened."""
        self._connect()
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                self._connected()
            else:
                self._read(key.data)
        now = time.monotonic()
        if self._server is not None and self._server.is_authenticated:
            # Mostly the server's heartbeat was just answered; this is for a silent server.
            self._server.beat(step=self.step, after_s=2 * self._timeouts.heartbeat_s)
        if self._server is not None:
            self._wait_anew_after_pause(now, [self._server])
            self._notice_end(self._server, now)
        if not self.started:
            self._check_joining(now)
        return self._take_events()

    def report(self, failure: Failure) -> None:
        """Report a failure to member 0, and through it to all others."""
        self._send({"type": "failure", **failure.to_message()})
        if self._server is not None and not failure.secondary:
            self._server.settled = True

    def rank_ended(self, rank: int, exit_code: int) -> None:
        """Report to member 0 that a rank has exited cleanly."""
        self._send({"type": "ended", "rank": rank, "exit_code": exit_code})

    def leave(self, exit_code: int) -> None:
        """Report that this member exits cleanly; `Ended` follows when all have left."""
        self._send({"type": "bye", "exit_code": exit_code})

    def drain(self, timeout_s: float) -> None:
        """Wait until everything is sent, at most so long."""
        if self._server is not None:
            self._server.socket.drain(timeout_s)

    def abandon(self) -> None:
        """Close every descriptor in a forked child; unregistering one would change the parent's selector too."""
        if self._connecting is not None:
            self._connecting.close()
        if self._server is not None:
            self._server.socket.close()
        self._selector.close()

    def close(self) -> None:
        """Close the connection."""
        if self._server is not None:
            self._server.socket.finish(_SEND_TIMEOUT_S)
        self._close_connection()
        self._selector.close()

    def _connect(self) -> None:
        if self._server is not None or self._connecting is not None or time.monotonic() < self._attempt_at:
            return
        self._attempt_at = time.monotonic()
        self._num_attempts += 1
        if self._find_server is not None:
            found = self._find_server()
            if found is None:
                self._retry_later(f"{self._noun} 0 has not said where it listens")
                return
            self._address, self._port = found
        try:
            numbers = resolve(self._address)
        except SettingError as error:
            self._retry_later(str(error))
            return
        number = numbers[self._num_attempts % len(numbers)]  # not every address of a name need lead there
        connecting = socket.socket(family_of(number), socket.SOCK_STREAM)
        connecting.setblocking(False)
        self._connecting = connecting
        code = connecting.connect_ex((number, self._port))
        if code not in (0, errno.EINPROGRESS):
            self._retry_later(os.strerror(code))
            return
        self._selector.register(connecting, selectors.EVENT_WRITE)

    def _connected(self) -> None:
        connecting = self._connecting
        assert connecting is not None
        code = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code != 0:
            self._retry_later(os.strerror(code))
            return
        if connecting.getsockname() == connecting.getpeername():
            # Without a listener, a port of the outgoing range can be connected to itself.
            self._retry_later("nothing listens there")
            return
        self._selector.unregister(connecting)
        self._connecting = None
        configure(connecting, self._timeouts)
        self._server = Peer(JsonSocket(connecting, in_handshake=True), host=self._address)
        self._handshake = None
        self._selector.register(self._server.socket, selectors.EVENT_READ, self._server)

    def _read(self, server: Peer) -> None:
        for message in server.receive():
            kind = message.get("type")
            if not server.is_authenticated:
                self._authenticate(server, message)
            elif kind == "welcome":
                server.introduce(message)
            elif kind == "beat":
                server.beat(step=self.step)  # answered at once: the answers of many clients reach the server together
            elif kind == "go":
                payload = message.get("payload")
                self.started = True
                self._events.append(Go(payload=payload if isinstance(payload, dict) else {}))
            elif kind == "refuse":
                code = EXIT_USAGE if exit_code_of(message) == EXIT_USAGE else EXIT_FAILURE
                raise RefusedError(printable(str(message.get("sentence")), 2 * MAX_REFUSAL_CHARACTERS), code)
            elif kind == "failure":
                failure = Failure.from_message(message)
                if failure is not None:
                    server.settled = True  # it ends now, too
                    self._events.append(failure)
            elif kind == "end":
                server.left = exit_code_of(message)
                self._events.append(Ended(exit_code=server.left))

    def _authenticate(self, server: Peer, message: Mapping[str, Any]) -> None:
        """Answer the challenge; send the hello only to a server that has proved that it knows the secret."""
        kind = message.get("type")
        if self._handshake is None:
            theirs = nonce_in(message)
            if kind != "challenge" or (theirs is None and message.get("protocol") == PROTOCOL):
                self._reject_server(self._not_stormo())
                return
            if message.get("protocol") != PROTOCOL or theirs is None:
                self._reject_server(
                    other_release(f"{self._noun.capitalize()} 0 at {self._where}", self._hello, message, self._noun)
                )
                return
            self._handshake = Handshake(self._secret, theirs, new_nonce())
            answer = {"type": "answer", "nonce": self._handshake.client_nonce, "code": self._handshake.client_code()}
            server.socket.send(answer)
        elif kind != "proof" or not has_code(message, self._handshake.server_code()):
            self._reject_server(self._not_authenticated())
        else:
            server.is_authenticated = True
            server.socket.seal(*self._handshake.seals())
            server.socket.send(self._hello.to_message())

    def _reject_server(self, error: SettingError) -> None:
        """What listens there is not member 0: raise the error, or retry where the address may change."""
        if self._find_server is None:
            raise error
        self._retry_later(str(error))

    def _notice_end(self, server: Peer, now: float) -> None:
        if not server.is_authenticated:
            if server.socket.fault is not None:
                self._reject_server(self._not_stormo())
            elif server.socket.closed:
                self._retry_later("whatever listens there closes the connection at once")
            return
        why = server.gone(now, self._timeouts)
        if why is not None:
            if not self.started:
                raise JoinError(f"{self._noun} 0 on host {server.host} {why} before the job began")
            server.settled = True
            self._events.append(Gone(member=0, host=server.host, why=why))
        if why is not None or server.socket.closed:
            self._disconnect(server)

    def _check_joining(self, now: float) -> None:
        has_joined = self._server is not None and self._server.is_authenticated
        # A server that has admitted this member times out itself, and one that is stuck sends no heartbeat.
        if now > self._deadline and not has_joined:
            raise JoinError(
                f"{self._noun} {self._hello.member} (host {self._hello.host}) tried to reach {self._noun} 0 at "
                f"{self._where} for {self._timeouts.join_s:g} s, but without success ({self._last_error}); "
                f"check that {self._noun} 0 runs, that --master-addr and --master-port are the same on every "
                f"{self._noun}, and that no firewall closes the port"
            )
        waiting = self._connecting is not None or (self._server is not None and not has_joined)
        if waiting and now - self._attempt_at > _ATTEMPT_TIMEOUT_S:
            accepted = self._server is not None
            self._retry_later(
                "something accepts the connection there, but does not answer as stormo does"
                if accepted
                else "no answer; its packets may be dropped by a firewall"
            )

    def _retry_later(self, error: str) -> None:
        self._last_error = error
        self._close_connection()
        self._attempt_at = time.monotonic() + min(_FIRST_RETRY_AFTER_S * (1 + self._num_attempts), _LAST_RETRY_AFTER_S)

    def _close_connection(self) -> None:
        if self._connecting is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._connecting)
            self._connecting.close()
            self._connecting = None
        if self._server is not None:
            self._disconnect(self._server)
            self._server = None

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._server is not None and self._server.is_authenticated:
            self._server.socket.send(message)

    def _not_authenticated(self) -> SettingError:
        return SettingError(
            f"--master-port {self._port} was set",
            f"what listens on {self._where} does not have the secret of this job",
            f"{remedy(os.environ)}; if it is another user's program, set another --master-port on every {self._noun}",
        )

    def _not_stormo(self) -> SettingError:
        return SettingError(
            f"--master-port {self._port} was set",
            f"something other than stormo listens on {self._where}",
            f"set another --master-port on every {self._noun}, or end that program",
        )

    @property
    def _where(self) -> str:
        return shown(self._address, self._port)
