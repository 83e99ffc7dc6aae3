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
from typing import Any, NamedTuple

from stormo.errors import SettingError, StormoError, pluralize
from stormo.study.study import Run
from stormo.system.files import BadFileError
from stormo.telemetry.events import current_events, read_events
from stormo.telemetry.folder import RunFolder, read_summary

WARMUP_S = 5.0  # of training, where a run is stopped within its first epoch
_CSV_COLUMNS = ("workers", "time_s", "power_w", "energy_j", "repeat")
_CSV_SPEED = re.compile(r"([a-z]+)_per_s")
_MOST_NAMED = 5  # malformed lines in one message
_Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """The figures of one run after its warm-up; what was not measured is None."""

    mode: str  # "strong", "weak", or "both" where the two are the same run
    workers: int
    repeat: int  # from 1; runs of one repeat followed each other and are compared with each other
    samples_per_s: float
    units_per_s: float
    unit: str  # of the speed: images, tokens, ...
    batch: float | None = None  # samples of one optimizer step over all workers
    j_per_sample: float | None = None
    energy_reason: str = ""  # why there is no energy
    # Seconds of a worker for each sample of all workers: parts of 1 / samples_per_s.
    input_s: float | None = None  # waited for data, mean over workers
    exposed_min_s: float | None = None  # waited for gradients, the worker that waited least
    exposed_mean_s: float | None = None  # the same, mean over workers
    basis: str = ""  # what was measured: "epochs 2 to 3", "40 steps"
    is_of_steps: bool = False  # measured over steps, not over whole epochs
    time_to_target_s: float | None = None
    energy_to_target_j: float | None = None
    note: str = ""  # how it was trained, where that differs from the others

    @property
    def sample_s(self) -> float:
        """Seconds for a sample of all workers."""
        return 1.0 / self.samples_per_s


class _Progress(NamedTuple):
    step: int
    samples: int
    time_s: float


def measured_s(folder: Path) -> float:
    """Seconds of training since the warm-up of a run in progress."""
    with _complete_events(folder):
        events = current_events(read_events(RunFolder(folder).events))
        start, newest = _after_warmup(events), _newest(events)
        return newest.time_s - start.time_s if start and newest else 0.0


def measure_run(folder: Path, run: Run) -> Measurement:
    """The figures of a run that has ended: of the epochs after the first or, without any, of its steps."""
    files = RunFolder(folder)
    with _complete_events(folder):
        events = current_events(read_events(files.events))
        summary = read_summary(files) or {}
        epochs = [event for event in events if event["event"] == "epoch_done"]
        measured = _of_epochs(epochs, run) if len(epochs) > 1 else _of_steps(events, run)
        started = next((event for event in events if event["event"] == "run_started"), {})
        if measured.j_per_sample is None:
            measured = replace(measured, energy_reason=measured.energy_reason or _energy_reason(summary))
        return replace(
            measured,
            batch=started.get("global_batch_size"),
            time_to_target_s=summary.get("time_to_target_s"),
            energy_to_target_j=summary.get("energy_to_target_j") or None,  # 0: too short for its counters
        )


@contextlib.contextmanager
def _complete_events(folder: Path) -> Iterator[None]:
    """Turn a missing figure of an event into a `BadFileError`."""
    try:
        yield
    except (KeyError, TypeError) as error:
        raise BadFileError(RunFolder(folder).events, f"an event lacks a figure ({error})") from None


def _of_epochs(epochs: Sequence[_Event], run: Run) -> Measurement:
    later = epochs[1:]
    samples = later[-1]["samples_seen"] - epochs[0]["samples_seen"]
    time_s = math.fsum(epoch["epoch_time_s"] for epoch in later)
    if samples <= 0 or time_s <= 0:
        raise StormoError("its epochs after the first took no time that could be measured.")
    # The energy of an epoch is that since the last epoch that has it.
    metered = [epoch for epoch in epochs if epoch.get("energy_j") is not None]
    energy_j = math.fsum(epoch["energy_j"] for epoch in metered[1:])
    metered_samples = metered[-1]["samples_seen"] - metered[0]["samples_seen"] if metered else 0
    last = later[-1]["epoch"]
    return _of_events(
        run,
        later,
        samples / time_s,
        j_per_sample=energy_j / metered_samples if energy_j and metered_samples > 0 else None,
        input_s=_waited_s(later, samples, "input_wait_s", _mean),
        exposed_min_s=_waited_s(later, samples, "exposed_s", min),
        exposed_mean_s=_waited_s(later, samples, "exposed_s", _mean),
        basis="epoch 2" if last == 2 else f"epochs 2 to {last}",
    )


def _waited_s(epochs: Sequence[_Event], samples: int, key: str, of: Callable[[Sequence[float]], float]) -> float | None:
    """The workers' wait for each sample, in seconds; None where one of them did not measure it."""
    by_epoch = [[worker.get(key) for worker in epoch.get("workers") or ()] for epoch in epochs]
    if any(not values or None in values for values in by_epoch):
        return None
    return math.fsum(of(values) for values in by_epoch) / samples


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _of_steps(events: Sequence[_Event], run: Run) -> Measurement:
    start, newest = _after_warmup(events), _newest(events)
    if start is None or newest is None or newest.samples <= start.samples or newest.time_s <= start.time_s:
        raise StormoError(
            f"it ended before anything was measured: the first epoch, or its first {WARMUP_S:g} s, are the warm-up; "
            "set more --epochs, or a longer --seconds."
        )
    samples, time_s = newest.samples - start.samples, newest.time_s - start.time_s
    steps = [event for event in events if event["event"] == "step_done" and event["train_time_s"] > start.time_s]
    powers = [step["power_w"] for step in steps if step.get("power_w") is not None]
    is_metered = any(powers) and len(powers) == len(steps) and run.num_nodes == 1
    waits = [step.get("input_wait_fraction") for step in steps]
    return _of_events(
        run,
        steps,
        samples / time_s,
        j_per_sample=_mean(powers) * time_s / samples if is_metered else None,
        energy_reason="on several nodes it is known for whole epochs only" if powers and run.num_nodes > 1 else "",
        input_s=None if None in waits else _mean([wait for wait in waits if wait is not None]) * time_s / samples,
        basis=pluralize(newest.step - start.step, "step"),
        is_of_steps=True,
    )


def _of_events(run: Run, events: Sequence[_Event], samples_per_s: float, **rest: Any) -> Measurement:
    units = next((event["units_per_s"] / event["samples_per_s"] for event in events if event["samples_per_s"]), 1.0)
    return Measurement(
        mode=run.mode,
        workers=run.workers,
        repeat=run.repeat,
        samples_per_s=samples_per_s,
        units_per_s=samples_per_s * units,
        unit=events[-1].get("unit", "samples"),
        **rest,
    )


def _after_warmup(events: Sequence[_Event]) -> _Progress | None:
    """After the first seconds of steps, or after the first epoch if that is sooner."""
    for event in events:
        if event["event"] == "epoch_done":
            return _Progress(event["step"], event["samples_seen"], event["cumulative_time_s"])
        if event["event"] == "step_done" and event["train_time_s"] >= WARMUP_S:
            return _Progress(event["step"], event["samples_seen"], event["train_time_s"])
    return None


def _newest(events: Sequence[_Event]) -> _Progress | None:
    last = next((event for event in reversed(events) if event["event"] == "step_done"), None)
    return _Progress(last["step"], last["samples_seen"], last["train_time_s"]) if last else None


def _energy_reason(summary: _Event) -> str:
    if summary.get("energy_j"):
        return "the epochs are too short for the counters: set more --epochs"
    return "; ".join(dict.fromkeys(summary.get("energy_reasons") or ())) or "the runs recorded none"


@dataclass(frozen=True, kw_only=True, slots=True)
class CsvTable:
    """The measurements of a CSV file, and the columns that are not used."""

    measurements: tuple[Measurement, ...]
    energy_per: str
    unused: tuple[str, ...]


class _LineError(ValueError):
    """A line that cannot be read."""


def read_csv(path: Path, mode: str) -> CsvTable:
    """Read a table measured elsewhere, a row for each measurement; the error names malformed lines.

    Columns: `workers`; a speed (`units_per_s`, `images_per_s`, ...) or `time_s`, the seconds for the same work at every
    number of workers; optionally `power_w` (all devices together), `energy_j` (of that work), `repeat`.
    """

    def refuse(why: str, instead: str) -> SettingError:
        return SettingError(f"--from {path} was set", why, instead)

    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
    except OSError as error:
        raise refuse(f"it cannot be read ({error.strerror})", "check the path") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise refuse(f"it is not a CSV file ({error})", "save it as UTF-8 CSV") from None
    rows = [(number, row) for number, row in rows if any(row) and not row[0].startswith("#")]
    if len(rows) < 2:
        raise refuse("it has no row of figures below a line of names", "give it at least two rows")
    names = [cell.lower() for cell in rows[0][1]]
    speeds = [match[1] for name in names if (match := _CSV_SPEED.fullmatch(name))]
    if len(names) < 2 or any("\n" in name for name in names):
        raise refuse("its first line does not name columns with commas between", "name a CSV file")
    if len(set(names)) < len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise refuse(f"it has two columns {double}", "leave one of them out")
    if "workers" not in names or (not speeds and "time_s" not in names) or len(speeds) > 1:
        instead = "name a column workers, and one units_per_s, samples_per_s (or the like) or time_s"
        raise refuse(f"its columns are {', '.join(names)}", instead)
    if "energy_j" in names and "time_s" not in names:
        why = "it has energy_j without time_s, which says what the energy was spent on"
        raise refuse(why, "add time_s, or give power_w instead")
    unit = speeds[0] if speeds else "runs"  # of the same work
    measurements: dict[tuple[int, int], Measurement] = {}
    problems, num_rows = [], Counter[int]()
    for number, row in rows[1:]:
        try:
            one = _of_row(names, row, unit, mode, num_rows)
            if (one.workers, one.repeat) in measurements:
                raise _LineError(f"repeats workers {one.workers}, repeat {one.repeat}")
            measurements[one.workers, one.repeat] = one
        except _LineError as error:
            problems.append(f"line {number} {error}")
    if problems:
        more = f"; and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        raise refuse("; ".join(problems[:_MOST_NAMED]) + more, "correct these lines")
    return CsvTable(
        measurements=tuple(measurements.values()),
        energy_per=unit.removesuffix("s") or unit,
        unused=tuple(name for name in names if name not in _CSV_COLUMNS and not _CSV_SPEED.fullmatch(name)),
    )


def _of_row(names: list[str], row: list[str], unit: str, mode: str, num_rows: Counter[int]) -> Measurement:
    if len(row) != len(names):
        raise _LineError(f"has {len(row)} fields where the first line names {len(names)}")
    cells = dict(zip(names, row, strict=True))

    def count(name: str) -> int:
        if not cells[name].isdecimal() or int(cells[name]) < 1:
            raise _LineError(f"has {name} = {cells[name]!r}, which is not a whole number from 1 on")
        return int(cells[name])

    def positive(name: str) -> float | None:
        text = cells.get(name, "")
        value = math.nan
        with contextlib.suppress(ValueError):
            value = float(text)
        if text and not 0 < value < math.inf:
            raise _LineError(f"has {name} = {text!r}, which is not a number above 0")
        return value if text else None

    workers = count("workers")
    num_rows[workers] += 1
    time_s, power_w, energy_j = (positive(name) for name in ("time_s", "power_w", "energy_j"))
    speed_name = "time_s" if unit == "runs" else f"{unit}_per_s"
    speed = positive(speed_name)
    if speed is None:
        raise _LineError(f"has no {speed_name}")
    if unit == "runs":
        speed = 1.0 / speed
    j_per_unit = None if power_w is None else power_w / speed
    if energy_j is not None:
        if time_s is None:
            raise _LineError("has energy_j and no time_s")
        j_per_unit = energy_j / (speed * time_s)
    return Measurement(
        mode=mode,
        workers=workers,
        repeat=count("repeat") if cells.get("repeat") else num_rows[workers],
        samples_per_s=speed,
        units_per_s=speed,
        unit=unit,
        j_per_sample=j_per_unit,
        energy_reason="" if j_per_unit is not None else "the table has no power_w or energy_j for every row",
        basis="table",
    )
