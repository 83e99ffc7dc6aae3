"""The runs of a study, the order they are done in, and the file that keeps those that are done.

`cells.jsonl` has one line for each run that ended, well or not; a study that is started again repeats none that
ended well.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stormo.energy.nodefile import LineFile
from stormo.study.measurement import Measurement
from stormo.system.files import BadFileError, fits, parse_json, read_lines


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run of a study."""

    mode: str
    workers: int
    num_nodes: int = 1
    repeat: int = 1

    @property
    def name(self) -> str:
        """The name of its run, which no other run of the study has."""
        nodes = f"-on-{self.num_nodes}-nodes" if self.num_nodes > 1 else ""
        return f"{self.mode}-{self.workers}-workers{nodes}-{self.repeat}"

    @property
    def words(self) -> str:
        """The run as users read it."""
        kind = "strong and weak" if self.mode == "both" else self.mode
        nodes = f" on {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        return f"repeat {self.repeat}, {kind}, {self.workers} worker{'s' * (self.workers > 1)}{nodes}"


def make_cells(
    workers: Sequence[int], num_nodes: Sequence[int], modes: Sequence[str], repeats: int, seed: int
) -> list[Cell]:
    """Every run in its order: repeat after repeat, so that a machine that warms up or slows down meets all alike.

    Within a repeat the order is random but always the same for one seed. One worker is the same run in both modes.
    """
    ordered: list[Cell] = []
    for repeat in range(1, repeats + 1):
        cells = []
        for count, nodes in zip(workers, num_nodes, strict=True):
            for mode in ("both",) if count == 1 and len(modes) > 1 else modes:
                cells.append(Cell(mode=mode, workers=count, num_nodes=nodes, repeat=repeat))
        random.Random(f"{seed}/{repeat}").shuffle(cells)
        ordered += cells
    return ordered


class CellFile:
    """The runs that have ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.done: dict[str, Mapping[str, Any]] = {}
        for line in _whole_lines(path):
            if line.get("state") == "done":
                self.done[str(line.get("name"))] = line

    def measurement(self, cell: Cell) -> Measurement | None:
        """What a run measured, if it has ended well."""
        line = self.done.get(cell.name)
        if not line or not line.get("measurement"):
            return None
        figures = line["measurement"]
        if not fits(figures, Measurement) or not _is_measured(figures):
            raise BadFileError(self._path, f"the figures of {cell.name} are not what a run has measured")
        return Measurement(**figures)

    def add(self, cell: Cell, state: str, measurement: Measurement | None = None, error: str | None = None) -> None:
        """Keep the end of a run: "done" with its figures, or "failed" with the reason."""
        figures = asdict(measurement) if measurement else None
        line = {"name": cell.name, "state": state, "measurement": figures, "error": error}
        file = LineFile(self._path)
        file.append([line])
        file.close()
        if state == "done":
            self.done[cell.name] = line


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """Every line that is a JSON object; one that a kill cut short is left out, and its run is done again."""
    found = []
    try:
        for text in read_lines(path):
            try:
                line = parse_json(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                found.append(line)
    except FileNotFoundError:
        return []
    return found


def _is_measured(figures: Mapping[str, Any]) -> bool:
    needed = ("mode", "workers", "repeat", "samples_per_s", "units_per_s", "unit")
    return all(name in figures for name in needed) and min(figures["workers"], figures["samples_per_s"]) > 0
