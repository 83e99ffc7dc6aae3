"""Which of several signs is the cause, and how long to wait for a better one."""

from __future__ import annotations

import signal

import pytest

from stormo.launch.failure import Failure
from stormo.launch.verdict import Ending, Settling, Sign, Weight, cause, decide_at, is_orderly, weigh

SETTLING = Settling(cause_s=0.3, secondary_s=1.5, other_nodes_s=3.0)


def sign(rank: int, weight: Weight, seen_at: float, *, from_other_node: bool = False) -> Sign:
    failure = Failure(
        kind="exception",
        who=f"rank {rank}",
        host="h",
        what="failed: X",
        secondary=weight is Weight.SECONDARY,
    )
    return Sign(failure=failure, weight=weight, seen_at=seen_at, rank=rank, from_other_node=from_other_node)


def test_a_cause_beats_an_earlier_complaint_and_an_earlier_abort() -> None:
    signs = [sign(0, Weight.SECONDARY, 1.0), sign(1, Weight.DOUBTFUL, 1.1), sign(2, Weight.CAUSE, 1.2)]
    assert cause(signs, []).rank == 2


def test_the_first_of_several_causes_is_named() -> None:
    assert cause([sign(0, Weight.CAUSE, 2.0), sign(1, Weight.CAUSE, 1.0)], []).rank == 1


def test_an_aborted_rank_beats_a_complaint() -> None:
    assert weigh(-signal.SIGABRT) is Weight.DOUBTFUL
    assert weigh(-signal.SIGKILL) is Weight.CAUSE
    assert weigh(3) is Weight.CAUSE
    assert cause([sign(0, Weight.SECONDARY, 1.0), sign(1, Weight.DOUBTFUL, 2.0)], []).rank == 1


def test_complaints_alone_point_at_the_rank_that_ended_early() -> None:
    endings = [Ending(rank=3, host="n2", exit_code=0)]
    named = cause([sign(0, Weight.SECONDARY, 1.0)], endings).failure
    assert named.sentence == "rank 3 on host n2 ended early with exit code 0"
    assert not named.secondary
    assert cause([sign(0, Weight.CAUSE, 1.0)], endings).rank == 0


def test_a_complaint_without_explanation_becomes_the_cause() -> None:
    named = cause([sign(1, Weight.SECONDARY, 2.0), sign(0, Weight.SECONDARY, 1.0)], [])
    assert named.rank == 0
    assert not named.failure.secondary


@pytest.mark.parametrize(
    ("signs", "several_nodes", "expected"),
    [
        ([sign(0, Weight.CAUSE, 1.0)], False, 1.3),
        ([sign(0, Weight.CAUSE, 1.0)], True, 1.3),
        ([sign(0, Weight.CAUSE, 1.0, from_other_node=True)], True, 1.0),
        ([sign(0, Weight.SECONDARY, 1.0)], False, 2.5),
        ([sign(0, Weight.SECONDARY, 1.0), sign(1, Weight.SECONDARY, 2.0)], False, 2.5),
        ([sign(0, Weight.SECONDARY, 1.0)], True, 4.0),
        ([sign(0, Weight.SECONDARY, 1.0), sign(1, Weight.CAUSE, 2.0)], True, 2.3),
        ([sign(0, Weight.DOUBTFUL, 1.0)], True, 2.5),
    ],
)
def test_the_wait_depends_on_what_is_known(signs: list[Sign], several_nodes: bool, expected: float) -> None:
    assert decide_at(signs, SETTLING, several_nodes=several_nodes) == pytest.approx(expected)


def test_orderly_ends_are_those_a_worker_chooses() -> None:
    assert [code for code in range(-20, 256) if is_orderly(code)] == [0, 65, 75, 130]
