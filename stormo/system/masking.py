"""Names that speak of a secret: what they hold is not written into any file."""

from __future__ import annotations

import re

MASK = "***"
# Long words count wherever they stand, short ones by themselves; a key is a secret only where its name says of what.
_SECRET = re.compile(
    r"secret|passw(?:or)?d|passphrase|credential"
    r"|(?<!num )(?<!max )(?<!min )(?<!new )token(?!i[sz]|s per\b)"
    r"|\b(?:pw|pwd|pat|auth|jwt)\b|(?<!per )\bpass\b"
    r"|^key$|(?:api|access|private|ssh|auth|account|encryption|signing|deploy|license|hub|hf|wandb|openai|aws) ?keys?\b"
)


def is_secret_name(name: str) -> bool:
    """Whether an option or a variable of this name holds a secret: --hub-token, HFToken, PGPASSWORD, db_pw."""
    apart = re.sub(r"([a-z0-9])(?=[A-Z])|([A-Z])(?=[A-Z][a-z])", r"\1\2 ", name.rpartition(".")[2])
    return _SECRET.search(" ".join(re.findall(r"[a-z0-9]+", apart.lower()))) is not None


def masked(name: str, value: object) -> object:
    """The value of an option, or the mask where it is a text and the name speaks of a secret."""
    return MASK if isinstance(value, str) and value and is_secret_name(name) else value
