"""Reads the files of one run for the page, again and again while they grow; a missing file is not an error."""

from __future__ import annotations

import hashlib
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stormo.energy.nodefile import parse_line
from stormo.errors import StormoError, counted
from stormo.system.files import MAX_RECORDS_BYTES, BadFileError, lines_of, open_to_read
from stormo.telemetry.events import current_events, parse_event
from stormo.telemetry.folder import RunFolder, is_running, read_environment, read_summary
from stormo.telemetry.runs_folder import flat_config, overview

if TYPE_CHECKING:
    from stormo.energy.ledger import Bill


_SHORTEST_PAUSE_S = 30.0  # a shorter one is the start: nodes and rank 0 do not write their first line at once


class Clock:
    """Maps a time of day to the running time of the run: wall-clock time without the pauses between attempts."""

    def __init__(self, spans_unix_s: Sequence[tuple[float, float]]) -> None:
        self._begins = [begin for begin, _ in spans_unix_s]
        self._ends = [end for _, end in spans_unix_s]
        self._before_s = [0.0]
        for begin, end in spans_unix_s:
            self._before_s.append(self._before_s[-1] + end - begin)

    @property
    def total_s(self) -> float:
        """The running time of all attempts together."""
        return self._before_s[-1]

    def running_s(self, time_unix_s: float) -> float:
        """The running time at a time of day; it stops during a pause."""
        attempt = bisect_right(self._begins, time_unix_s) - 1
        if attempt < 0:
            return 0.0
        until = min(time_unix_s, self._ends[attempt])
        return self._before_s[attempt] + max(until - self._begins[attempt], 0.0)


def make_clock(events: Iterable[Mapping[str, Any]], nodes: Iterable[Sequence[Mapping[str, Any]]]) -> Clock:
    """The clock of a run, from the times of everything it wrote."""
    times = [(float(event["time_unix_s"]), event.get("event") == "run_started") for event in events]
    for lines in nodes:
        times += [(float(line["time_unix_s"]), line.get("kind") == "start") for line in lines]
    times.sort(key=lambda item: item[0])
    spans: list[tuple[float, float]] = []
    for time_unix_s, opens in times:
        if not spans or (opens and time_unix_s - spans[-1][1] > _SHORTEST_PAUSE_S):
            spans.append((time_unix_s, time_unix_s))
        spans[-1] = (spans[-1][0], max(spans[-1][1], time_unix_s))
    return Clock(spans)


_HEAD_BYTES = 256  # a file with another head was written anew, as its first line holds the time


class JsonLines:
    """The JSON objects of a growing file; each read takes only what was appended, without an unfinished last line.

    A line without a number under `time_unix_s`, or that `parse` refuses, is an error if `strict`, else counted and left
    out.
    """

    def __init__(self, path: Path, parse: Callable[[bytes], dict[str, Any] | None], *, strict: bool = True) -> None:
        self.path = path
        self.num_damaged = 0
        self._parse_line = parse
        self._strict = strict
        self._objects: list[dict[str, Any]] = []
        self._head = b""
        self._end = 0
        self._num_lines = 0

    def read(self) -> list[dict[str, Any]]:
        """All objects so far; none while there is no file."""
        try:
            file = open_to_read(self.path, MAX_RECORDS_BYTES)
        except FileNotFoundError:
            self._forget()
            return []
        with file:
            if file.read(len(self._head)) != self._head or file.seek(0, 2) < self._end:
                self._forget()  # written anew
            if self._end == 0:
                file.seek(0)
                self._head = file.read(_HEAD_BYTES)
            file.seek(self._end)
            rest = b""
            for line in lines_of(file, self.path):
                if not line.endswith(b"\n"):
                    rest = line
                    break
                self._num_lines += 1
                self._end += len(line)
                self._take(line)
        # The last line of a killed run may lack only its line break.
        try:
            last = self._parse(rest)
        except ValueError:
            last = None
        return self._objects if last is None else [*self._objects, last]

    def _forget(self) -> None:
        self._objects, self._head = [], b""
        self._end = self._num_lines = self.num_damaged = 0

    def _take(self, line: bytes) -> None:
        why = "it is not a JSON object with the time of a record"
        try:
            found = self._parse(line)
        except ValueError as error:
            found, why = None, str(error)
        if found is not None:
            self._objects.append(found)
        elif self._strict:
            number = self._num_lines
            self._forget()  # the next read starts at the first line again
            raise BadFileError(self.path, f"line {number} was damaged after it was written ({why})")
        elif line.strip():
            self.num_damaged += 1

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        found = self._parse_line(line)
        return found if found is not None and isinstance(found.get("time_unix_s"), int | float) else None


Line = Mapping[str, Any]
Places = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class History:
    """One run at this moment."""

    label: str  # its name on the page
    path: Path
    state: str  # waiting, running, done, stopped, diverged, failed, interrupted
    summary: Line
    environment: Line
    config: Mapping[str, str]  # flat: "batch.batch_size" → "32"
    events: Sequence[Line]  # all that were ever written
    current: Sequence[Line]  # without those that a resume or a rollback made obsolete
    nodes: Mapping[str, Sequence[Line]]  # the lines of each node's file
    clock: Clock
    bill: Bill | None = None
    no_bill_reason: str = ""
    notes: Sequence[str] = field(default_factory=tuple)  # about what could not be read

    def of(self, name: str) -> Sequence[Line]:
        """The current events of one kind."""
        return [event for _, event in self.placed(name)]

    def placed(self, name: str) -> Sequence[tuple[Places, Line]]:
        """The current events of one kind, each with its position on every axis."""
        return self._placed.get(name, ())

    @cached_property
    def _placed(self) -> dict[str, list[tuple[Places, Line]]]:
        found: dict[str, list[tuple[Places, Line]]] = {}
        for event in self.current:
            places = {
                "step": int(event.get("step") or 0),
                "epoch": round(epoch_place(event, self.started), 4),
                **self.time_place(event),
            }
            found.setdefault(str(event.get("event")), []).append((places, event))
        return found

    @cached_property
    def samples(self) -> Mapping[str, Sequence[tuple[Places, Line]]]:
        """The samples of each node with their running time, the only axis they have."""
        return {
            node: [(self.time_place(line), line) for line in lines if line.get("kind") == "sample"]
            for node, lines in self.nodes.items()
        }

    def time_place(self, line: Line) -> Places:
        """The running time at which a line was written."""
        return {"time_s": round(self.clock.running_s(float(line.get("time_unix_s") or 0.0)), 2)}

    @cached_property
    def started(self) -> Line:
        """The last `run_started`, or an empty one."""
        return next((event for event in reversed(self.events) if event.get("event") == "run_started"), {})

    @cached_property
    def _epochs_by_step(self) -> tuple[list[int], list[float]]:
        places = sorted(
            (int(event["step"]), epoch_place(event, self.started))
            for event in self.current
            if event.get("event") in ("step_done", "epoch_done") and event.get("step") is not None
        )
        return [step for step, _ in places], [epoch for _, epoch in places]

    def epoch_at(self, step: int) -> float:
        """The epochs done at a step, interpolated between two records."""
        steps, epochs = self._epochs_by_step
        after = bisect_right(steps, step)
        (begin, low) = (steps[after - 1], epochs[after - 1]) if after else (0, 0.0)
        if after == len(steps):
            return low
        return low + (epochs[after] - low) * (step - begin) / (steps[after] - begin)

    @cached_property
    def reached(self) -> Sequence[tuple[int, Line]]:
        """All events, each with the step that the run had reached."""
        found: list[tuple[int, Line]] = []
        step = 0
        for event in self.events:
            if event.get("event") == "run_started":
                step = int(event.get("resumed_at_step") or 0)  # a run that is started anew begins at 0
            else:
                steps = (event.get(key) for key in ("rolled_back_to_step", "after_step", "step"))
                step = next((int(one) for one in steps if one is not None), step)
            found.append((step, event))
        return found


def epoch_place(event: Line, started: Line) -> float:
    """The position of an event in epochs: 1.5 is the middle of the second."""
    epoch = float(event.get("epoch") or 0)
    if event.get("event") == "epoch_done":
        return epoch
    steps = event.get("steps_in_epoch") or started.get("steps_per_epoch") or 1
    return epoch - 1 + float(event.get("step_in_epoch") or 0) / float(steps)


class Reader:
    """Reads one run again and again, keeping what it has read of growing files."""

    def __init__(self, folder: RunFolder, label: str | None = None) -> None:
        self.folder = folder
        self._label = label or folder.name
        self._events = JsonLines(folder.events, parse_event)
        self._nodes: dict[str, JsonLines] = {}

    def version(self) -> str:
        """Changes whenever a file of the run does."""
        folder = self.folder
        files = [folder.events, folder.summary, folder.config, folder.environment, *_node_files(folder)]
        marks = ";".join(f"{file.name}:{_mark(file)}" for file in files)
        return hashlib.sha256(marks.encode()).hexdigest()[:16]

    def read(self) -> History:
        """The run at this moment."""
        try:
            return self._read()
        except BadFileError:
            raise
        except OSError as error:
            raise StormoError(f"{error.filename} cannot be read ({error.strerror}).") from None

    def _read(self) -> History:
        events = list(self._events.read())
        nodes = dict(self._read_nodes())
        summary = read_summary(self.folder)
        bill, no_bill_reason = _read_bill(self.folder, nodes)
        return History(
            label=self._label,
            path=self.folder.path,
            state=self._state(summary, events, nodes),
            summary=summary or {},
            environment=read_environment(self.folder) or {},
            config=flat_config(self.folder.config),
            events=events,
            current=current_events(events),
            nodes=nodes,
            clock=make_clock(events, nodes.values()),
            bill=bill,
            no_bill_reason=no_bill_reason,
            notes=tuple(self._notes()),
        )

    def _read_nodes(self) -> Iterator[tuple[str, list[Line]]]:
        for file in _node_files(self.folder):
            lines = self._nodes.setdefault(file.stem, JsonLines(file, parse_line, strict=False))
            yield file.stem, list(lines.read())

    def _notes(self) -> Iterator[str]:
        for name, lines in self._nodes.items():
            if lines.num_damaged:
                yield f"nodes/{name}.jsonl: {counted(lines.num_damaged, 'line')} left out that cannot be read"

    def _state(self, summary: Line | None, events: Sequence[Line], nodes: Mapping[str, Sequence[Line]]) -> str:
        if summary is not None:
            return overview(self.folder, now_unix_s=time.time()).state
        last = [lines[-1].get("time_unix_s") or 0.0 for lines in (events, *nodes.values()) if lines]
        if not last:
            return "waiting"
        running, _ = is_running(self.folder, time.time() - max(last))
        return "running" if running else "interrupted"


def _node_files(folder: RunFolder) -> list[Path]:
    return sorted((folder.path / "nodes").glob("*.jsonl"))


def _mark(file: Path) -> str:
    try:
        status = file.stat()
    except FileNotFoundError:
        return ""
    return f"{status.st_size}:{status.st_mtime_ns}"


def _read_bill(folder: RunFolder, nodes: Mapping[str, Sequence[Line]]) -> tuple[Bill | None, str]:
    if not nodes:
        return None, "no node of this run wrote nodes/NODE.jsonl: energy was not measured"
    from stormo.energy.ledger import read_bill

    bill = read_bill(folder.path)
    if bill.total_j is None:
        return None, "; ".join(bill.reasons)
    return bill, ""
