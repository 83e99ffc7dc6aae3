"""Tells errors that only say that another worker is gone or late from those that are causes.

Gloo, NCCL and torch's store raise texts; every text that is known is here, and its test provokes or records it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PeerLoss:
    """A worker misses another one."""

    waited_s: float | None = None  # how long before it gave up; None where the other was found to be gone
    at: str = ""  # what it was about to do with the others; empty where it does not say
    remark: str = ""


# The group is how long was waited, in the unit of the second entry.
_GAVE_UP = [
    (re.compile(pattern), unit_s)
    for pattern, unit_s in (
        (r"gloo[^\]]*\].* Timed out waiting (\d+)ms", 1e-3),
        (r"(?:wait|barrier) timeout after (\d+)ms, keys?:", 1e-3),  # the store
        (r"Timed out after (\d+) seconds waiting for clients", 1.0),  # the store, as it opens
        (r"client socket has timed out after (\d+)ms while trying to connect", 1e-3),
        (r"ran for (\d+) milliseconds before timing out", 1e-3),  # NCCL's watchdog
    )
]
_GONE = [
    re.compile(pattern, re.DOTALL)
    for pattern in (
        # Gloo says "no error" where a pair was closed under it.
        r"gloo[^\]]*\].*(?:Connection (?:closed|reset) by peer|Broken pipe|Connection refused|Socket closed|no error)",
        r"Failed to (?:recv|send), (?:got|sent) 0 bytes\. Connection was likely closed",  # the store
        r"The client socket has failed to connect to",  # the store
        r"(?:recv|send)\w* failed on .*(?:Connection reset by peer|Broken pipe)",  # the store
        # NCCL; other errors of its ("unhandled system error", "invalid usage") are causes unless they name a peer.
        r"NCCL error.*(?:remote process exited or there was a network error|Connection closed by remote peer)",
        r"NCCL error.*Last error:.*(?:Connection reset by peer|Connection refused|Broken pipe)",
        r"NCCL communicator was aborted",
    )
]


def peer_loss(error: BaseException) -> PeerLoss | None:
    """The loss of a peer that an error tells of; None for an error that is a cause of its own.

    An error of stormo's that does has it as an attribute, `peer_loss`.
    """
    known = getattr(error, "peer_loss", None)
    if isinstance(known, PeerLoss):
        return known
    if not isinstance(error, RuntimeError):  # as those of torch.distributed are
        return None
    text = str(error)
    for pattern, unit_s in _GAVE_UP:
        if found := pattern.search(text):
            return PeerLoss(waited_s=int(found[1]) * unit_s)
    is_gone = is_file_timeout(error) or any(pattern.search(text) for pattern in _GONE)
    return PeerLoss() if is_gone else None


def is_file_timeout(error: RuntimeError) -> bool:
    """Whether torch's store in a file gave up waiting; it does not say for how long."""
    return str(error) == "Wait timeout"
