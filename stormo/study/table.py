"""Reads a measured table from elsewhere: a CSV file with a row for each measurement.

Columns: `workers`; a speed (`units_per_s`, `images_per_s`, ...) or `time_s`, the seconds for the same work at every
number of workers; where known `power_w` (all devices together), `energy_j` (of that work), `repeat`.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stormo.errors import SettingError
from stormo.study.measurement import Measurement

_KNOWN = ("workers", "time_s", "power_w", "energy_j", "repeat")
_SPEED = re.compile(r"([a-z]+)_per_s")
_MOST_NAMED = 5  # malformed lines in one message


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table as measurements, and its columns that mean nothing here."""

    measurements: tuple[Measurement, ...]
    energy_per: str
    unused: tuple[str, ...]


class _LineError(ValueError):
    """One line that cannot be read."""


def read_table(path: Path, mode: str) -> Table:
    """Every row of the file, or a sentence that names each line that is malformed."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(line for line in file)
            rows = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except OSError as error:
        raise SettingError(
            f"--from {path} was set", f"it cannot be read ({error.strerror})", "check the path"
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise SettingError(f"--from {path} was set", f"it is no CSV file ({error})", "save it as UTF-8 CSV") from None
    rows = [(number, row) for number, row in rows if not row[0].lstrip().startswith("#")]
    if len(rows) < 2:
        raise SettingError(
            f"--from {path} was set", "it has no row of figures below a line of names", "give it at least two rows"
        )
    names = [cell.strip().lower() for cell in rows[0][1]]
    unit = _unit(names, path)
    measurements: list[Measurement] = []
    problems, seen = [], Counter[int]()
    for number, row in rows[1:]:
        try:
            one = _measurement(names, row, unit, mode, seen)
            if any((one.workers, one.repeat) == (old.workers, old.repeat) for old in measurements):
                raise _LineError(f"repeats workers {one.workers}, repeat {one.repeat}")
            measurements.append(one)
        except _LineError as error:
            problems.append(f"line {number} {error}")
    if problems:
        shown = "; ".join(problems[:_MOST_NAMED])
        more = f"; and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        lines = "that line" if len(problems) == 1 else "those lines"
        raise SettingError(f"--from {path} was set", f"{shown}{more}", f"mend {lines}")
    return Table(
        measurements=tuple(measurements),
        energy_per=_singular(unit),
        unused=tuple(name for name in names if name not in _KNOWN and not _SPEED.fullmatch(name)),
    )


def _unit(names: list[str], path: Path) -> str:
    """What the table counts: the unit of its speed, or runs of the same work where it gives times alone."""
    speeds = [match[1] for name in names if (match := _SPEED.fullmatch(name))]
    if len(names) < 2 or any("\n" in name for name in names):
        raise SettingError(
            f"--from {path} was set", "its first line is none of names with commas between", "name a CSV file"
        )
    double = [name for name, count in Counter(names).items() if count > 1]
    if double:
        raise SettingError(f"--from {path} was set", f"it has two columns {double[0]}", "leave one of them out")
    if "workers" not in names or (not speeds and "time_s" not in names) or len(speeds) > 1:
        raise SettingError(
            f"--from {path} was set",
            f"its columns are {', '.join(names)}",
            "name a column workers, and one units_per_s, samples_per_s (or the like) or time_s",
        )
    if "energy_j" in names and "time_s" not in names:
        raise SettingError(
            f"--from {path} was set",
            "it has energy_j without time_s, so that nobody knows what the energy was spent on",
            "add time_s, or give power_w instead",
        )
    return speeds[0] if speeds else "runs"


def _measurement(names: list[str], row: list[str], unit: str, mode: str, seen: Counter[int]) -> Measurement:
    if len(row) != len(names):
        raise _LineError(f"has {len(row)} fields where the first line names {len(names)}")
    cells = {name: cell.strip() for name, cell in zip(names, row, strict=True)}
    workers = _whole(cells, "workers")
    seen[workers] += 1
    repeat = _whole(cells, "repeat") if cells.get("repeat") else seen[workers]
    speed, time_s = _figure(cells, f"{unit}_per_s"), _figure(cells, "time_s")
    if speed is None and (time_s is None or unit != "runs"):
        raise _LineError(f"has no {f'{unit}_per_s' if unit != 'runs' else 'time_s'}")
    if speed is None:
        assert time_s is not None
        speed = 1.0 / time_s
    power_w, energy_j = _figure(cells, "power_w"), _figure(cells, "energy_j")
    j_per_unit = None
    if energy_j is not None:
        if time_s is None:
            raise _LineError("has energy_j and no time_s")
        j_per_unit = energy_j / (speed * time_s)
    elif power_w is not None:
        j_per_unit = power_w / speed
    return Measurement(
        mode=mode,
        workers=workers,
        repeat=repeat,
        samples_per_s=speed,
        units_per_s=speed,
        unit=unit,
        j_per_sample=j_per_unit,
        energy_reason="" if j_per_unit is not None else "the table has no power_w or energy_j for every row",
        basis="table",
    )


def _whole(cells: Mapping[str, str], name: str) -> int:
    text = cells[name]
    if not text.isdecimal() or int(text) < 1:
        raise _LineError(f"has {name} = {text!r}, which is no whole number from 1 on")
    return int(text)


def _figure(cells: Mapping[str, str], name: str) -> float | None:
    text = cells.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise _LineError(f"has {name} = {text!r}, which is no number above 0")
    return value


def _singular(unit: str) -> str:
    return unit.removesuffix("s") or unit
