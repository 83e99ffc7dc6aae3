"""Which of several failures is the root cause: a rank that dies makes its peers complain, often before it is seen.

Pure functions of what was seen and when; `failure_collector` collects it.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from stormo.launch.failure import ORDERLY_EXIT_CODES, Failure
from stormo.launch.peer_loss import PeerLoss

_MAX_NAMED = 4
_HINT = (
    "set a larger --timeout (in a script: World(timeout_s=...)) if a step, a save or what comes before the first step "
    "may take that long"
)


class Severity(IntEnum):
    """How likely a failure is the root cause, the likeliest first."""

    CAUSE = 0  # it said so itself, or was killed
    DOUBTFUL = 1  # aborted: libraries do this also when a peer has vanished
    SECONDARY = 2  # it complains that a peer has vanished


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureEvent:
    """One failure, and when it was seen."""

    failure: Failure
    severity: Severity
    seen_at: float
    rank: int | None = None  # of a worker of this node
    from_other: bool = False  # another node, or another rank's process, told of it


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderlyExit:
    """A rank that ended in order, perhaps while the others still needed it."""

    rank: int
    host: str
    exit_code: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SettleTimes:
    """How long to wait for a better explanation."""

    cause_s: float = 0.3
    secondary_s: float = 3.0
    other_nodes_s: float = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MissingRank:
    """A rank that runs and has not complained: the others may wait for it."""

    rank: int
    host: str
    state: str = ""  # follows its name: "(pid 7) is at step 3: it is running"; empty where it is not known
    has_joined: bool = True  # False before stormo.World()


def severity_of(exit_code: int) -> Severity:
    """The severity of an end without a report."""
    return Severity.DOUBTFUL if exit_code == -signal.SIGABRT else Severity.CAUSE


def is_orderly(exit_code: int) -> bool:
    """Whether an exit code means that the worker ended as it should."""
    return exit_code in ORDERLY_EXIT_CODES


def _likeliest(events: Sequence[FailureEvent]) -> FailureEvent:
    return min(events, key=lambda event: (event.severity, event.seen_at))


def decide_at(events: Sequence[FailureEvent], settle: SettleTimes, *, several_nodes: bool) -> float:
    """The time from which on no better explanation is waited for."""
    likeliest = _likeliest(events)
    if likeliest.severity is Severity.CAUSE:
        # Another node has done its own waiting before it told.
        return likeliest.seen_at + (0.0 if likeliest.from_other else settle.cause_s)
    wait_s = settle.secondary_s
    if likeliest.severity is Severity.SECONDARY and several_nodes:
        wait_s = settle.other_nodes_s
    return min(event.seen_at for event in events) + wait_s


def root_cause(events: Sequence[FailureEvent], exits: Sequence[OrderlyExit]) -> FailureEvent:
    """The failure to name; where there are only complaints, a rank that ended early explains them."""
    likeliest = _likeliest(events)
    if likeliest.severity is not Severity.SECONDARY:
        return likeliest
    complaint = likeliest.failure
    if not exits:
        return replace(likeliest, failure=complaint.as_cause())
    first = exits[0]
    waited_s = None if complaint.loss is None else complaint.loss.waited_s
    then = complaint.what if waited_s is None else f"waited {waited_s:g} s for it before it gave up"
    failure = Failure(
        kind="early",
        who=f"rank {first.rank}",
        host=first.host,
        what=f"ended early with exit code {first.exit_code}",
        details=f"Then {complaint.who} on host {complaint.host} missed it and {then}",
    )
    return FailureEvent(failure=failure, severity=Severity.CAUSE, seen_at=likeliest.seen_at)


def waiting_text(rank: int, loss: PeerLoss) -> str:
    """What the worker of a script says that misses another one."""
    what = "failed, or has ended before it" if loss.waited_s is None else f"not come within {loss.waited_s:g} s"
    return f"rank {rank} is at: {loss.at}; another rank has {what}.{loss.remark}"


def blocking_rank(complaints: Sequence[Failure], missing: Sequence[MissingRank], elsewhere: Sequence[int]) -> Failure:
    """The failure to show where ranks waited in vain: it names the rank that blocked them, as far as that is known.

    Args:
        complaints: of those that waited; one of them at least gave up after its time.
        missing: ranks that have not complained and of which more is known.
        elsewhere: ranks of other nodes that are known not to have complained.
    """
    waits = [(one, one.loss) for one in sorted(complaints, key=lambda one: one.rank) if one.loss is not None]
    first, loss, waited_s = next((one, it, it.waited_s) for one, it in waits if it.waited_s is not None)
    states = [f"rank {one.rank} {one.state}" for one in missing[:_MAX_NAMED] if one.state]
    late = [one for one in missing if not one.has_joined]
    at = loss.at or ("stormo.World()" if late else "")
    if not at:  # in something of a library's, and the traceback says in what
        return replace(first, what="; ".join([f"waited {waited_s:g} s for another worker and gave up", *states, _HINT]))
    if not missing:
        return _all_wait(waits, waited_s, elsewhere)
    what = f"did not come within {waited_s:g} s to where {first.who} waits: {at}"
    named = late or missing
    return replace(
        first,
        who=_names([one.rank for one in named]),
        host=named[0].host,
        what="; ".join([what, *states, _HINT]) + _after(loss.remark),
        details="",
    )


def _all_wait(waits: Sequence[tuple[Failure, PeerLoss]], waited_s: float, elsewhere: Sequence[int]) -> Failure:
    """Where every rank that is known of waits: the place of the fewest comes first."""
    places: dict[str, list[tuple[Failure, PeerLoss]]] = {}
    for one, loss in waits:
        places.setdefault(loss.at or "something that was not announced", []).append((one, loss))
    at, *others = sorted(places, key=lambda place: len(places[place]))
    first, loss = places[at][0]
    ways = [f"{_names([one.rank for one, _ in places[place]])} at: {place}" for place in others[:_MAX_NAMED]]
    if elsewhere:
        parts = [*ways, f"{_names(elsewhere)} of another node did not come", _HINT]
    elif ways:
        parts = [*ways, "they would wait for each other in vain, so let every worker take the same way"]
    else:
        parts = ["another worker did not come", _HINT]
    return replace(first, what="; ".join([f"waited {waited_s:g} s at: {at}", *parts]) + _after(loss.remark))


def _names(ranks: Sequence[int]) -> str:
    named = ", ".join(str(rank) for rank in ranks[:_MAX_NAMED])
    more = f" and {len(ranks) - _MAX_NAMED} more" if len(ranks) > _MAX_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"


def _after(remark: str) -> str:
    return f".{remark}" if remark else ""
