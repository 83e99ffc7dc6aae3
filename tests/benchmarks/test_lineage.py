"""The chain of steps behind the final weights, and the samples in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.lineage import BrokenLineageError, Step, lost_and_repeated, read_attempt, read_log, trace


def step(before: str, after: str, *samples: int, attempt: int = 0) -> Step:
    return Step(attempt=attempt, before=before, after=after, samples=samples)


def write_log(folder: Path, rank: int, *steps: tuple[str, str, list[int]], world_size: int = 2) -> None:
    lines = [
        json.dumps({"event": "step", "world_size": world_size, "before": before, "after": after, "samples": samples})
        for before, after, samples in steps
    ]
    (folder / f"rank-{rank}.jsonl").write_text("".join(line + "\n" for line in lines))


def test_chain_leaves_out_what_a_kill_undid() -> None:
    first = [step("a", "b", 0, 1), step("b", "c", 2, 3), step("c", "x", 4)]
    second = [step("c", "d", 5, attempt=1)]
    assert [one.after for one in trace([first, second])] == ["b", "c", "d"]
    assert trace([]) == []
    assert trace([first, []]) == []


def test_step_done_again_counts_once_and_must_be_the_same() -> None:
    first = [step("a", "b", 0, 1), step("b", "c", 2, 3)]
    assert len(trace([first, [step("b", "c", 2, 3, attempt=1)]])) == 2
    with pytest.raises(BrokenLineageError, match="reached one state differently"):
        trace([first, [step("b", "c", 3, 2, attempt=1)]])


def test_weights_that_come_back_are_refused() -> None:
    with pytest.raises(BrokenLineageError, match="came back"):
        trace([[step("a", "b", 0), step("b", "a", 1)]])


def test_lost_and_repeated_samples_are_counted_in_each_epoch() -> None:
    good = [step("a", "b", 0, 1), step("b", "c", 2), step("c", "d", 2, 1), step("d", "e", 0)]
    assert lost_and_repeated(good, 3, 2, 2) == (0, 0)
    assert lost_and_repeated(good[:3], 3, 2, 2) == (1, 0)
    assert lost_and_repeated(good[2:], 3, 2, 2) == (3, 0)
    twice = [*good[:2], step("c", "d", 2, 2), good[3]]
    assert lost_and_repeated(twice, 3, 2, 2) == (1, 1)
    assert lost_and_repeated([*good, step("e", "f", 1, 1)], 3, 2, 2) == (0, 1)


def test_attempt_joins_the_ranks_and_drops_a_last_step_that_not_all_have_made(tmp_path: Path) -> None:
    write_log(tmp_path, 0, ("a", "b", [0, 1]), ("b", "c", [4]))
    write_log(tmp_path, 1, ("a", "b", [2, 3]))
    assert read_attempt(tmp_path, 7) == [step("a", "b", 0, 1, 2, 3, attempt=7)]


def test_attempt_in_which_a_rank_never_stepped_has_no_steps(tmp_path: Path) -> None:
    assert read_attempt(tmp_path, 0) == []
    write_log(tmp_path, 0, ("a", "b", [0]))
    assert read_attempt(tmp_path, 0) == []


def test_ranks_that_disagree_on_the_weights_are_refused(tmp_path: Path) -> None:
    write_log(tmp_path, 0, ("a", "b", [0]))
    write_log(tmp_path, 1, ("a", "c", [1]))
    with pytest.raises(BrokenLineageError, match="differ in their parameters"):
        read_attempt(tmp_path, 0)


def test_step_without_effect_is_refused(tmp_path: Path) -> None:
    write_log(tmp_path, 0, ("a", "a", [0]), world_size=1)
    with pytest.raises(BrokenLineageError, match="changed nothing"):
        read_attempt(tmp_path, 0)


def test_line_cut_short_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.jsonl"
    log.write_text('{"event": "validation"}\n{"event": "st')
    assert read_log(log) == [{"event": "validation"}]
    assert read_log(tmp_path / "rank-1.jsonl") == []
