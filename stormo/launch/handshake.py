"""How two members of a job show each other that they know its secret, before either believes anything of the other.

The server sends a nonce; the client answers with its own and a code over both; the server answers with its code. Roles
are part of the codes, so that none can be sent back to where it came from. From then on every line carries a code too
(`Seal`), since whoever passes the greeting on between two honest members could otherwise speak for them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_GREETING_BYTES = 1024  # of one line, before the other side is known
_NONCE_BYTES = 32
_CODE_BYTES = 32
_CLIENT, _SERVER, _TO_SERVER, _TO_CLIENT = b"client knows", b"server knows", b"to server", b"to client"


class Seal:
    """The codes of one direction, each for a line and its number: none can be changed, left out or sent twice."""

    SIZE = 32  # characters in front of a line

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def code(self, line: bytes | bytearray) -> bytes:
        """The code of the next line."""
        self._number += 1
        code = hmac.digest(self._key, b"%d " % self._number + line, hashlib.sha256)
        return code.hex()[: self.SIZE].encode()


@dataclass(frozen=True, slots=True)
class Greeting:
    """One conversation's nonces under a secret."""

    secret: bytes
    server_nonce: str
    client_nonce: str

    def client_code(self) -> str:
        """By which the client is known."""
        return self._mac(_CLIENT).hex()

    def server_code(self) -> str:
        """By which the server is known."""
        return self._mac(_SERVER).hex()

    def seals(self) -> tuple[Seal, Seal]:
        """Of what goes to the server, and of what goes to the client."""
        return Seal(self._mac(_TO_SERVER)), Seal(self._mac(_TO_CLIENT))

    def _mac(self, role: bytes) -> bytes:
        words = b"|".join((role, self.server_nonce.encode(), self.client_nonce.encode()))
        return hmac.digest(self.secret, words, hashlib.sha256)


def new_nonce() -> str:
    """A number that was never used before."""
    return secrets.token_hex(_NONCE_BYTES)


def nonce_in(message: Mapping[str, Any]) -> str | None:
    """The nonce of a message from anyone; None where it has none."""
    return _hex(message.get("nonce"), _NONCE_BYTES)


def has_code(message: Mapping[str, Any], expected: str) -> bool:
    """Whether a message from anyone carries this code."""
    code = _hex(message.get("code"), _CODE_BYTES)
    return code is not None and hmac.compare_digest(code, expected)


def _hex(value: object, num_bytes: int) -> str | None:
    is_hex = isinstance(value, str) and len(value) == 2 * num_bytes and set(value) <= set("0123456789abcdef")
    return str(value) if is_hex else None
