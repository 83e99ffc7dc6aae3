"""The order of the runs, and the file that keeps them."""

from __future__ import annotations

from pathlib import Path

from stormo.study.cells import Cell, CellFile, make_cells
from tests.study.made_up import measurement


def test_each_repeat_holds_every_run_once_in_an_order_of_its_own() -> None:
    cells = make_cells([1, 2, 4, 8], [1] * 4, ["strong"], 6, seed=0)
    repeats = [cells[start : start + 4] for start in range(0, 24, 4)]
    for number, repeat in enumerate(repeats, start=1):
        assert {cell.repeat for cell in repeat} == {number}
        assert sorted(cell.workers for cell in repeat) == [1, 2, 4, 8]
    assert len({tuple(cell.workers for cell in repeat) for repeat in repeats}) > 2


def test_order_is_the_same_for_a_seed_and_does_not_depend_on_the_repeats() -> None:
    first = make_cells([1, 2, 4], [1, 1, 2], ["strong", "weak"], 2, seed=5)
    longer = make_cells([1, 2, 4], [1, 1, 2], ["strong", "weak"], 4, seed=5)
    assert longer[: len(first)] == first  # repeats that are added later leave those before as they were
    assert make_cells([1, 2, 4], [1, 1, 2], ["strong", "weak"], 2, seed=6) != first


def test_one_worker_is_one_run_for_both_modes() -> None:
    cells = make_cells([1, 2], [1, 1], ["strong", "weak"], 1, seed=0)
    assert sorted(cell.name for cell in cells) == ["both-1-workers-1", "strong-2-workers-1", "weak-2-workers-1"]
    assert [cell.mode for cell in make_cells([1], [1], ["weak"], 1, seed=0)] == ["weak"]


def test_a_line_that_was_cut_short_is_a_run_that_was_not_done(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    one, two, three = (Cell(mode="strong", workers=workers) for workers in (1, 2, 4))
    file = CellFile(path)
    file.add(one, "done", measurement(1, 100.0))
    file.add(two, "failed", error="out of memory")
    file.add(three, "done", measurement(4, 300.0))
    path.write_bytes(path.read_bytes()[:-40])
    again = CellFile(path)
    assert again.measurement(one) == measurement(1, 100.0)
    assert (again.measurement(two), again.measurement(three)) == (None, None)
    again.add(three, "done", measurement(4, 310.0))
    assert CellFile(path).measurement(three) == measurement(4, 310.0)
