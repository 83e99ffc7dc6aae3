"""From the files of a run to its measurement: what came after the warm-up, never what was not recorded."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stormo.errors import StormoError, counted
from stormo.study.cells import Cell
from stormo.study.measurement import Measurement
from stormo.system.files import BadFileError
from stormo.telemetry.events import current_events, read_events
from stormo.telemetry.folder import RunFolder, read_summary

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
    return _measurement(
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
    return _measurement(
        cell,
        steps,
        samples / time_s,
        j_per_sample=_mean(powers) * time_s / samples if is_powered else None,
        energy_reason="of several nodes it is known for whole epochs alone" if powers and cell.num_nodes > 1 else "",
        input_s=None if None in waits else _mean([wait for wait in waits if wait is not None]) * time_s / samples,
        basis=counted(newest["step"] - start["step"], "step"),
    )


def _measurement(cell: Cell, events: Sequence[_Event], samples_per_s: float, **rest: Any) -> Measurement:
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
