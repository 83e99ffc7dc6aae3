"""The bill of a run against the recorded truth: ranks, nodes, wrap-arounds, deaths, resumes, rollbacks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stormo.energy import Bill, cost, read_bill
from stormo.energy.ledger import PARTS
from tests.energy.job import WRAPS_AT_J, Job, cpu, truth

RESOLUTION_J = 0.001
WHOLE = [
    ("starting", 3.5, 0),
    ("training", 20, 40),
    ("validation", 4.25, 40),
    ("checkpoint", 2, 40),
    ("training", 20, 80),
    ("validation", 4, 80),
    ("checkpoint", 1.5, 80),
    ("idle", 5, 80),
]


def _assert_sums(bill: Bill) -> None:
    assert bill.total_j == math.fsum(bill.parts_j.values())
    assert bill.total_j == pytest.approx(math.fsum(one.joules for one in bill.intervals), rel=1e-12)
    assert bill.total_j == pytest.approx(math.fsum(node.total_j or 0.0 for node in bill.nodes), rel=1e-12)
    assert bill.total_j == pytest.approx(math.fsum(one.total_j or 0.0 for one in bill.attempts), rel=1e-12)
    assert bill.total_j == pytest.approx(math.fsum(bill.kinds_j.values()), rel=1e-12)
    assert set(bill.parts_j) == set(bill.error_j) == set(PARTS)


@pytest.mark.parametrize("num_nodes", [1, 2, 3])
@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
def test_a_job_is_billed_what_its_counters_saw(tmp_path: Path, num_nodes: int, ranks_per_node: int) -> None:
    job = Job(tmp_path, num_nodes, ranks_per_node=ranks_per_node)
    job.attempt(WHOLE)
    assert truth(cpu("intel-rapl:0"), 0, job.clock.now_s) > 3 * WRAPS_AT_J  # the counters did go round
    bill = read_bill(job.run_folder)
    _assert_sums(bill)
    assert len(list((job.run_folder / "nodes").iterdir())) == num_nodes
    assert bill.total_j == pytest.approx(job.truth(0, job.clock.now_s), abs=RESOLUTION_J)
    for phase in ("starting", "training", "validation", "checkpoint", "idle"):
        assert bill.parts_j[phase] == pytest.approx(job.truth_of(phase), abs=RESOLUTION_J), phase
    assert bill.parts_j["recomputed"] == bill.parts_j["waiting"] == 0.0
    assert len(bill.nodes[0].sources_j) == ranks_per_node + 1
    assert bill.nodes[-1].total_j == pytest.approx(job.truth(0, job.clock.now_s, [num_nodes - 1]), abs=RESOLUTION_J)
    assert bill.attempts[0].is_ended
    names = "" if num_nodes == 1 else f"nodes {', '.join(map(str, range(num_nodes)))}: "
    assert f"{names}waiting was not measured: it is part of training" in bill.reasons
    assert not any("unseen" in reason for reason in bill.reasons)


def test_a_moment_between_phases_that_no_counter_can_tell_belongs_to_the_next(tmp_path: Path) -> None:
    job = Job(tmp_path, 1)
    job.attempt([("starting", 2, 0), ("training", 10, 5), ("idle", 0.05, 5), ("checkpoint", 1, 5), ("idle", 3, 5)])
    bill = read_bill(job.run_folder)
    _assert_sums(bill)
    assert bill.parts_j["checkpoint"] == pytest.approx(job.truth(12, 13.05), abs=RESOLUTION_J)
    assert bill.parts_j["idle"] == pytest.approx(job.truth(13.05, 16.05), abs=RESOLUTION_J)


def test_two_resumes_bill_what_was_done_twice(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    job.attempt([("starting", 2, 0), ("training", 10, 50), ("checkpoint", 1, 50), ("training", 7, 85)], killed=True)
    lost_j, useful_j = job.truth(13, 20), job.truth(2, 12)
    saved_j = job.truth(12, 13)
    job.clock.now_s = 30.0  # the requeue; nothing of ours draws meanwhile
    job.attempt(
        [("starting", 3, 50), ("training", 10, 100), ("checkpoint", 1, 100), ("training", 3, 110)],
        resumed_at_step=50,
        killed=True,
    )
    useful_j += job.truth(33, 43)
    saved_j += job.truth(43, 44)
    lost_j += job.truth(44, 47)
    job.clock.now_s = 50.0
    job.attempt([("starting", 2, 100), ("training", 6, 130), ("checkpoint", 1, 130)], resumed_at_step=100)
    useful_j += job.truth(52, 58)
    saved_j += job.truth(58, 59)
    bill = read_bill(job.run_folder)
    _assert_sums(bill)
    assert bill.parts_j["recomputed"] == pytest.approx(lost_j, abs=RESOLUTION_J)
    assert bill.parts_j["training"] == pytest.approx(useful_j, abs=RESOLUTION_J)
    assert bill.parts_j["checkpoint"] == pytest.approx(saved_j, abs=RESOLUTION_J)
    assert bill.total_j == pytest.approx(job.truth(0, 20) + job.truth(30, 47) + job.truth(50, 59), abs=RESOLUTION_J)
    assert [attempt.resumed_at_step for attempt in bill.attempts] == [None, 50, 100]
    assert [attempt.is_ended for attempt in bill.attempts] == [False, False, True]
    assert [attempt.node_ids for attempt in bill.attempts] == [("0", "1")] * 3
    assert any("no end was written in attempt 1 (killed" in reason for reason in bill.reasons)
    assert bill.joules_until(25.0) == pytest.approx(job.truth(0, 20), abs=RESOLUTION_J)
    assert bill.joules_until(37.5) == pytest.approx(job.truth(0, 20) + job.truth(30, 37.5), abs=RESOLUTION_J)
    assert bill.joules_until(-1.0) == 0.0
    assert bill.joules_until(1e9) == pytest.approx(bill.total_j)


def test_a_resume_at_an_older_step_and_a_fresh_start_lose_more(tmp_path: Path) -> None:
    job = Job(tmp_path, 1)
    job.attempt([("starting", 1, 0), ("training", 4, 10), ("checkpoint", 1, 10), ("training", 4, 20)])
    job.attempt([("starting", 1, 10), ("training", 4, 20), ("checkpoint", 1, 20)], resumed_at_step=10)
    job.attempt([("starting", 1, 0), ("training", 4, 10)])  # no checkpoint was found
    bill = read_bill(job.run_folder)
    assert bill.parts_j["training"] == pytest.approx(job.truth(17, 21), abs=RESOLUTION_J)
    assert bill.parts_j["starting"] == pytest.approx(job.truth(0, 1) + job.truth(16, 17), abs=RESOLUTION_J)
    assert bill.parts_j["recomputed"] == pytest.approx(job.truth(1, 16), abs=RESOLUTION_J)


def test_a_rollback_loses_what_came_after_its_step_in_this_and_earlier_attempts(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    job.attempt([("starting", 1, 0), ("training", 4, 10), ("checkpoint", 1, 10), ("training", 4, 20)])
    script = [("starting", 1, 20), ("training", 5, 30), ("rollback", 0, 10), ("training", 3, 12), ("idle", 1, 12)]
    job.attempt(script, resumed_at_step=20)
    bill = read_bill(job.run_folder)
    _assert_sums(bill)
    assert bill.parts_j["recomputed"] == pytest.approx(job.truth(6, 16), abs=RESOLUTION_J)
    assert bill.parts_j["training"] == pytest.approx(job.truth(1, 5) + job.truth(16, 19), abs=RESOLUTION_J)


def test_a_part_of_a_step_after_its_checkpoint_is_lost_with_it(tmp_path: Path) -> None:
    job = Job(tmp_path, 1)
    slow = [("training", 4, 10), ("checkpoint", 1, 10), ("training", 6, 10)]  # killed within step 11
    job.attempt([("starting", 1, 0), *slow], killed=True)
    job.attempt([("starting", 1, 10), ("training", 2, 11)], resumed_at_step=10)
    bill = read_bill(job.run_folder)
    assert bill.parts_j["recomputed"] == pytest.approx(job.truth(6, 12), abs=RESOLUTION_J)


def test_a_validation_that_was_cut_short_is_done_anew(tmp_path: Path) -> None:
    job = Job(tmp_path, 1)
    epoch = [("training", 4, 10), ("validation", 3, 10), ("checkpoint", 1, 10)]
    job.attempt([("starting", 1, 0), *epoch])  # a signal came within the validation, and the epoch was saved as it is
    job.attempt([("starting", 1, 10), ("validation", 2, 10)], resumed_at_step=10, killed=True)
    job.attempt([("starting", 1, 10), ("validation", 5, 10), ("checkpoint", 1, 10)], resumed_at_step=10)
    job.attempt([("starting", 1, 10), ("training", 4, 20), ("validation", 5, 20)], resumed_at_step=10)
    bill = read_bill(job.run_folder)
    _assert_sums(bill)
    assert bill.parts_j["recomputed"] == pytest.approx(job.truth(5, 8) + job.truth(10, 12), abs=RESOLUTION_J)
    assert bill.parts_j["validation"] == pytest.approx(job.truth(13, 18) + job.truth(24, 29), abs=RESOLUTION_J)


def test_what_came_before_the_first_file_is_said_to_be_missing(tmp_path: Path) -> None:
    job = Job(tmp_path, 1)
    job.attempt([("starting", 1, 10), ("training", 4, 20)], resumed_at_step=10)  # measuring was off until then
    assert "what was done up to step 10 is not counted: no file tells of it" in read_bill(job.run_folder).reasons


def test_a_file_cut_within_a_line_counts_up_to_the_line_before(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    job.attempt([("starting", 2, 0), ("training", 8, 10)], killed=True)
    with job.path(1).open("r+b") as file:
        file.truncate(job.path(1).stat().st_size - 20)
    bill = read_bill(job.run_folder)
    assert bill.total_j == pytest.approx(job.truth(0, 10, [0]) + job.truth(0, 9, [1]), abs=RESOLUTION_J)
    assert not any("damaged" in reason for reason in bill.reasons)
    job.clock.now_s = 20.0  # the next attempt begins on a line of its own
    job.attempt([("starting", 2, 0), ("training", 3, 10)])
    assert all(json.loads(line) for line in job.path(1).read_text().splitlines())
    total_j = read_bill(job.run_folder).total_j
    assert total_j == pytest.approx(bill.total_j + job.truth(20, 25), abs=RESOLUTION_J)


def test_a_node_that_takes_no_part_in_an_attempt_still_loses_its_work(tmp_path: Path) -> None:
    job = Job(tmp_path, 3)
    job.attempt([("starting", 1, 0), ("training", 9, 20)], killed=True)
    job.attempt([("starting", 1, 0), ("training", 4, 10)], nodes=[0, 1])
    bill = read_bill(job.run_folder)
    assert bill.parts_j["recomputed"] == pytest.approx(job.truth(1, 10), abs=RESOLUTION_J)
    assert "node 2 of 3 wrote no file in attempt 2: the energy is not counted" in bill.reasons


def test_attempts_on_other_nodes_are_separated_by_their_times(tmp_path: Path) -> None:
    _write(tmp_path, "0", _energy(10.0, 1000.0))
    _write(tmp_path, "1", {"kind": "start", "time_unix_s": 9.5}, _energy(20.0, 500.0))  # clocks differ a little
    _write(tmp_path, "2", {"kind": "start", "time_unix_s": 30.0}, _energy(40.0, 300.0))
    bill = read_bill(tmp_path)
    assert [attempt.node_ids for attempt in bill.attempts] == [("0", "1"), ("2",)]
    assert (bill.parts_j["recomputed"], bill.parts_j["training"]) == (1500.0, 300.0)


def _write(folder: Path, node_id: str, *entries: dict[str, Any], machine: str | None = None) -> None:
    start = {
        "kind": "start",
        "time_unix_s": 0.0,
        "node_id": node_id,
        "host": f"h{node_id}",
        "machine": machine or f"m{node_id}",
        "num_nodes": 1,
        "resumed_at_step": None,
        "step": 0,
        "sources": [{"id": "GPU-a", "kind": "gpu", "resolution_j": 0.001, "interval_s": 0.1}],
        "missing": [],
    }
    if entries and entries[0]["kind"] == "start":
        start |= entries[0]
        entries = entries[1:]
    (folder / "nodes").mkdir(exist_ok=True)
    lines = [json.dumps(entry) + "\n" for entry in (start, *entries)]
    (folder / "nodes" / f"{node_id}.jsonl").write_text("".join(lines))


def _energy(time_unix_s: float, joules: float, phase: str = "training", **more: Any) -> dict[str, Any]:
    line = {"kind": "energy", "time_unix_s": time_unix_s, "step": 1, "phase": phase, "joules": {"GPU-a": joules}}
    return {**line, "waiting_s": None, **more}


def test_waiting_is_distributed_over_the_training_since_its_last_figure(tmp_path: Path) -> None:
    _write(
        tmp_path,
        "0",
        _energy(10.0, 1000.0, "starting", waiting_s={"input": 0.0, "communication": 7.0}),  # of the warm-up
        _energy(11.0, 1100.0),
        _energy(14.0, 1500.0, waiting_s={"input": 1.0, "communication": 7.0}),  # 1 s of 4
        _energy(16.0, 1700.0, "validation", waiting_s={"input": 1.0, "communication": 7.5}),  # late
        _energy(20.0, 2700.0, waiting_s={"input": 2.0, "communication": 8.0}),  # 2 s of 4 more
        _energy(21.0, 2800.0, waiting_s={"input": 2.0, "communication": 31.0}),  # cannot be: at most all of it
        _energy(23.0, 3000.0),
    )
    bill = read_bill(tmp_path)
    waiting_j = 0.25 * 500.0 + 0.5 * 1000.0 + 100.0
    assert bill.parts_j == pytest.approx(
        {
            "starting": 1000.0,
            "training": 1500.0 + 300.0 - waiting_j,
            "waiting": waiting_j,
            "validation": 200.0,
            "checkpoint": 0.0,
            "recomputed": 0.0,
            "idle": 0.0,
        }
    )
    _assert_sums(bill)
    assert not any("waiting" in reason for reason in bill.reasons)


def test_waiting_for_others_that_was_not_measured_is_said(tmp_path: Path) -> None:
    _write(tmp_path, "0", _energy(4.0, 400.0, waiting_s={"input": 1.0, "communication": None}))
    bill = read_bill(tmp_path)
    assert bill.parts_j["waiting"] == 100.0
    # Both ends, 100 W × 0.1 s and 0.001 J each, go with the joules: a quarter to waiting.
    assert (bill.error_j["waiting"], bill.error_j["training"]) == pytest.approx((5.0005, 15.0015))
    assert "waiting for other workers was not measured: it is part of training" in bill.reasons


def test_every_boundary_of_a_part_adds_power_times_interval(tmp_path: Path) -> None:
    lines = [_energy(10.0, 1000.0), _energy(11.0, 1300.0, "checkpoint"), _energy(12.0, 1300.0), {"kind": "end"}]
    _write(tmp_path, "0", *lines)
    bill = read_bill(tmp_path)
    # 100 W before, 300 W within, nothing after; the larger power at each boundary, 0.1 s and 0.001 J.
    start_j, into_j, out_of_j, end_j = 10.001, 30.001, 30.001, 0.001
    assert bill.error_j["checkpoint"] == pytest.approx(into_j + out_of_j)
    assert bill.error_j["training"] == pytest.approx(start_j + into_j + out_of_j + end_j)
    assert bill.total_error_j == pytest.approx(start_j + end_j)
    assert bill.uncertain_parts == ("training", "checkpoint")


def test_one_device_read_by_two_nodes_of_one_machine_counts_once(tmp_path: Path) -> None:
    _write(tmp_path, "0", _energy(9.0, 900.0), machine="same")
    _write(tmp_path, "1", _energy(10.0, 1000.0), machine="same")
    _write(tmp_path, "2", _energy(10.0, 500.0), machine="another")
    bill = read_bill(tmp_path)
    assert bill.total_j == 1500.0
    assert [node.total_j for node in bill.nodes] == [None, 1000.0, 500.0]
    assert "GPU-a is one device that nodes 0, 1 have read: it is counted once, at node 1" in bill.reasons
    _assert_sums(bill)


def test_what_cannot_be_read_is_named_once_for_all_its_nodes(tmp_path: Path) -> None:
    refused = {"missing": [{"kind": "cpu", "reason": "root alone may read it"}], "notes": ["split (MIG)"]}
    for node in range(6):
        _write(tmp_path, str(node), {"kind": "start", "num_nodes": 8, **refused}, _energy(1.0, 10.0, "idle"))
    bill = read_bill(tmp_path)
    assert bill.total_j == 60.0
    assert "nodes 0, 1, 2, 3 and 2 more: cpu not measured: root alone may read it" in bill.reasons
    assert "nodes 0, 1, 2, 3 and 2 more: split (MIG)" in bill.reasons
    assert "nodes 6, 7 of 8 wrote no file: the energy is not counted" in bill.reasons


def test_without_any_source_the_total_is_none_and_not_zero(tmp_path: Path) -> None:
    missing = [{"kind": "gpu", "reason": "no driver"}]
    _write(tmp_path, "0", {"kind": "start", "sources": [], "missing": missing}, {**_energy(5.0, 0.0), "joules": {}})
    bill = read_bill(tmp_path)
    assert (bill.total_j, bill.total_wh, bill.joules_until(3.0), bill.parts_j) == (None, None, None, {})
    assert bill.nodes[0].total_j is None
    assert "gpu not measured: no driver" in bill.reasons
    assert cost(bill, 300.0, 0.25).co2e_g is None


def test_a_run_without_files_says_so(tmp_path: Path) -> None:
    bill = read_bill(tmp_path)
    assert bill.total_j is None
    assert bill.reasons == ("no node wrote what it drew: measuring was turned off, or the run ended before it began",)


def test_damaged_lines_are_left_out_and_named(tmp_path: Path) -> None:
    _write(tmp_path, "0", _energy(1.0, 100.0), _energy(2.0, 200.0, "dancing"), _energy(3.0, 300.0), {"kind": "end"})
    path = tmp_path / "nodes" / "0.jsonl"
    path.write_text('{"kind": "energy"}\n' + path.read_text() + "}{\n[]\n")
    bill = read_bill(tmp_path)
    assert bill.total_j == 300.0  # the figures are cumulative
    assert "0.jsonl: line 7 is damaged and left out" in bill.reasons
    assert "0.jsonl: line 8 is damaged and left out" in bill.reasons
    assert sum("left out" in reason for reason in bill.reasons) == 4


def test_an_attempt_whose_start_is_damaged_is_not_taken_for_the_one_before(tmp_path: Path) -> None:
    _write(tmp_path, "0", _energy(1.0, 500.0), {"kind": "end"}, {"kind": "start"}, _energy(9.0, 300.0))
    bill = read_bill(tmp_path)
    assert (bill.total_j, bill.parts_j["training"]) == (500.0, 500.0)
    assert sum("is left out (" in reason for reason in bill.reasons) == 2


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    _write(tmp_path, "0", _energy(1.0, 100.0))
    (tmp_path / "nodes" / "1.jsonl").mkdir()
    bill = read_bill(tmp_path)
    assert bill.total_j == 100.0
    assert "1.jsonl: it cannot be read (Is a directory): what it holds is not counted" in bill.reasons
    (tmp_path / "nodes" / "0.jsonl").unlink()
    assert len(read_bill(tmp_path).reasons) == 1


def test_cost_is_per_kilowatt_hour_and_only_what_was_asked(tmp_path: Path) -> None:
    _write(tmp_path, "0", _energy(3600.0, 7.2e6))
    bill = read_bill(tmp_path)
    assert bill.total_wh == 2000.0
    both = cost(bill, 300.0, 0.25)
    assert (both.co2e_g, both.money) == pytest.approx((600.0, 0.5))
    assert cost(bill, None, None).co2e_g is None
    assert cost(bill, 0.0, 0.0).money == 0.0


PHASE = st.sampled_from(["training", "validation", "checkpoint", "idle"])
ENTRY = st.tuples(
    PHASE,
    st.floats(0.0, 5.0, allow_subnormal=False),
    st.floats(0.0, 1e6, allow_subnormal=False),
    st.integers(0, 9),
    st.none() | st.floats(0.0, 3.0),
)


@settings(max_examples=30)
@given(attempts=st.lists(st.tuples(st.integers(0, 9), st.lists(ENTRY, max_size=8)), min_size=1, max_size=4))
def test_parts_sum_to_the_total_whatever_happened(
    tmp_path_factory: pytest.TempPathFactory, attempts: list[tuple[int, list[tuple[str, float, float, int, float]]]]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    text, now_s, drawn_j = "", 0.0, []
    for resumed_at_step, entries in attempts:
        _write(folder, "0", {"kind": "start", "time_unix_s": now_s, "resumed_at_step": resumed_at_step})
        text += (folder / "nodes" / "0.jsonl").read_text()
        joules = 0.0
        for phase, seconds, more_j, step, waited_s in entries:
            now_s, joules = now_s + seconds, joules + more_j
            waiting_s = None if waited_s is None else {"input": waited_s, "communication": 0.0}
            text += json.dumps(_energy(now_s, joules, phase, step=step, waiting_s=waiting_s)) + "\n"
        drawn_j.append(joules)
        now_s += 1.0
    (folder / "nodes" / "0.jsonl").write_text(text)
    bill = read_bill(folder)
    _assert_sums(bill)
    assert bill.total_j == pytest.approx(math.fsum(drawn_j), rel=1e-9, abs=1e-9)
    assert all(joules >= 0 for joules in bill.parts_j.values())
    assert len(bill.attempts) == len(attempts)
    assert bill.joules_until(now_s) == pytest.approx(bill.total_j, rel=1e-9, abs=1e-9)
