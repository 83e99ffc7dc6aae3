"""Who is named when workers have waited in vain: whoever did not come, not the one that noticed."""

from __future__ import annotations

from dataclasses import replace

from stormo.distributed.store import PeerFailedError
from stormo.launch.failure import Failure, of_exception
from stormo.launch.peer_loss import PeerLoss
from stormo.launch.waiting import Absent, named_after_wait, waiting_text

LIMIT = "--timeout or World(timeout_s=...)"
HINT = f"set a larger {LIMIT} if a step, a save or what comes before the first may take that long"


def complaint(rank: int, error: Exception, details: str = "") -> Failure:
    return replace(of_exception(error, rank=rank, host=f"n{rank}", secondary=True), details=details)


def waiter(rank: int, at: str, waited_s: float | None = 8.0, remark: str = "") -> Failure:
    loss = PeerLoss(waited_s, at, remark)
    return complaint(rank, PeerFailedError(waiting_text(rank, loss), loss))


def named(complaints: list[Failure], absent: list[Absent], elsewhere: tuple[int, ...] = ()) -> Failure:
    return named_after_wait(complaints, absent, elsewhere=elsewhere, host="here", limit=LIMIT)


def test_the_worker_that_did_not_come_is_named_before_those_that_waited() -> None:
    gone = waiter(2, "world.sum in a.py line 3", None)
    late = Absent(rank=1, state="(pid 7) is at step 3 and says: it is running")
    found = named([gone, waiter(3, "world.sum in a.py line 3"), waiter(0, "world.sum in a.py line 3")], [late])
    assert found.sentence == (
        "rank 1 on host here did not come within 8 s to where rank 0 waits: world.sum in a.py line 3; "
        f"rank 1 (pid 7) is at step 3 and says: it is running; {HINT}"
    )


def test_of_many_that_did_not_come_a_few_are_named() -> None:
    late = [Absent(rank=rank, state=f"(pid {rank})") for rank in range(1, 8)]
    found = named([waiter(0, "world.sum")], late)
    assert found.sentence.startswith("ranks 1, 2, 3, 4 and 3 more on host here did not come ")
    assert "(pid 4)" in found.sentence
    assert "(pid 5)" not in found.sentence


def test_a_worker_that_never_joined_is_named_without_the_words_of_torchs_store() -> None:
    late = Absent(rank=2, state="(pid 7) has not called stormo.World() and says: it is running", has_joined=False)
    waits = complaint(0, RuntimeError("wait timeout after 8000ms, keys: /a"), "Traceback")
    found = named([waits], [Absent(rank=1, state="(pid 6)"), late])
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
        "line 9; they would wait for each other in vain, so let every worker take the same way. A batch norm waits so."
    )


def test_a_worker_of_another_node_is_named_by_its_rank_where_all_complaints_are_known() -> None:
    here = [waiter(0, "world.sum"), waiter(1, "world.sum")]
    assert named(here, [], (3,)).sentence == (
        f"rank 0 on host n0 waited 8 s at: world.sum; rank 3 of another node did not come; {HINT}"
    )
    assert "; another worker did not come; " in named(here, []).sentence


def test_a_wait_in_a_librarys_own_call_keeps_its_traceback() -> None:
    waits = complaint(0, RuntimeError("[gloo/x.cc:84] Timed out waiting 5000ms for recv"), "Traceback")
    found = named([waits], [Absent(rank=1, state="runs")])
    assert found.sentence == f"rank 0 on host n0 waited 5 s for another worker and gave up; rank 1 runs; {HINT}"
    assert found.details == "Traceback"
