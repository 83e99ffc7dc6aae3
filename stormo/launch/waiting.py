"""Who has kept the others waiting: out of what those say that have waited in vain, and of who says nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stormo.launch.failure import Failure
from stormo.launch.peer_loss import PeerLoss

_MAX_NAMED = 4


def waiting_text(rank: int, loss: PeerLoss) -> str:
    """What the worker of a script says that misses another one."""
    what = "failed, or has ended before it" if loss.waited_s is None else f"not come within {loss.waited_s:g} s"
    return f"rank {rank} is at: {loss.at}; another rank has {what}.{loss.remark}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Absent:
    """A worker of this node that runs and has not complained: the others may wait for it."""

    rank: int
    state: str  # goes on after its name: "(pid 7) is at step 3 and says: it is running"
    has_joined: bool = True  # False before stormo.World()


def named_after_wait(
    complaints: Sequence[Failure], absent: Sequence[Absent], *, elsewhere: Sequence[int], host: str, limit: str
) -> Failure:
    """The failure to show where workers have waited in vain: it names whom they waited for, as far as that is known.

    Args:
        complaints: of those that waited; one of them at least gave up after its time.
        absent: workers of this node that have not complained.
        elsewhere: ranks of other nodes that are known not to have complained.
        host: of this node.
        limit: what to set for a longer wait.
    """
    waits = [(one, one.loss) for one in sorted(complaints, key=lambda one: one.rank) if one.loss is not None]
    first, missed, waited_s = next((one, it, it.waited_s) for one, it in waits if it.waited_s is not None)
    hint = f"set a larger {limit} if a step, a save or what comes before the first may take that long"
    states = [f"rank {one.rank} {one.state}" for one in absent[:_MAX_NAMED]]
    late = [one for one in absent if not one.has_joined]
    at = missed.at or ("stormo.World()" if late else "")
    if not at:  # in something of a library's, and the traceback says in what
        return replace(first, what="; ".join([f"waited {waited_s:g} s for another worker and gave up", *states, hint]))
    if not absent:
        return _of_all(waits, waited_s, elsewhere, hint)
    what = f"did not come within {waited_s:g} s to where {first.who} waits: {at}"
    return replace(
        first,
        who=_names([one.rank for one in late or absent]),
        host=host,
        what="; ".join([what, *states, hint]) + _after(missed.remark),
        details="",
    )


def _of_all(waits: Sequence[tuple[Failure, PeerLoss]], waited_s: float, elsewhere: Sequence[int], hint: str) -> Failure:
    """Where every worker that is known of waits: the place of the fewest comes first."""
    places: dict[str, list[tuple[Failure, PeerLoss]]] = {}
    for one, missed in waits:
        places.setdefault(missed.at or "something that was not announced", []).append((one, missed))
    at, *others = sorted(places, key=lambda place: len(places[place]))
    first, missed = places[at][0]
    ways = [f"{_names([one.rank for one, _ in places[place]])} at: {place}" for place in others[:_MAX_NAMED]]
    if elsewhere:
        parts = [*ways, f"{_names(elsewhere)} of another node did not come", hint]
    elif ways:
        parts = [*ways, "they would wait for each other in vain, so let every worker take the same way"]
    else:
        parts = ["another worker did not come", hint]
    return replace(first, what="; ".join([f"waited {waited_s:g} s at: {at}", *parts]) + _after(missed.remark))


def _names(ranks: Sequence[int]) -> str:
    named = ", ".join(str(rank) for rank in ranks[:_MAX_NAMED])
    more = f" and {len(ranks) - _MAX_NAMED} more" if len(ranks) > _MAX_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"


def _after(remark: str) -> str:
    return f".{remark}" if remark else ""
