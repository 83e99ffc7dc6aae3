"""`events.jsonl`: the sink that writes it, and how it is read back.

A resumed run goes on in the same file; `current_events` leaves out what the resume made obsolete.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from stormo.errors import StormoError
from stormo.telemetry.files import naming, to_json, write_json
from stormo.telemetry.folder import RunFolder
from stormo.telemetry.record import NodeSampled, Record, RunEnded, RunStarted, ValidationProgress, flatten

_TAIL_BLOCK_BYTES = 65536


class EventFile:
    """Appends every record to `events.jsonl` and writes `summary.json` at the end of the run."""

    def __init__(self, folder: RunFolder, *, clock: Callable[[], float] = time.time) -> None:
        folder.path.mkdir(parents=True, exist_ok=True)
        _repair_last_line(folder.events)
        self._folder = folder
        self._clock = clock
        self._file: BinaryIO = folder.events.open("ab")

    def write(self, record: Record) -> None:
        """Append one record; validation progress is for the eye only, and a node's own file has its samples."""
        if isinstance(record, ValidationProgress | NodeSampled):
            return
        if isinstance(record, RunStarted):
            # The summary of the attempt before this one would make a running run look finished;
            # its content stays in events.jsonl.
            self._folder.summary.unlink(missing_ok=True)
        event = {"event": _event_name(record), "time_unix_s": self._clock(), **flatten(record)}
        line = json.dumps(to_json(event), allow_nan=False).encode() + b"\n"
        with naming(self._folder.events):
            self._file.write(line)
            # Handing the line to the kernel survives a kill of this process. No fsync per line: on a busy
            # parallel file system one can take seconds, and every worker would wait for it.
            self._file.flush()
            if isinstance(record, RunEnded):
                os.fsync(self._file.fileno())
        if isinstance(record, RunEnded):
            write_json(self._folder.summary, record.summary)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_events(path: Path) -> list[dict[str, Any]]:
    """Every complete event of the file in order, none if there is no file; a last line cut short is left out."""
    if not path.is_file():
        return []
    events: list[dict[str, Any]] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            event = parse_event(line)
            if event is not None:
                events.append(event)
            elif line.endswith(b"\n"):
                raise StormoError(
                    f"{path}: line {number} is not a JSON object; the file was damaged after it was written."
                )
    return events


def current_events(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The events that still hold: a resume at step 100, or a rollback to it, makes records of later steps obsolete."""
    kept: list[Mapping[str, Any]] = []
    for event in events:
        if event["event"] == "run_started":
            resumed_at_step = event.get("resumed_at_step")
            # Started anew in the same folder: nothing that was there before belongs to this run.
            kept = [] if resumed_at_step is None else [old for old in kept if old.get("step", 0) <= resumed_at_step]
        elif event["event"] == "divergence_noticed" and event.get("rolled_back_to_step") is not None:
            kept = [old for old in kept if old.get("step", 0) <= event["rolled_back_to_step"]]
        kept.append(event)
    return kept


def speed_of(figures: Mapping[str, Any]) -> tuple[str, float | None]:
    """The unit of an event or a summary and how many of it a second; older runs counted images alone."""
    unit = str(figures.get("unit", "images"))
    return unit, figures.get("units_per_s", figures.get(f"{unit}_per_s"))


def _event_name(record: Record) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(record).__name__).lower()


def parse_event(line: bytes) -> dict[str, Any] | None:
    """The event of a line, or None where it is not one."""
    try:
        event = json.loads(line)
    except ValueError:  # malformed JSON and malformed UTF-8 alike
        return None
    return event if isinstance(event, dict) and "event" in event else None


def _repair_last_line(path: Path) -> None:
    """Remove a last line that a kill cut short, so that the next record starts on a line of its own."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        size_bytes = file.seek(0, os.SEEK_END)
        start, tail = size_bytes, b""
        while start > 0 and b"\n" not in tail:
            block_start = max(0, start - _TAIL_BLOCK_BYTES)
            file.seek(block_start)
            tail = file.read(start - block_start) + tail
            start = block_start
        last_line = tail[tail.rfind(b"\n") + 1 :]
        if not last_line:
            return
        if parse_event(last_line) is None:
            file.truncate(size_bytes - len(last_line))
        else:  # only its line end is missing
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
