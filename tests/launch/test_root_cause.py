"""Which of several failures is the root cause, how long to wait for a better one, and which rank blocked the others."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from stormo.distributed.store import PeerFailedError
from stormo.launch.control import RankEnded
from stormo.launch.failure import Failure, of_exception
from stormo.launch.root_cause import (
    FailureEvent,
    MissingRank,
    SettleTimes,
    Severity,
    blocking_rank,
    decide_at,
    root_cause,
    severity_of,
    waiting_text,
)
from stormo.launch.torch_errors import PeerLoss

SETTLE = SettleTimes(cause_s=0.3, secondary_s=1.5, other_nodes_s=3.0)


def event(rank: int, severity: Severity, seen_at: float, *, from_other: bool = False) -> FailureEvent:
    failure = Failure(
        kind="exception",
        who=f"rank {rank}",
        host="h",
        what="failed: X",
        secondary=severity is Severity.SECONDARY,
        rank=rank,
    )
    return FailureEvent(failure=failure, severity=severity, seen_at=seen_at, from_other=from_other)


def test_a_cause_beats_an_earlier_complaint_and_an_earlier_abort() -> None:
    events = [event(0, Severity.SECONDARY, 1.0), event(1, Severity.DOUBTFUL, 1.1), event(2, Severity.CAUSE, 1.2)]
    assert root_cause(events, []).failure.rank == 2


def test_the_first_of_several_causes_is_named() -> None:
    assert root_cause([event(0, Severity.CAUSE, 2.0), event(1, Severity.CAUSE, 1.0)], []).failure.rank == 1


def test_an_aborted_rank_beats_a_complaint() -> None:
    assert severity_of(-signal.SIGABRT) is Severity.DOUBTFUL
    assert severity_of(-signal.SIGKILL) is Severity.CAUSE
    assert severity_of(3) is Severity.CAUSE
    assert root_cause([event(0, Severity.SECONDARY, 1.0), event(1, Severity.DOUBTFUL, 2.0)], []).failure.rank == 1


def test_complaints_alone_point_at_the_rank_that_ended_early() -> None:
    endings = [RankEnded(rank=3, host="n2", exit_code=0)]
    named = root_cause([event(0, Severity.SECONDARY, 1.0)], endings).failure
    assert named.sentence == "rank 3 on host n2 ended early with exit code 0"
    assert not named.secondary
    assert root_cause([event(0, Severity.CAUSE, 1.0)], endings).failure.rank == 0


def test_a_complaint_without_explanation_becomes_the_cause() -> None:
    named = root_cause([event(1, Severity.SECONDARY, 2.0), event(0, Severity.SECONDARY, 1.0)], [])
    assert named.failure.rank == 0
    assert not named.failure.secondary


@pytest.mark.parametrize(
    ("events", "several_nodes", "expected"),
    [
        ([event(0, Severity.CAUSE, 1.0)], False, 1.3),
        ([event(0, Severity.CAUSE, 1.0)], True, 1.3),
        ([event(0, Severity.CAUSE, 1.0, from_other=True)], True, 1.0),
        ([event(0, Severity.SECONDARY, 1.0)], False, 2.5),
        ([event(0, Severity.SECONDARY, 1.0), event(1, Severity.SECONDARY, 2.0)], False, 2.5),
        ([event(0, Severity.SECONDARY, 1.0)], True, 4.0),
        ([event(0, Severity.SECONDARY, 1.0), event(1, Severity.CAUSE, 2.0)], True, 2.3),
        ([event(0, Severity.DOUBTFUL, 1.0)], True, 2.5),
    ],
)
def test_the_wait_depends_on_what_is_known(events: list[FailureEvent], several_nodes: bool, expected: float) -> None:
    assert decide_at(events, SETTLE, several_nodes=several_nodes) == pytest.approx(expected)


HINT = "set a larger --timeout (in a script: World(timeout_s=...)) if a step, a save or the start may take that long"


def complaint(rank: int, error: Exception, details: str = "") -> Failure:
    return replace(of_exception(error, rank=rank, host=f"n{rank}", secondary=True), details=details)


def waiter(rank: int, at: str, waited_s: float | None = 8.0, remark: str = "") -> Failure:
    loss = PeerLoss(waited_s, at, remark)
    return complaint(rank, PeerFailedError(waiting_text(rank, loss), loss))


def missing(rank: int, state: str, *, has_joined: bool = True) -> MissingRank:
    return MissingRank(rank=rank, host="here", state=state, has_joined=has_joined)


def named(complaints: list[Failure], absent: list[MissingRank], elsewhere: tuple[int, ...] = ()) -> Failure:
    return blocking_rank(complaints, absent, elsewhere)


def test_the_worker_that_did_not_come_is_named_before_those_that_waited() -> None:
    gone = waiter(2, "world.sum in a.py line 3", None)
    late = missing(1, "(pid 7) is at step 3: it is running")
    found = named([gone, waiter(3, "world.sum in a.py line 3"), waiter(0, "world.sum in a.py line 3")], [late])
    assert found.sentence == (
        "rank 1 on host here did not come within 8 s to where rank 0 waits: world.sum in a.py line 3; "
        f"rank 1 (pid 7) is at step 3: it is running; {HINT}"
    )


def test_of_many_that_did_not_come_a_few_are_named() -> None:
    late = [missing(rank, f"(pid {rank})") for rank in range(1, 8)]
    found = named([waiter(0, "world.sum")], late)
    assert found.sentence.startswith("ranks 1, 2, 3, 4 and 3 more on host here did not come ")
    assert "(pid 4)" in found.sentence
    assert "(pid 5)" not in found.sentence


def test_a_worker_that_never_joined_is_named_without_the_words_of_torchs_store() -> None:
    late = missing(2, "(pid 7) has not called stormo.World(): it is running", has_joined=False)
    waits = complaint(0, RuntimeError("wait timeout after 8000ms, keys: /a"), "Traceback")
    found = named([waits], [missing(1, "(pid 6)"), late])
    assert found.sentence.startswith(
        "rank 2 on host here did not come within 8 s to where rank 0 waits: stormo.World()"
    )
    assert "Store" not in found.text()
    assert not found.details


def test_workers_that_wait_for_each_other_are_all_told_with_the_place_of_the_fewest_first() -> None:
    remark = " A batch norm waits so."
    start = [waiter(rank, "the start of epoch 2 in a.py line 9", remark=remark) for rank in (1, 2, 3)]
    found = named([*start, waiter(0, "a batch norm in a.py line 11", None, remark)], [])
    assert found.sentence == (
        "rank 0 on host n0 waited 8 s at: a batch norm in a.py line 11; ranks 1, 2, 3 at: the start of epoch 2 in a.py "
        "line 9; none of these can complete, so let every worker make the same calls. A batch norm waits so."
    )


def test_a_worker_of_another_node_is_named_by_its_rank_where_all_complaints_are_known() -> None:
    here = [waiter(0, "world.sum"), waiter(1, "world.sum")]
    assert named(here, [], (3,)).sentence == (
        f"rank 0 on host n0 waited 8 s at: world.sum; rank 3 of another node did not come; {HINT}"
    )
    assert "; another worker did not come; " in named(here, []).sentence


def test_a_wait_in_a_librarys_own_call_keeps_its_traceback() -> None:
    waits = complaint(0, RuntimeError("[gloo/x.cc:84] Timed out waiting 5000ms for recv"), "Traceback")
    found = named([waits], [missing(1, "runs")])
    assert found.sentence == f"rank 0 on host n0 waited 5 s for another worker and gave up; rank 1 runs; {HINT}"
    assert found.details == "Traceback"
