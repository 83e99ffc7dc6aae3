"""Which of several failures is the root cause. A rank that dies makes its peers complain, often before it is seen.

`FailureCollector` collects the failures that one member of a job knows of, in an agent or in a rank without one.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from stormo.errors import first_names
from stormo.launch.control import Event, Gone, RankEnded
from stormo.launch.failure import Failure
from stormo.launch.torch_errors import PeerLoss

_MAX_NAMED = 4
_HINT = "set a larger --timeout (in a script: World(timeout_s=...)) if a step, a save or the start may take that long"


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
    from_other: bool = False  # reported by another node, or by another rank's process


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
    """The severity of an exit without a report."""
    return Severity.DOUBTFUL if exit_code == -signal.SIGABRT else Severity.CAUSE


def _likeliest(events: Sequence[FailureEvent]) -> FailureEvent:
    return min(events, key=lambda event: (event.severity, event.seen_at))


def decide_at(events: Sequence[FailureEvent], settle: SettleTimes, *, several_nodes: bool) -> float:
    """When to stop waiting for a better explanation."""
    likeliest = _likeliest(events)
    if likeliest.severity is Severity.CAUSE:
        # Another node has waited before it reported.
        return likeliest.seen_at + (0.0 if likeliest.from_other else settle.cause_s)
    wait_s = settle.secondary_s
    if likeliest.severity is Severity.SECONDARY and several_nodes:
        wait_s = settle.other_nodes_s
    return min(event.seen_at for event in events) + wait_s


def root_cause(events: Sequence[FailureEvent], exits: Sequence[RankEnded]) -> FailureEvent:
    """The failure to name; complaints alone are explained by a rank that exited early."""
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
    """What a script's rank says that misses another one."""
    what = "failed, or has ended before it" if loss.waited_s is None else f"not come within {loss.waited_s:g} s"
    return f"rank {rank} is at: {loss.at}; another rank has {what}.{loss.remark}"


def blocking_rank(complaints: Sequence[Failure], missing: Sequence[MissingRank], elsewhere: Sequence[int]) -> Failure:
    """The failure to show where ranks timed out in a collective: names the rank that blocked it, if known.

    Args:
        complaints: of the ranks that waited; at least one timed out.
        missing: ranks that run and have not complained.
        elsewhere: ranks of other nodes that have not complained.
    """
    waits = [(one, one.loss) for one in sorted(complaints, key=lambda one: one.rank) if one.loss is not None]
    first, loss, waited_s = next((one, it, it.waited_s) for one, it in waits if it.waited_s is not None)
    states = [f"rank {one.rank} {one.state}" for one in missing[:_MAX_NAMED] if one.state]
    late = [one for one in missing if not one.has_joined]
    at = loss.at or ("stormo.World()" if late else "")
    if not at:  # in a library: the traceback says where
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
    """Every known rank waits: the line where the fewest do comes first."""
    lines: dict[str, list[tuple[Failure, PeerLoss]]] = {}
    for one, loss in waits:
        lines.setdefault(loss.at or "something that was not announced", []).append((one, loss))
    at, *others = sorted(lines, key=lambda line: len(lines[line]))
    first, loss = lines[at][0]
    ways = [f"{_names([one.rank for one, _ in lines[line]])} at: {line}" for line in others[:_MAX_NAMED]]
    if elsewhere:
        parts = [*ways, f"{_names(elsewhere)} of another node did not come", _HINT]
    elif ways:
        parts = [*ways, "none of these can complete, so let every worker make the same calls"]
    else:
        parts = ["another worker did not come", _HINT]
    return replace(first, what="; ".join([f"waited {waited_s:g} s at: {at}", *parts]) + _after(loss.remark))


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {first_names([str(rank) for rank in ranks], most=_MAX_NAMED)}"


def _after(remark: str) -> str:
    return f".{remark}" if remark else ""


class FailureCollector:
    """The failures that one member of a job knows of."""

    def __init__(self, settle: SettleTimes, *, noun: str, several_nodes: bool, is_first: bool) -> None:
        """`noun`: what a member is, a node or a rank; `is_first`: this is member 0."""
        # Member 0 decides a little before the others would, so that all name the same cause.
        self._settle = replace(settle, other_nodes_s=0.8 * settle.other_nodes_s) if is_first else settle
        self._noun = noun
        self._several_nodes = several_nodes
        self._events: list[FailureEvent] = []
        self._exits: list[RankEnded] = []

    def __bool__(self) -> bool:
        return bool(self._events)

    def add(self, failure: Failure, severity: Severity = Severity.CAUSE, *, from_other: bool = False) -> None:
        """Add a failure."""
        severity = Severity.SECONDARY if failure.secondary else severity
        now = time.monotonic()
        self._events.append(FailureEvent(failure=failure, severity=severity, seen_at=now, from_other=from_other))

    def add_event(self, event: Event) -> None:
        """Add what another member reports, or that it is gone."""
        if isinstance(event, Failure):
            self.add(event, from_other=True)
        elif isinstance(event, Gone):
            self.add(Failure(kind="gone", who=f"{self._noun} {event.member}", host=event.host, what=event.why))
        elif isinstance(event, RankEnded):
            self._exits.append(event)

    def root_cause(
        self, running: Callable[[], Sequence[MissingRank]], elsewhere: Iterable[int] = (), *, is_complete: bool = False
    ) -> FailureEvent | None:
        """What ends the job, with the rank that blocked the others if one did; None while a better cause may come.

        Args:
            running: the ranks that this member sees run.
            elsewhere: the ranks of other members.
            is_complete: no better explanation can come.
        """
        settled_at = decide_at(self._events, self._settle, several_nodes=self._several_nodes)
        if not is_complete and time.monotonic() < settled_at:
            return None
        event = root_cause(self._events, self._exits)
        complaints = [one.failure for one in self._events if one.severity is Severity.SECONDARY]
        timed_out = any(one.loss is not None and one.loss.waited_s is not None for one in complaints)
        if event.severity is not Severity.SECONDARY or not timed_out:
            return event
        waiting = {one.rank for one in complaints}
        missing = [one for one in running() if one.rank not in waiting]
        silent = [rank for rank in elsewhere if rank not in waiting]
        return replace(event, failure=blocking_rank([one.as_cause() for one in complaints], missing, silent))
