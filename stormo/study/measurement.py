"""What one run, or one row of a CSV file, measured at one number of workers."""

from __future__ import annotations

import contextlib
import csv
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stormo.errors import SettingError, StormoError, counted
from stormo.study.settings import Cell
from stormo.system.files import BadFileError
from stormo.telemetry.events import current_events, read_events
from stormo.telemetry.folder import RunFolder, read_summary


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """The figures of one run after its warm-up; what was not measured is None."""

    mode: str  # "strong", "weak", or "both" where the two are the same run
    workers: int
    repeat: int  # from 1; runs of one repeat followed each other and are compared with each other
    samples_per_s: float
    units_per_s: float
    unit: str  # what the speed is counted in: images, tokens, ...
    batch: float | None = None  # samples of one optimizer step over all workers
    j_per_sample: float | None = None
    energy_reason: str = ""  # why there is no energy
    # Seconds of a worker for each sample of all workers: parts of 1 / samples_per_s.
    input_s: float | None = None  # waited for data, mean over workers
    exposed_min_s: float | None = None  # stood still for the gradients of others, the worker that did so least
    exposed_mean_s: float | None = None  # the same, mean over workers
    basis: str = ""  # what was measured: "epochs 2 to 3", "40 steps"
    time_to_target_s: float | None = None
    energy_to_target_j: float | None = None
    note: str = ""  # how it was trained, where that is not as the others

    @property
    def sample_s(self) -> float:
        """Seconds for a sample of all workers."""
        return 1.0 / self.samples_per_s


WARMUP_S = 5.0  # of training, where a run is ended within its first epoch
_Event = Mapping[str, Any]


def measured_s(folder: Path) -> float:
    """Seconds of training that a run in progress has behind it since its warm-up."""
    with _whole_events(folder):
        return _measured_s(folder)


@contextlib.contextmanager
def _whole_events(folder: Path) -> Iterator[None]:
    """Say it in a sentence where an event lacks a figure that every run writes."""
    try:
        yield
    except (KeyError, TypeError) as error:
        raise BadFileError(RunFolder(folder).events, f"an event of it has not all its figures ({error})") from None


def _measured_s(folder: Path) -> float:
    events = current_events(read_events(RunFolder(folder).events))
    start, newest = _warm(events), _newest(events)
    return newest["time_s"] - start["time_s"] if start and newest else 0.0


def measure_run(folder: Path, cell: Cell) -> Measurement:
    """The figures of a run that has ended: of the epochs after the first or, if there is none, of its steps."""
    with _whole_events(folder):
        return _measure_run(RunFolder(folder), cell)


def _measure_run(run: RunFolder, cell: Cell) -> Measurement:
    events = current_events(read_events(run.events))
    summary = read_summary(run) or {}
    epochs = [event for event in events if event["event"] == "epoch_done"]
    measured = _of_epochs(epochs, cell) if len(epochs) > 1 else _of_steps(events, cell)
    started = next((event for event in events if event["event"] == "run_started"), {})
    if measured.j_per_sample is None:
        measured = replace(measured, energy_reason=_energy_reason(summary, measured.energy_reason))
    return replace(
        measured,
        batch=started.get("global_batch_size"),
        time_to_target_s=summary.get("time_to_target_s"),
        energy_to_target_j=summary.get("energy_to_target_j") or None,  # 0: sooner than its counters tell
    )


def _of_epochs(epochs: Sequence[_Event], cell: Cell) -> Measurement:
    later = epochs[1:]
    samples = later[-1]["samples_seen"] - epochs[0]["samples_seen"]
    time_s = math.fsum(epoch["epoch_time_s"] for epoch in later)
    if samples <= 0 or time_s <= 0:
        raise StormoError("its epochs after the first took no time that could be measured.")
    told = [epoch for epoch in epochs if epoch.get("energy_j") is not None]  # each of all since the one before it
    energy_j = math.fsum(epoch["energy_j"] for epoch in told[1:])
    paid_samples = told[-1]["samples_seen"] - told[0]["samples_seen"] if told else 0
    last = later[-1]["epoch"]
    input_s = _waited_s(later, "input_wait_s", _mean)
    least_s, mean_s = _waited_s(later, "exposed_s", min), _waited_s(later, "exposed_s", _mean)
    return _of_events(
        cell,
        later,
        samples / time_s,
        j_per_sample=energy_j / paid_samples if energy_j and paid_samples > 0 else None,
        input_s=None if input_s is None else input_s / samples,
        exposed_min_s=None if least_s is None else least_s / samples,
        exposed_mean_s=None if mean_s is None else mean_s / samples,
        basis="epoch 2" if last == 2 else f"epochs 2 to {last}",
    )


def _waited_s(epochs: Sequence[_Event], key: str, of: Callable[[Sequence[float]], float]) -> float | None:
    """What the workers waited for, in seconds; None where one of them did not measure it."""
    by_epoch = [[worker.get(key) for worker in epoch.get("workers") or ()] for epoch in epochs]
    if any(not values or None in values for values in by_epoch):
        return None
    return math.fsum(of(values) for values in by_epoch)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _of_steps(events: Sequence[_Event], cell: Cell) -> Measurement:
    start, newest = _warm(events), _newest(events)
    if start is None or newest is None or newest["samples"] <= start["samples"] or newest["time_s"] <= start["time_s"]:
        raise StormoError(
            f"it ended before anything was measured: the first epoch, or its first {WARMUP_S:g} s, are the warm-up; "
            "set more --epochs, or a longer --seconds."
        )
    samples, time_s = newest["samples"] - start["samples"], newest["time_s"] - start["time_s"]
    steps = [event for event in events if event["event"] == "step_done" and event["train_time_s"] > start["time_s"]]
    powers = [step["power_w"] for step in steps if step.get("power_w") is not None]
    is_powered = any(powers) and len(powers) == len(steps) and cell.num_nodes == 1
    waits = [step.get("input_wait_fraction") for step in steps]
    return _of_events(
        cell,
        steps,
        samples / time_s,
        j_per_sample=_mean(powers) * time_s / samples if is_powered else None,
        energy_reason="of several nodes it is known for whole epochs alone" if powers and cell.num_nodes > 1 else "",
        input_s=None if None in waits else _mean([wait for wait in waits if wait is not None]) * time_s / samples,
        basis=counted(newest["step"] - start["step"], "step"),
    )


def _of_events(cell: Cell, events: Sequence[_Event], samples_per_s: float, **rest: Any) -> Measurement:
    """Of a run whose speed this was, counted in what these events of it count."""
    return Measurement(
        mode=cell.mode,
        workers=cell.workers,
        repeat=cell.repeat,
        samples_per_s=samples_per_s,
        units_per_s=samples_per_s * _units_per_sample(events),
        unit=events[-1].get("unit", "samples"),
        **rest,
    )


def _units_per_sample(events: Sequence[_Event]) -> float:
    return next((event["units_per_s"] / event["samples_per_s"] for event in events if event["samples_per_s"]), 1.0)


def _warm(events: Sequence[_Event]) -> dict[str, Any] | None:
    """Where the measured part begins: after the first seconds of steps, or after the first epoch if that is sooner."""
    for event in events:
        if event["event"] == "epoch_done":
            return _moment(event, "cumulative_time_s")
        if event["event"] == "step_done" and event["train_time_s"] >= WARMUP_S:
            return _moment(event, "train_time_s")
    return None


def _newest(events: Sequence[_Event]) -> dict[str, Any] | None:
    steps = [event for event in events if event["event"] == "step_done"]
    return _moment(steps[-1], "train_time_s") if steps else None


def _moment(event: _Event, time_key: str) -> dict[str, Any]:
    return {"step": event["step"], "samples": event["samples_seen"], "time_s": event[time_key]}


def _energy_reason(summary: _Event, known: str) -> str:
    if not known and summary.get("energy_j"):
        return "they are too short for the counters: set more --epochs"
    told = summary.get("energy_reasons") or ()
    items = told.values() if isinstance(told, Mapping) else [told] if isinstance(told, str) else told
    texts = [str(item.get("reason", item)) if isinstance(item, Mapping) else str(item) for item in items]
    return known or "; ".join(dict.fromkeys(texts)) or "the runs recorded none"


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
            one = _of_row(names, row, unit, mode, seen)
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


def _of_row(names: list[str], row: list[str], unit: str, mode: str, seen: Counter[int]) -> Measurement:
    if len(row) != len(names):
        raise _LineError(f"has {len(row)} fields where the first line names {len(names)}")
    cells = {name: cell.strip() for name, cell in zip(names, row, strict=True)}
    workers = _count(cells, "workers")
    seen[workers] += 1
    repeat = _count(cells, "repeat") if cells.get("repeat") else seen[workers]
    speed, time_s = _positive(cells, f"{unit}_per_s"), _positive(cells, "time_s")
    if speed is None and (time_s is None or unit != "runs"):
        raise _LineError(f"has no {f'{unit}_per_s' if unit != 'runs' else 'time_s'}")
    if speed is None:
        assert time_s is not None
        speed = 1.0 / time_s
    power_w, energy_j = _positive(cells, "power_w"), _positive(cells, "energy_j")
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


def _count(cells: Mapping[str, str], name: str) -> int:
    text = cells[name]
    if not text.isdecimal() or int(text) < 1:
        raise _LineError(f"has {name} = {text!r}, which is no whole number from 1 on")
    return int(text)


def _positive(cells: Mapping[str, str], name: str) -> float | None:
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
