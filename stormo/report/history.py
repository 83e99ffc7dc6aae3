"""Reads the files of a run for the page; a missing file is not an error."""

from __future__ import annotations

import hashlib
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stormo.energy.node_file import parse_line
from stormo.errors import StormoError, pluralize
from stormo.system.files import BadFileError, read_lines
from stormo.telemetry.events import current_events, read_events
from stormo.telemetry.folder import RunFolder, is_running, read_environment, read_summary
from stormo.telemetry.runs_folder import failure_of, flat_config, overview

if TYPE_CHECKING:
    from stormo.energy.ledger import Bill


_SHORTEST_PAUSE_S = 30.0  # nodes and rank 0 start within this time


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


Line = Mapping[str, Any]
Position = dict[str, float]


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
    notes: Sequence[str] = field(default_factory=tuple)  # on what could not be read

    def of(self, name: str) -> Sequence[Line]:
        """The current events of one kind."""
        return [event for _, event in self.positioned(name)]

    def positioned(self, name: str) -> Sequence[tuple[Position, Line]]:
        """The current events of one kind, each with its position on every axis."""
        return self._positioned.get(name, ())

    @cached_property
    def _positioned(self) -> dict[str, list[tuple[Position, Line]]]:
        found: dict[str, list[tuple[Position, Line]]] = {}
        for event in self.current:
            position = {
                "step": int(event.get("step") or 0),
                "epoch": round(epoch_position(event, self.started), 4),
                **self.time_position(event),
            }
            found.setdefault(str(event.get("event")), []).append((position, event))
        return found

    @cached_property
    def samples(self) -> Mapping[str, Sequence[tuple[Position, Line]]]:
        """The samples of each node with their running time, the only axis they have."""
        return {
            node: [(self.time_position(line), line) for line in lines if line.get("kind") == "sample"]
            for node, lines in self.nodes.items()
        }

    def time_position(self, line: Line) -> Position:
        """The running time at which a line was written."""
        return {"time_s": round(self.clock.running_s(float(line.get("time_unix_s") or 0.0)), 2)}

    @cached_property
    def started(self) -> Line:
        """The last `run_started`, or an empty one."""
        return next((event for event in reversed(self.events) if event.get("event") == "run_started"), {})

    @cached_property
    def _epochs_by_step(self) -> tuple[list[int], list[float]]:
        records = sorted(
            (int(event["step"]), epoch_position(event, self.started))
            for event in self.current
            if event.get("event") in ("step_done", "epoch_done") and event.get("step") is not None
        )
        return [step for step, _ in records], [epoch for _, epoch in records]

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
                step = int(event.get("resumed_at_step") or 0)  # a run that starts over begins at 0
            else:
                steps = (event.get(key) for key in ("rolled_back_to_step", "after_step", "step"))
                step = next((int(one) for one in steps if one is not None), step)
            found.append((step, event))
        return found


def epoch_position(event: Line, started: Line) -> float:
    """The position of an event in epochs: 1.5 is the middle of the second."""
    epoch = float(event.get("epoch") or 0)
    if event.get("event") == "epoch_done":
        return epoch
    steps = event.get("steps_in_epoch") or started.get("steps_per_epoch") or 1
    return epoch - 1 + float(event.get("step_in_epoch") or 0) / float(steps)


def files_version(folder: RunFolder) -> str:
    """Changes whenever a file of the run does."""
    files = [folder.events, folder.summary, folder.config, folder.environment, *_node_files(folder)]
    versions = ";".join(f"{file.name}:{_file_version(file)}" for file in files)
    return hashlib.sha256(versions.encode()).hexdigest()[:16]


def read_history(folder: RunFolder, label: str | None = None) -> History:
    """The run at this moment."""
    try:
        events = _read_events(folder.events)
        notes: list[str] = []
        nodes = {file.stem: _read_node(file, notes) for file in _node_files(folder)}
        summary = read_summary(folder)
        bill, no_bill_reason = _read_bill(folder, nodes)
        return History(
            label=label or folder.name,
            path=folder.path,
            state=_state(folder, summary, events, nodes),
            summary=summary or {},
            environment=read_environment(folder) or {},
            config=flat_config(folder.config),
            events=events,
            current=current_events(events),
            nodes=nodes,
            clock=make_clock(events, nodes.values()),
            bill=bill,
            no_bill_reason=no_bill_reason,
            notes=tuple(notes),
        )
    except BadFileError:
        raise
    except OSError as error:
        raise StormoError(f"{error.filename} cannot be read ({error.strerror}).") from None


def _read_events(path: Path) -> list[dict[str, Any]]:
    events = read_events(path)
    for number, event in enumerate(events, start=1):
        if not _has_time(event):
            raise BadFileError(path, f"line {number} has no time; the file was damaged after it was written")
    return events


def _read_node(path: Path, notes: list[str]) -> list[Line]:
    """The lines of a node's file; damaged ones are left out and noted."""
    found: list[Line] = []
    num_damaged = 0
    for line in read_lines(path):
        try:
            entry = parse_line(line)
        except ValueError:
            entry = {}
        if _has_time(entry):
            found.append(entry)
        elif line.endswith(b"\n") and line.strip():  # an unfinished last line is still being written
            num_damaged += 1
    if num_damaged:
        notes.append(f"nodes/{path.name}: {pluralize(num_damaged, 'line')} left out that cannot be read")
    return found


def _has_time(entry: Line) -> bool:
    return isinstance(entry.get("time_unix_s"), int | float)


def _state(folder: RunFolder, summary: Line | None, events: Sequence[Line], nodes: Mapping[str, Sequence[Line]]) -> str:
    if summary is not None:
        return overview(folder, now_unix_s=time.time()).state
    last = [lines[-1].get("time_unix_s") or 0.0 for lines in (events, *nodes.values()) if lines]
    if not last:
        return "waiting"
    if failure_of(events):
        return "failed"
    running, _ = is_running(folder, time.time() - max(last))
    return "running" if running else "interrupted"


def _node_files(folder: RunFolder) -> list[Path]:
    return sorted((folder.path / "nodes").glob("*.jsonl"))


def _file_version(file: Path) -> str:
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
