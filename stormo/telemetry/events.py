"""`events.jsonl`: the sink that writes it, and how to read it.

A resumed run appends to the same file; `current_events` drops what the resume made obsolete.
"""

from __future__ import annotations

import re
import time
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from stormo.system.files import BadFileError, Fields, LineFile, parse_json, read_lines
from stormo.telemetry.folder import SUMMARY, RunFolder, name_in_errors, to_json, write_json
from stormo.telemetry.record import (
    CheckpointSaved,
    DivergenceNoticed,
    EpochDone,
    NodeSampled,
    Notice,
    Record,
    RunEnded,
    RunStarted,
    StepDone,
    ValidationProgress,
    ValueLogged,
)


class _Ranked(typing.TypedDict):
    rank: int


class _Worker(_Ranked, total=False):
    train_time_s: float | None
    input_wait_s: float | None
    exposed_s: float | None


def _event_name(kind: type) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


_RECORDS = (RunStarted, StepDone, EpochDone, ValueLogged, CheckpointSaved, Notice, DivergenceNoticed, RunEnded)


def _fields(kind: type) -> dict[str, Any]:
    """The types of a record's fields: a float that is not finite is written as null."""
    hints = typing.get_type_hints(kind)
    found = {key: hint | None if hint is float else hint for key, hint in hints.items()}
    figures: dict[str, Any] = {"validation": Mapping[str, float | None] | None, "workers": list[_Worker] | None}
    figures = {key: hint for key, hint in figures.items() if key in found}
    return found | figures | {"images_per_s": float | None, "time_unix_s": float}


_FIELDS = {_event_name(kind): Fields(_fields(kind)) for kind in _RECORDS}
_ANY = Fields({"time_unix_s": float})


class EventFile:
    """Appends records to `events.jsonl` and writes `summary.json` when the run ends."""

    def __init__(self, folder: RunFolder, *, clock: Callable[[], float] = time.time) -> None:
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._clock = clock
        self._file = LineFile(folder.events)
        self._file.append([])  # a file that cannot be written is refused before the training

    def write(self, record: Record) -> None:
        """Append one record; validation progress is not kept, and node samples are in the file of their node."""
        if isinstance(record, ValidationProgress | NodeSampled):
            return
        if isinstance(record, RunStarted):
            # The summary of an earlier attempt would make a running run look finished. events.jsonl keeps it.
            self._folder.summary.unlink(missing_ok=True)
        fields = {name: getattr(record, name) for name in record.__dataclass_fields__}
        event = {"event": _event_name(type(record)), "time_unix_s": self._clock(), **fields}
        with name_in_errors(self._folder.events):
            # A line handed to the kernel survives a kill of this process. No sync per line: on a busy parallel file
            # system it can take seconds, and every worker would wait.
            self._file.append([to_json(event)], sync=isinstance(record, RunEnded))
        if isinstance(record, RunEnded):
            write_json(self._folder.summary, record.summary)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_events(path: Path) -> list[dict[str, Any]]:
    """All events of the file in order, none if there is no file; an incomplete last line is left out."""
    events: list[dict[str, Any]] = []
    try:
        for number, line in enumerate(read_lines(path), start=1):
            try:
                event = parse_event(line)
            except ValueError as error:
                raise BadFileError(path, f"line {number} is not what was written there ({error})") from None
            if event is not None:
                events.append(event)
            elif line.endswith(b"\n"):
                raise BadFileError(
                    path, f"line {number} is not a JSON object; the file was damaged after it was written"
                )
    except FileNotFoundError:
        return []
    return events


def current_events(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The events that still apply: a resume at step 100, or a rollback to it, makes later steps obsolete."""
    kept: list[Mapping[str, Any]] = []
    for event in events:
        if event["event"] == "run_started":
            resumed_at_step = event.get("resumed_at_step")
            # Started anew in the same folder: earlier events belong to another run.
            kept = [] if resumed_at_step is None else [old for old in kept if old.get("step", 0) <= resumed_at_step]
        elif event["event"] == "divergence_noticed" and event.get("rolled_back_to_step") is not None:
            kept = [old for old in kept if old.get("step", 0) <= event["rolled_back_to_step"]]
        kept.append(event)
    return kept


def speed_of(figures: Mapping[str, Any]) -> tuple[str, float | None]:
    """The unit of an event or a summary, and how many a second; older runs counted only images."""
    unit = str(figures.get("unit", "images"))
    return unit, figures.get("units_per_s", figures.get(f"{unit}_per_s"))


def parse_event(line: bytes) -> dict[str, Any] | None:
    """The event of a line, or None; `ValueError` names a field of the wrong type."""
    try:
        event = parse_json(line)
    except ValueError:  # malformed JSON and malformed UTF-8 alike
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    _FIELDS.get(event["event"], _ANY).check(event)
    if event["event"] == "run_ended":
        SUMMARY.check(event.get("summary") or {})
    return event
