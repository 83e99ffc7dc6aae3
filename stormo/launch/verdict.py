"""Which of several signs of trouble is the cause: a rank that dies makes its peers complain, often before it is seen.

Pure arithmetic on what was seen and when; the agent collects the signs and acts.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from stormo.launch.failure import ORDERLY_EXIT_CODES, Failure


class Weight(IntEnum):
    """How likely a sign is the cause, the likeliest first."""

    CAUSE = 0  # it said so itself, or was killed
    DOUBTFUL = 1  # aborted: libraries do this also when a peer has vanished
    SECONDARY = 2  # it complains that a peer has vanished


@dataclass(frozen=True, kw_only=True, slots=True)
class Sign:
    """One thing seen that may have ended the job."""

    failure: Failure
    weight: Weight
    seen_at: float
    rank: int | None = None  # of a worker of this node
    from_other_node: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """A rank that ended in order, perhaps while the others still needed it."""

    rank: int
    host: str
    exit_code: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Settling:
    """How long to wait for a better explanation."""

    cause_s: float = 0.3
    secondary_s: float = 3.0
    other_nodes_s: float = 3.0


def weigh(exit_code: int) -> Weight:
    """The weight of an end without a report."""
    return Weight.DOUBTFUL if exit_code == -signal.SIGABRT else Weight.CAUSE


def is_orderly(exit_code: int) -> bool:
    """Whether an exit code means that the worker ended as it should."""
    return exit_code in ORDERLY_EXIT_CODES


def best(signs: Sequence[Sign]) -> Sign:
    """The likeliest cause: by weight, then the first seen."""
    return min(signs, key=lambda sign: (sign.weight, sign.seen_at))


def decide_at(signs: Sequence[Sign], settling: Settling, *, several_nodes: bool) -> float:
    """The time from which on no better explanation is waited for."""
    likeliest = best(signs)
    if likeliest.weight is Weight.CAUSE:
        # Another node has done its own waiting before it told.
        return likeliest.seen_at + (0.0 if likeliest.from_other_node else settling.cause_s)
    patience_s = settling.secondary_s
    if likeliest.weight is Weight.SECONDARY and several_nodes:
        patience_s = settling.other_nodes_s
    return min(sign.seen_at for sign in signs) + patience_s


def cause(signs: Sequence[Sign], endings: Sequence[Ending]) -> Sign:
    """The sign to name; when there are only complaints, a rank that ended early explains them."""
    likeliest = best(signs)
    if likeliest.weight is not Weight.SECONDARY:
        return likeliest
    if not endings:
        return Sign(
            failure=likeliest.failure.as_cause(),
            weight=likeliest.weight,
            seen_at=likeliest.seen_at,
            rank=likeliest.rank,
            from_other_node=likeliest.from_other_node,
        )
    first = endings[0]
    complaint = likeliest.failure
    waited_s = None if complaint.loss is None else complaint.loss.waited_s
    then = complaint.what if waited_s is None else f"waited {waited_s:g} s for it before it gave up"
    failure = Failure(
        kind="early",
        who=f"rank {first.rank}",
        host=first.host,
        what=f"ended early with exit code {first.exit_code}",
        details=f"Then {complaint.who} on host {complaint.host} missed it and {then}",
    )
    return Sign(failure=failure, weight=Weight.CAUSE, seen_at=likeliest.seen_at)
