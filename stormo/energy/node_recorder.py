"""The thread that writes a node's file: energy by phase about once a second, the state of the node every other one.

One worker of a node has a `NodeRecorder`, the others a `NoNodeRecorder`. Training continues whatever happens to the
file: the joules are cumulative, so a line that comes late, or after a full disk, loses nothing but detail.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stormo.energy.meter import Meter, Window
from stormo.energy.nodefile import PHASES, LineFile
from stormo.system.files import make_folder
from stormo.telemetry.folder import to_json

_POWER_SPAN_S = 3.0
_SHORTEST_POWER_SPAN_S = 0.5
_CLOSING_S = 10.0  # a file system that hangs must not keep a finished run from ending
_MOST_LINES = 10_000
# The gap between two lines grows to this share of the attempt so far: reading the files of many nodes at the end of a
# run of weeks would take minutes otherwise.
_LARGEST_GAP = 1 / 3600
_LONGEST_GAP_S = 60.0
_OFFSET_S = time.time() - time.monotonic()

_Position = tuple[int | None, Mapping[str, float | None] | None]
Mark = tuple[float, Mapping[str, float]]  # time and joules by source of a reading


def steady_unix_s() -> float:
    """Seconds since 1970 that never jump: the wall clock at the start of the process, and on from there."""
    return time.monotonic() + _OFFSET_S


class NodeRecorder:
    """Measures one node and writes its file, once `attach` has said where that is."""

    def __init__(
        self,
        meter: Meter,
        vitals_sample: Callable[[], Mapping[str, Any]] | None,
        node_id: int | str,
        host: str,
        *,
        num_nodes: int = 1,
        tick_s: float = 1.0,
        sample_s: float = 2.0,
        clock: Callable[[], float] = steady_unix_s,
        background: bool = True,
    ) -> None:
        self._meter = meter
        self._vitals_sample = vitals_sample
        self._node_id, self._host, self._num_nodes = node_id, host, num_nodes
        self._tick_s, self._sample_s = tick_s, sample_s
        self._clock = clock
        self.failure: str | None = None  # the first thing that went wrong with the file or a sample
        self.latest_sample: Mapping[str, Any] | None = None
        self._phase = "starting"
        # The step and the waiting so far, in one object: training replaces it without a lock.
        self._position: _Position = (None, None)
        self._told_position: _Position = self._position
        self._lock = threading.Lock()  # guards phase, readings and lines; never held while a file is written
        self._file: LineFile | None = None
        self._lines: list[dict[str, Any]] = []
        self._told_notes = tuple(meter.notes)
        self._base_j = meter.read()
        self._began_unix_s = clock()
        self._last: Mark = (self._began_unix_s, dict.fromkeys(self._base_j, 0.0))
        self._readings = deque([(self._began_unix_s, 0.0)], maxlen=64)
        self._next_sample_s = self._began_unix_s
        self._line_s = self._sample_line_s = 0.0  # when the last of each was written
        self._closed = False
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="stormo-keeper", daemon=True) if background else None
        if self._thread is not None:
            self._thread.start()

    def attach(self, path: Path, resumed_at_step: int | None, step: int) -> None:
        """Say where the file is and where training begins; what was measured before goes into it."""
        start = {
            "kind": "start",
            "time_unix_s": self._began_unix_s,
            "node_id": self._node_id,
            "host": self._host,
            "machine": self._meter.machine,
            "num_nodes": self._num_nodes,
            "resumed_at_step": resumed_at_step,
            "step": step,
            "sources": [source.as_json() for source in self._meter.sources],
            "missing": [missing.as_json() for missing in self._meter.missing],
            "notes": list(self._told_notes),
        }
        try:
            make_folder(path.parent)
        except OSError as error:
            self._fail(f"{path.parent} cannot be made: {error.strerror or error}")
        with self._lock:
            for line in self._lines:
                if line["kind"] == "energy" and line["step"] is None:
                    line["step"] = step
            self._lines.insert(0, start)
            self._position = (step, None)
            self._file = LineFile(path)
        self._hand_over()

    def enter(self, phase: str, step: int, waiting_s: Mapping[str, float | None] | None = None) -> None:
        """End the phase before with a reading; call it when the device has done what it was given.

        `waiting_s`: seconds of this attempt's training so far that went into waiting, for "input" and "communication".
        """
        assert phase in PHASES, phase
        self.advance(step, waiting_s)
        with self._lock:
            self._measure()
            self._phase = phase
        self._hand_over()

    def advance(self, step: int, waiting_s: Mapping[str, float | None] | None = None) -> None:
        """Tell how far training is, for the lines between changes of phase; costs nothing."""
        self._position = (step, waiting_s)

    def rolled_back(self, to_step: int) -> None:
        """What was done after that step is lost and will be done again."""
        with self._lock:
            self._measure()
            self._add({"kind": "rollback", "time_unix_s": self._clock(), "to_step": to_step})
            self._position = (to_step, None)
        self._hand_over()

    def mark(self) -> Mark | None:
        """The last reading; None where nothing can be read."""
        return self._last if self._meter.sources else None

    def between(self, begin: Mark | None, end: Mark | None) -> Window | None:
        """What this node drew from one reading to another, with its error bound."""
        if begin is None or end is None:
            return None
        (begin_s, begin_j), (end_s, end_j) = begin, end
        window = Window(self._meter.sources)
        window.close({key: end_j[key] - begin_j[key] for key in end_j}, end_s - begin_s, {})
        return window

    @property
    def power_w(self) -> float | None:
        """Watts of this node over the last seconds; None where nothing can be read, or too little yet."""
        with self._lock:
            readings = list(self._readings)
        if not self._meter.sources:
            return None
        last_s, last_j = readings[-1]
        within = [one for one in readings[:-1] if last_s - one[0] <= _POWER_SPAN_S] or readings[-2:-1]
        if not within or last_s - within[0][0] < _SHORTEST_POWER_SPAN_S:
            return None
        return (last_j - within[0][1]) / (last_s - within[0][0])

    def tick(self) -> None:
        """One reading and, when it is time, one sample; what the thread does about once a second."""
        now_s = self._clock()
        gap_s = min((now_s - self._began_unix_s) * _LARGEST_GAP, _LONGEST_GAP_S)
        with self._lock:
            self._measure(is_told=now_s - self._line_s >= gap_s)
        if self._vitals_sample is not None and now_s >= self._next_sample_s:
            self._next_sample_s = now_s + self._sample_s
            try:
                self.latest_sample = self._vitals_sample()
            except Exception as error:  # a sensor that fails in a new way must not end the energy's account
                self._fail(f"the state of the node cannot be sampled: {error}")
            else:
                if now_s - self._sample_line_s >= gap_s:
                    self._sample_line_s = now_s
                    with self._lock:
                        self._add({"kind": "sample", **self.latest_sample, "time_unix_s": now_s})
        self._write()

    def close(self) -> None:
        """Take the last reading, end the file, the thread and the meter; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._measure()
            self._add({"kind": "end", "time_unix_s": self._clock()})
            self._closed = True
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_CLOSING_S)
            if self._thread.is_alive():
                self._fail(f"the last lines were not taken by the disk within {_CLOSING_S:g} s")
                return
        self._write()
        if self._file is not None:
            self._file.close()
        self._meter.close()

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._closing.is_set():
            if self._wake.wait(max(0.0, due_s - time.monotonic())):
                self._wake.clear()
                self._write()
            if time.monotonic() >= due_s and not self._closing.is_set():
                self.tick()
                due_s = max(due_s + self._tick_s, time.monotonic())

    def _measure(self, *, is_told: bool = True) -> None:
        """Take a reading and, where it is to be told, add a line with it; the lock is held."""
        if self._closed:
            return
        try:
            reading = self._meter.read()
        except Exception as error:  # training must not end because a counter did; the next reading closes the gap
            self._fail(f"the energy cannot be read: {error}")
            return
        now_s = self._clock()
        joules = {key: reading[key] - self._base_j[key] for key in reading}
        self._last = (now_s, joules)
        self._readings.append((now_s, sum(joules.values())))
        if not is_told:
            return
        self._line_s = now_s
        position = self._position
        step, waiting_s = position
        line: dict[str, Any] = {"kind": "energy", "time_unix_s": now_s, "step": step, "phase": self._phase}
        # A figure that was not told anew is left out, or it would look as if no waiting had come since.
        line |= {"joules": joules, "waiting_s": None if position is self._told_position else waiting_s}
        self._told_position = position
        notes = self._meter.notes
        if notes != self._told_notes:
            line["notes"] = [note for note in notes if note not in self._told_notes]
            self._told_notes = notes
        self._add(line)

    def _add(self, line: dict[str, Any]) -> None:
        if not self._closed:  # nothing comes after the end
            self._lines.append(line)
            # The file may never be there (a node that does not see the run folder) or stay full: the newest are kept.
            del self._lines[_MOST_LINES // 10 : -_MOST_LINES]

    def _hand_over(self) -> None:
        """Have the lines written: by the thread, so that training waits for no disk."""
        if self._thread is None:
            self._write()
        else:
            self._wake.set()

    def _write(self) -> None:
        """Append what is waiting; what cannot be written waits for the next time."""
        with self._lock:
            if self._file is None or not self._lines:
                return
            lines, self._lines = self._lines, []
        try:
            self._file.append([to_json(line) for line in lines])
        except OSError as error:
            self._fail(f"{self._file.path} cannot be written: {error.strerror or error}")
            with self._lock:
                self._lines = lines + self._lines

    def _fail(self, text: str) -> None:
        self.failure = self.failure or text


class NoNodeRecorder:
    """Stands in for a `NodeRecorder` in workers that keep no file; nothing is measured."""

    failure: str | None = None
    latest_sample: Mapping[str, Any] | None = None
    power_w: float | None = None

    def attach(self, path: Path, resumed_at_step: int | None, step: int) -> None:
        """Nothing is written."""

    def enter(self, phase: str, step: int, waiting_s: Mapping[str, float | None] | None = None) -> None:
        """Nothing is measured."""

    def advance(self, step: int, waiting_s: Mapping[str, float | None] | None = None) -> None:
        """Nothing is written."""

    def rolled_back(self, to_step: int) -> None:
        """Nothing is written."""

    def mark(self) -> Mark | None:
        """Nothing is read."""
        return None

    def between(self, begin: Mark | None, end: Mark | None) -> Window | None:
        """Nothing is read."""
        return None

    def close(self) -> None:
        """Nothing is open."""
