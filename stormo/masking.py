"""Names that speak of a secret: what they hold is not written into any file."""

from __future__ import annotations

import re

MASK = "***"
_SECRET_WORDS = frozenset(
    (
        *("token", "secret", "password", "passwd", "passphrase", "pass", "pw", "pwd", "key", "apikey", "authtoken"),
        *("jwt", "auth", "credential", "credentials"),
    )
)


def is_secret_name(name: str) -> bool:
    """Whether an option or a variable of this name holds a secret: --hub-token, authToken, db_pw."""
    apart = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    return not _SECRET_WORDS.isdisjoint(re.split(r"[^a-z0-9]+", apart.lower()))


def masked(name: str, value: object) -> object:
    """The value of an option, or the mask where it is a text and the name speaks of a secret."""
    return MASK if isinstance(value, str) and value and is_secret_name(name) else value
