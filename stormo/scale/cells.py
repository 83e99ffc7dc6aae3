"""The runs of a study, the order they are done in, and the file that keeps those that are done.

`cells.jsonl` has one line for each run that ended, well or not; a study that is started again repeats none that
ended well.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stormo.scale.measurement import Measurement


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
                self.done[str(line["name"])] = line

    def measurement(self, cell: Cell) -> Measurement | None:
        """What a run measured, if it has ended well."""
        line = self.done.get(cell.name)
        return Measurement(**line["measurement"]) if line and line.get("measurement") else None

    def add(self, cell: Cell, state: str, measurement: Measurement | None = None, error: str | None = None) -> None:
        """Keep the end of a run: "done" with its figures, or "failed" with the reason."""
        figures = asdict(measurement) if measurement else None
        line = {"name": cell.name, "state": state, "measurement": figures, "error": error}
        is_cut = self._path.is_file() and not self._path.read_bytes().endswith(b"\n") and self._path.stat().st_size > 0
        with self._path.open("a", encoding="utf-8") as file:
            file.write("\n" * is_cut + json.dumps(line) + "\n")
        if state == "done":
            self.done[cell.name] = line


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """Every line that is a JSON object; one that a kill cut short is left out, and its run is done again."""
    found = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            found.append(line)
    return found
