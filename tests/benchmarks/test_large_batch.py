"""The table of large batches: what is measured, kept and shown, without training anything."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import large_batch
from benchmarks.large_batch import (
    RECIPES,
    Cell,
    CellError,
    Wanted,
    fill,
    flags_of,
    result_line,
    table_lines,
    tabulate,
    wanted,
)
from stormo.config.layout import resolve_layout
from stormo.config.plan import resolve
from stormo.system.hardware import visible_gpus
from stormo.training.settings import read_settings


def _cell(recipe: str, batch: int, accuracy: float, seed: int = 0, stopped_by: str = "epochs") -> Cell:
    flags = flags_of(recipe, batch, 30)
    return Cell(recipe, batch, seed, 30, flags, accuracy, stopped_by, 10, 1.0, 2.0, "cpu")


@pytest.mark.parametrize("batch", [512, 4096, 16384])
@pytest.mark.parametrize("recipe", [*RECIPES, "nesterov 0.2 5"])
def test_every_recipe_is_a_plan(recipe: str, batch: int) -> None:
    config, task = read_settings(["fashion-mnist", "--device", "cpu", *flags_of(recipe, batch, 30).split()])
    plan = resolve(config, resolve_layout(config, visible_gpus(), None), task(config.task_options).facts())
    assert plan.stages[-1].global_batch_size == pytest.approx(batch, rel=1e-3)
    assert (len(plan.stages) > 1) is (recipe == "growth" and batch > 512)


def test_the_first_columns_come_first_and_second_seeds_last() -> None:
    order = list(wanted(["sgd", "tuned"], [512, 1024, 4096], 2))
    assert [cell[1:] for cell in order if cell[0] == "sgd"] == [
        *((512, 0), (4096, 0), (1024, 0)),
        *((512, 1), (4096, 1), (1024, 1)),
    ]
    assert sum(name.startswith("nesterov") for name, _, _ in order) == 6 * len(large_batch.TUNED)


def test_the_table_and_the_last_line() -> None:
    cells = [
        *(_cell("sgd", 512, 0.94), _cell("sgd", 512, 0.95, seed=1), _cell("sgd", 16384, 0.1, 0, "divergence")),
        *(_cell("lars", 16384, 0.93), _cell("nesterov 0.2 5", 16384, 0.91), _cell("nesterov 0.1 5", 16384, 0.92)),
        _cell("nesterov 0.1 5", 16384, 0.88, seed=1),  # the other has one seed, and was not chosen by it
        *(_cell("nesterov 0.8 5", 16384, 0.94), Cell("sgd", 512, 0, 30, "--of-before", 0.9, "epochs", 1, 1, 1, "cpu")),
    ]
    table = tabulate(cells, 30)
    assert table_lines(table) == [
        "| recipe | 512 | 16384 |",
        "|---|---|---|",
        "| sgd | 94.50 ± 0.71 | 10.00 (1 of 1 diverged) |",
        "| linear | 94.50 ± 0.71 |  |",  # at 512 the very same settings
        "| sqrt | 94.50 ± 0.71 |  |",
        "| lars |  | 93.00 |",
        "| tuned | 94.50 ± 0.71 | 90.00 ± 2.83 |",  # of the grid as it is now
    ]
    assert result_line(table) == "RESULT accuracy_512=0.9450 best_accuracy_16384=0.9300 plain_accuracy_16384=0.1000"
    shared = table_lines(tabulate([_cell("linear", 1024, 0.95), _cell("nesterov 0.1 2", 2048, 0.94)], 30))
    # 0.05 × 2 at 1,024 and 0.05 × √4 at 2,048 are the rate of a point of the grid.
    assert shared[2:] == ["| linear | 95.00 |  |", "| sqrt |  | 94.00 |", "| tuned | 95.00 | 94.00 |"]
    assert result_line({}) == "RESULT accuracy_512=nan best_accuracy_16384=nan plain_accuracy_16384=nan"


def test_cells_share_the_gpu_as_far_as_their_batches_allow_and_one_that_fails_stops_no_other() -> None:
    at_once: list[int] = []
    largest: list[int] = []
    together = threading.Barrier(3)

    def run(cell: Wanted) -> Cell:
        at_once.append(cell[1])
        largest.append(sum(at_once))
        if cell[0] == "sgd":
            together.wait(timeout=60)
        at_once.remove(cell[1])
        if cell[0] == "lars":
            raise CellError("no memory")
        return _cell(*cell[:2], 0.9)

    todo = [("sgd", 16384, 0), ("lars", 16384, 0), ("sgd", 4096, 0), ("sgd", 512, 0), ("larc", 99999, 0)]
    ended = list(fill(todo, 3, 21000, run))
    assert sorted(cell.batch for cell in ended if isinstance(cell, Cell)) == [512, 4096, 16384, 99999]
    assert [str(error) for error in ended if isinstance(error, CellError)] == ["no memory"]
    assert max(size for size in largest if size != 99999) <= 21000


def test_no_more_cells_share_the_gpu_than_were_allowed() -> None:
    running: list[int] = []
    most: list[int] = []
    together = threading.Barrier(2)

    def run(cell: Wanted) -> Cell:
        running.append(cell[1])
        together.wait(timeout=60)  # another is there, too
        most.append(len(running))
        together.wait(timeout=60)
        running.remove(cell[1])
        return _cell(*cell[:2], 0.9)

    assert len(list(fill([("sgd", size, 0) for size in range(1, 9)], 2, 21000, run))) == 8
    assert max(most) == 2


def test_a_cell_is_measured_once_and_no_more_are_begun_than_the_budget_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[str, int]] = []

    def measure(recipe: str, batch: int, seed: int, epochs: int, extra: Any) -> Cell:
        calls.append((recipe, batch))
        return _cell(recipe, batch, 0.9)

    monkeypatch.setattr(large_batch, "measure", measure)
    results = tmp_path / "results" / "cells.jsonl"
    results.parent.mkdir()
    old = asdict(_cell("sgd", 512, 0.1)) | {"flags": "--of-before"}
    results.write_text(json.dumps(old) + "\n")
    options = ["--results", str(results), "--recipes", "sgd,lars", "--plot", str(tmp_path / "table.png")]
    options += ["--samples-at-once", "4096"]
    assert large_batch.main([*options, "--batches", "512"]) == 0
    assert large_batch.main([*options, "--batches", "512,4096", "--budget-s", "1.9"]) == 0
    assert calls == [("sgd", 512), ("lars", 512), ("sgd", 4096)]  # the next would take 2 s, as the longest did
    assert json.loads(results.read_text().splitlines()[1]) == asdict(_cell("sgd", 512, 0.9))
    out = capsys.readouterr().out
    assert "--budget-s 1.9 is spent; 1 of 2 cells are for another run" in out
    assert "| sgd | 90.00 | 90.00 |" in out  # without the cell of another recipe
    assert (tmp_path / "table.png").stat().st_size > 1000
    calls.clear()
    chosen = "sgd:512:0,sqrt:512:0,nesterov 0.05 5:512:0,linear+warm-up:512:0,lars:4096:0"
    assert large_batch.main([*options, "--cells", chosen]) == 0
    assert calls == [("nesterov 0.05 5", 512), ("lars", 4096)]  # the others are these, or known
    with pytest.raises(SystemExit):
        large_batch.main(["--recipes", "none"])
    with pytest.raises(SystemExit):
        large_batch.main(["--cells", "none:512:0"])
