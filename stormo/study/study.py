"""Runs the cells of a study one after another, keeps each as it ends, and goes on where an earlier call ended."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stormo.errors import EXIT_RESUMABLE, EXIT_USAGE, StormoError
from stormo.study.cells import Cell, CellFile, make_cells
from stormo.study.children import Runner, last_words
from stormo.study.measurement import Measurement
from stormo.study.reading import measure_run, measured_s
from stormo.study.settings import Study
from stormo.telemetry.text import format_duration, format_rate

_GOOD_ENDS = (0, EXIT_RESUMABLE)  # to its last epoch, or ended once it had been measured for long enough


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """A run that did not end well."""

    cell: Cell
    error: str
    is_refused: bool = False  # its settings cannot hold, and would not in another repeat


def run_study(study: Study, run: Runner, say: Callable[[str], None]) -> tuple[list[Measurement], list[Failed]]:
    """Do every run that is not done yet; give the figures of all, and those that failed."""
    mine, kept = _own_cells(study), _cell_file(study)
    failed: list[Failed] = []
    for number, cell in enumerate(mine, start=1):
        head = f"[{number}/{len(mine)}] {cell.words}"
        if cell.name in kept.done:
            say(f"{head}: done before")
            continue
        same = _refused_before(cell, failed)
        if same is not None:
            failed.append(replace(same, cell=cell))
            say(f"{head}: left out, as its settings were refused before")
            continue
        began_s = time.monotonic()
        try:
            found = _run_cell(study, cell, run)
        except StormoError as error:
            kept.add(cell, "failed", error=str(error))
            failed.append(Failed(cell=cell, error=str(error), is_refused=isinstance(error, _RefusedError)))
            say(f"{head}: failed: {error}")
            continue
        kept.add(cell, "done", found)
        speed = f"{format_rate(found.units_per_s)} {found.unit}/s over {found.basis}" if found else "done"
        say(f"{head}: {speed} ({format_duration(time.monotonic() - began_s)} in all)")
    return [found for cell in mine if (found := kept.measurement(cell)) is not None], failed


def runs_to_do(study: Study) -> list[Cell]:
    """The runs in which this node takes part and that have not ended well."""
    done = _cell_file(study).done
    return [cell for cell in _own_cells(study) if cell.name not in done]


def _own_cells(study: Study) -> list[Cell]:
    cells = make_cells(study.workers, study.num_nodes, study.modes, study.repeats, study.seed)
    return [cell for cell in cells if study.node_id < cell.num_nodes]


def _refused_before(cell: Cell, failed: Sequence[Failed]) -> Failed | None:
    """An earlier repeat of the same run whose settings were refused, and would be again."""
    for one in failed:
        if one.is_refused and (one.cell.mode, one.cell.workers) == (cell.mode, cell.workers):
            return one
    return None


class _RefusedError(StormoError):
    """`stormo train` refused its settings."""


def _run_cell(study: Study, cell: Cell, run: Runner) -> Measurement | None:
    """One run; its figures on node 0, which alone has its files."""
    folder, log = study.output / "runs" / cell.name, study.output / "logs" / f"{cell.name}.node{study.node_id}.txt"
    is_main = study.node_id == 0
    if is_main and folder.exists():
        shutil.rmtree(folder)  # of this study, and never ended

    def is_enough() -> bool:
        return is_main and study.seconds is not None and measured_s(folder) >= study.seconds

    code = run(study.arguments(cell), log, is_enough)
    if code not in _GOOD_ENDS:
        kind = _RefusedError if code == EXIT_USAGE else StormoError
        raise kind(f"{last_words(log)} (exit code {code}; all it said is in {log})")
    if not is_main:
        return None
    measured = measure_run(folder, cell)
    if not study.keeps_checkpoints:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # a run that was ended early has saved itself
    return replace(measured, note=study.lone_note) if cell.workers == 1 else measured


def _cell_file(study: Study) -> CellFile:
    """This node's; another node goes by that of node 0 where it sees it, so that all do the same runs."""
    shared = study.output / "cells.jsonl"
    if study.node_id == 0:
        return CellFile(shared)
    own = CellFile(study.output / f"cells-node{study.node_id}.jsonl")
    if shared.is_file():
        own.done = CellFile(shared).done
    return own
