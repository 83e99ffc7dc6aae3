"""The thread that writes a node's file: energy by phase every second, the state of the node every other second.

One worker of a node has a `NodeRecorder`, the others a `NoNodeRecorder`. Training continues whatever happens to the
file: joules are cumulative, so a late or missing line loses only detail.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stormo.energy.meter import Meter, Window
from stormo.energy.node_file import PHASES
from stormo.system.files import LineFile, make_folder
from stormo.telemetry.folder import to_json

_POWER_SPAN_S = 3.0
_SHORTEST_POWER_SPAN_S = 0.5
_CLOSING_S = 10.0  # a file system that hangs must not block the end of a run
_MOST_LINES = 10_000
# The gap between two lines grows to this share of the attempt so far: reading the files of a long run of many nodes
# would take minutes otherwise.
_LARGEST_GAP = 1 / 3600
_LONGEST_GAP_S = 60.0
_OFFSET_S = time.time() - time.monotonic()

_Position = tuple[int | None, Mapping[str, float | None] | None]
Mark = tuple[float, Mapping[str, float]]  # time and joules by source of a reading


def steady_unix_s() -> float:
    """Seconds since 1970 that never jump: the wall clock at the start of the process plus the monotonic time since."""
    return time.monotonic() + _OFFSET_S


class NodeRecorder:
    """Measures one node and writes its file once `attach` has named it."""

    def __init__(
        self,
        meter: Meter,
        sample_node: Callable[[], Mapping[str, Any]] | None,
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
        self._sample_node = sample_node
        self._node_id, self._host, self._num_nodes = node_id, host, num_nodes
        self._tick_s, self._sample_s = tick_s, sample_s
        self._clock = clock
        self.failure: str | None = None  # the first failure of the file or of a sample
        self.latest_sample: Mapping[str, Any] | None = None
        self._phase = "starting"
        # The step and the waiting so far, in one object: training replaces it without a lock.
        self._position: _Position = (None, None)
        self._logged_position: _Position = self._position
        self._lock = threading.Lock()  # guards phase, readings and lines; never held while a file is written
        self._file: LineFile | None = None
        self._lines: list[dict[str, Any]] = []
        self._logged_notes = tuple(meter.notes)
        self._base_j = meter.read()
        self._began_unix_s = clock()
        self._last: Mark = (self._began_unix_s, dict.fromkeys(self._base_j, 0.0))
        self._readings = deque([(self._began_unix_s, 0.0)], maxlen=64)
        self._next_sample_s = self._began_unix_s
        self._line_s = self._sample_line_s = 0.0  # when the last of each was written
        self._closed = False
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = (
            threading.Thread(target=self._run, name="stormo-node-recorder", daemon=True) if background else None
        )
        if self._thread is not None:
            self._thread.start()

    def attach(self, path: Path, resumed_at_step: int | None, step: int) -> None:
        """Set the file and the step of the start; earlier readings are written to it too."""
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
            "missing": [asdict(missing) for missing in self._meter.missing],
            "notes": list(self._logged_notes),
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
        """Begin a phase with a reading; synchronise the device before.

        `waiting_s`: seconds of this attempt's training so far spent waiting for "input" and "communication".
        """
        assert phase in PHASES, phase
        self.advance(step, waiting_s)
        with self._lock:
            self._measure()
            self._phase = phase
        self._hand_over()

    def advance(self, step: int, waiting_s: Mapping[str, float | None] | None = None) -> None:
        """Set the step of the lines between changes of phase; costs nothing."""
        self._position = (step, waiting_s)

    def rolled_back(self, to_step: int) -> None:
        """Record that everything after this step will be recomputed."""
        with self._lock:
            self._measure()
            self._add({"kind": "rollback", "time_unix_s": self._clock(), "to_step": to_step})
            self._position = (to_step, None)
        self._hand_over()

    def mark(self) -> Mark | None:
        """The last reading; None without sources."""
        return self._last if self._meter.sources else None

    def between(self, begin: Mark | None, end: Mark | None) -> Window | None:
        """The energy of this node between two readings, with its error bound."""
        if begin is None or end is None:
            return None
        (begin_s, begin_j), (end_s, end_j) = begin, end
        window = Window(self._meter.sources)
        window.close({key: end_j[key] - begin_j[key] for key in end_j}, end_s - begin_s, {})
        return window

    @property
    def power_w(self) -> float | None:
        """Watts of this node over the last seconds; None where it is not known."""
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
        """Take one reading and, when it is due, one sample."""
        now_s = self._clock()
        gap_s = min((now_s - self._began_unix_s) * _LARGEST_GAP, _LONGEST_GAP_S)
        with self._lock:
            self._measure(is_logged=now_s - self._line_s >= gap_s)
        if self._sample_node is not None and now_s >= self._next_sample_s:
            self._next_sample_s = now_s + self._sample_s
            try:
                self.latest_sample = self._sample_node()
            except Exception as error:  # a failing sensor must not end the energy readings
                self._fail(f"the state of the node cannot be sampled: {error}")
            else:
                if now_s - self._sample_line_s >= gap_s:
                    self._sample_line_s = now_s
                    with self._lock:
                        self._add({"kind": "sample", **self.latest_sample, "time_unix_s": now_s})
        self._write()

    def close(self) -> None:
        """Take the last reading, and close file, thread and meter; a second call does nothing."""
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

    def _measure(self, *, is_logged: bool = True) -> None:
        """Take a reading and, if `is_logged`, add a line with it; the lock must be held."""
        if self._closed:
            return
        try:
            reading = self._meter.read()
        except Exception as error:  # a failing counter must not end training; the next reading closes the gap
            self._fail(f"the energy cannot be read: {error}")
            return
        now_s = self._clock()
        joules = {key: reading[key] - self._base_j[key] for key in reading}
        self._last = (now_s, joules)
        self._readings.append((now_s, sum(joules.values())))
        if not is_logged:
            return
        self._line_s = now_s
        position = self._position
        step, waiting_s = position
        line: dict[str, Any] = {"kind": "energy", "time_unix_s": now_s, "step": step, "phase": self._phase}
        # A repeated figure would mean that nothing was waited since.
        line |= {"joules": joules, "waiting_s": None if position is self._logged_position else waiting_s}
        self._logged_position = position
        notes = self._meter.notes
        if notes != self._logged_notes:
            line["notes"] = [note for note in notes if note not in self._logged_notes]
            self._logged_notes = notes
        self._add(line)

    def _add(self, line: dict[str, Any]) -> None:
        if not self._closed:  # nothing comes after the end
            self._lines.append(line)
            # The file may never be attached (a node that does not see the run folder): keep the newest lines.
            del self._lines[_MOST_LINES // 10 : -_MOST_LINES]

    def _hand_over(self) -> None:
        """Write the lines, in the thread if there is one, so that training does not wait for the disk."""
        if self._thread is None:
            self._write()
        else:
            self._wake.set()

    def _write(self) -> None:
        """Append the waiting lines; those that cannot be written wait for the next time."""
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


class NoNodeRecorder(NodeRecorder):
    """For workers that write no file: it has no sources and keeps nothing."""

    def __init__(self) -> None:
        super().__init__(Meter([], machine="", background=False), None, 0, "", background=False)

    def attach(self, path: Path, resumed_at_step: int | None, step: int) -> None:
        """Do nothing."""

    def _add(self, line: dict[str, Any]) -> None:
        pass
