"""What a node's file holds, when, and that nothing about it reaches training."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from stormo.energy import Meter, Missing
from stormo.energy.node_recorder import NodeRecorder, NoNodeRecorder, steady_unix_s
from stormo.system.files import LineFile
from tests.energy.job import Clock, gpu
from tests.energy.test_meter import Scripted


class Desk:
    """A recorder on a clock and a counter of the test's own."""

    def __init__(self, sample: Callable[[], Mapping[str, Any]] | None = None, **more: Any) -> None:
        self.clock = Clock(100.0)
        self.probe = Scripted(gpu("g"))
        missing = [Missing(kind="cpu", reason="none here")]
        meter = Meter([self.probe], self.clock, missing=missing, machine="m", background=False)
        self.recorder = NodeRecorder(meter, sample, 3, "host", clock=self.clock, background=False, num_nodes=4, **more)

    @property
    def total_j(self) -> float:
        mark = self.recorder.mark()
        assert mark is not None
        return sum(mark[1].values())

    def after(self, seconds: float, joules: float) -> NodeRecorder:
        self.clock.now_s += seconds
        self.probe.raw["g"] += joules
        return self.recorder


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_file_of_a_node(tmp_path: Path) -> None:
    path = tmp_path / "run" / "nodes" / "3.jsonl"
    desk = Desk()
    desk.after(1.0, 10.0).tick()  # before anyone knows where the file is
    desk.after(1.0, 10.0).attach(path, 40, 40)
    desk.after(0.5, 5.0).enter("training", 40)
    desk.recorder.advance(41, {"input": 0.25, "communication": None})
    desk.after(1.0, 100.0).tick()
    desk.after(1.0, 100.0).tick()
    desk.after(1.0, 100.0).enter("validation", 42, {"input": 0.5, "communication": 0.125})
    desk.after(1.0, 50.0).rolled_back(40)
    desk.after(1.0, 20.0).close()
    start, *lines = _lines(path)
    assert start == {
        "kind": "start",
        "time_unix_s": 100.0,
        "node_id": 3,
        "host": "host",
        "machine": "m",
        "num_nodes": 4,
        "resumed_at_step": 40,
        "step": 40,
        "sources": [
            {
                "id": "g",
                "kind": "gpu",
                "name": "H200",
                "method": "counter",
                "resolution_j": 0.001,
                "interval_s": 0.1,
            }
        ],
        "missing": [{"kind": "cpu", "reason": "none here"}],
        "notes": ["a note"],
    }
    energy = [
        (line["time_unix_s"], line["step"], line["phase"], line["joules"]["g"], line["waiting_s"])
        for line in lines
        if line["kind"] == "energy"
    ]
    assert energy == [
        (101.0, 40, "starting", 10.0, None),
        (102.5, 40, "starting", 25.0, None),
        (103.5, 41, "training", 125.0, {"input": 0.25, "communication": None}),
        (104.5, 41, "training", 225.0, None),  # no new figure
        (105.5, 42, "training", 325.0, {"input": 0.5, "communication": 0.125}),
        (106.5, 42, "validation", 375.0, None),
        (107.5, 40, "validation", 395.0, None),
    ]
    others = [line for line in lines if line["kind"] != "energy"]
    assert others == [
        {"kind": "rollback", "time_unix_s": 106.5, "to_step": 40},
        {"kind": "end", "time_unix_s": 107.5},
    ]
    assert desk.recorder.failure is None


def test_nothing_comes_after_the_end_and_a_second_attempt_is_appended(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    for _ in range(2):
        desk = Desk()
        desk.recorder.attach(path, None, 0)
        desk.recorder.close()
        desk.recorder.close()
        desk.recorder.tick()
        desk.recorder.enter("idle", 1)
        desk.recorder.rolled_back(0)
        assert desk.probe.num_closed == 1
    assert [line["kind"] for line in _lines(path)] == ["start", "energy", "end"] * 2


def test_a_line_cut_by_a_kill_is_taken_away_first(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    path.write_text('{"kind": "end"}\n{"kind": "ener')
    desk = Desk()
    desk.recorder.attach(path, None, 0)
    desk.recorder.close()
    assert [line["kind"] for line in _lines(path)] == ["end", "start", "energy", "end"]


def test_without_a_file_nothing_is_written_and_the_figures_are_there(tmp_path: Path) -> None:
    desk = Desk()
    assert (desk.total_j, desk.recorder.power_w) == (0.0, None)
    desk.after(1.0, 80.0).tick()
    assert (desk.total_j, desk.recorder.power_w) == (80.0, 80.0)
    desk.after(0.1, 100.0).enter("training", 0)
    assert desk.recorder.power_w == pytest.approx(180.0 / 1.1)
    for _ in range(5):
        desk.after(1.0, 300.0).tick()
    assert desk.recorder.power_w == 300.0  # of the last seconds alone
    desk.recorder.close()
    assert desk.total_j == 1680.0
    assert list(tmp_path.iterdir()) == []


def test_a_window_between_readings_tells_how_wrong_it_can_be() -> None:
    desk = Desk()
    desk.after(1.0, 100.0).tick()
    mark = desk.recorder.mark()
    desk.after(1.0, 300.0).tick()
    short = desk.recorder.between(mark, desk.recorder.mark())
    assert short is not None
    assert (short.measured_j, short.error_j, short.is_too_short) == (300.0, pytest.approx(60.002), True)
    desk.after(9.0, 2700.0).tick()
    longer = desk.recorder.between(mark, desk.recorder.mark())
    assert longer is not None
    assert (longer.measured_j, longer.error_j, longer.is_too_short) == (3000.0, pytest.approx(60.002), False)


def test_a_long_attempt_writes_fewer_lines_and_measures_as_often(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    desk = Desk(lambda: {"load_1": desk.clock.now_s})
    desk.recorder.attach(path, None, 0)
    desk.after(1.0, 10.0).enter("training", 0)
    desk.clock.now_s += 5 * 3600
    desk.recorder.tick()
    for _ in range(100):
        desk.after(1.0, 10.0).tick()
    assert desk.recorder.power_w == 10.0
    assert desk.total_j == 1010.0
    assert desk.recorder.latest_sample == {"load_1": desk.clock.now_s}
    desk.recorder.enter("validation", 9)  # a change of phase is always logged
    lines = _lines(path)
    assert sum(line["kind"] == "energy" for line in lines) == 2 + 100 // 6 + 1
    assert sum(line["kind"] == "sample" for line in lines) == 1 + 100 // 6
    assert lines[-1]["joules"] == {"g": 1010.0}
    desk.recorder.close()


def test_a_file_that_never_comes_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stormo.energy.node_recorder._MOST_LINES", 30)
    desk = Desk(lambda: {"load_1": 1.0})
    for _ in range(100):
        desk.after(1.0, 10.0).tick()
    lines = desk.recorder._lines
    assert len(lines) == 33
    assert (lines[0]["time_unix_s"], lines[-1]["time_unix_s"]) == (101.0, 200.0)


def test_where_nothing_can_be_read_the_figures_are_none() -> None:
    recorder = NodeRecorder(Meter([], background=False), None, 0, "host", background=False)
    recorder.tick()
    assert (recorder.mark(), recorder.between(None, None), recorder.power_w) == (None, None, None)
    recorder.close()


def test_samples_come_every_other_second_and_a_bad_one_ends_nothing(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    samples = iter([{"load_1": 0.5, "odd": float("nan")}, RuntimeError("no sensor"), {"load_1": 1.5, "odd": b"?"}])

    def sample() -> dict[str, Any]:
        found = next(samples)
        if isinstance(found, Exception):
            raise found
        return found

    desk = Desk(sample)
    desk.recorder.attach(path, None, 0)
    for _ in range(5):
        desk.recorder.tick()
        desk.after(1.0, 1.0)
    assert desk.recorder.latest_sample == {"load_1": 1.5, "odd": b"?"}
    desk.recorder.close()
    found = [line for line in _lines(path) if line["kind"] == "sample"]
    assert [line["load_1"] for line in found] == [0.5, 1.5]
    assert found[0]["odd"] is None
    assert [line["time_unix_s"] for line in found] == [100.0, 104.0]  # by the clock of the other lines
    assert desk.recorder.failure == "the state of the node cannot be sampled: no sensor"


def test_a_full_disk_delays_lines_and_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "0.jsonl"
    desk = Desk()
    desk.recorder.attach(path, None, 0)
    is_full = True
    opened = LineFile._open

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: memoryview) -> int:
            if len(data) < 40 and is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return int(self.file.write(data[: len(data) - 30] if is_full else data))

        def close(self) -> None:
            self.file.close()

    monkeypatch.setattr(LineFile, "_open", lambda self: Full(opened(self)))
    desk.recorder._file.close()  # type: ignore[union-attr]
    desk.after(1.0, 10.0).enter("training", 1)
    desk.after(1.0, 10.0).enter("validation", 2)
    assert desk.recorder.failure == f"{path} cannot be written: No space left on device"
    assert desk.total_j == 20.0
    is_full = False
    desk.after(1.0, 10.0).enter("idle", 2)
    desk.recorder.close()
    lines = _lines(path)
    assert [line["kind"] for line in lines] == ["start", *["energy"] * 4, "end"]
    assert [line["phase"] for line in lines[1:-1]] == ["starting", "training", "validation", "idle"]


def test_a_folder_that_vanishes_or_cannot_be_made_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    desk = Desk()
    desk.recorder.attach(tmp_path / "file" / "nodes" / "0.jsonl", None, 0)
    desk.after(1.0, 5.0).enter("training", 0)
    desk.recorder.close()
    assert desk.recorder.failure is not None
    assert desk.recorder.failure.startswith(f"{tmp_path}/file/nodes cannot be made: ")
    assert desk.total_j == 5.0


def test_a_counter_that_fails_in_a_new_way_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    monkeypatch.setattr(desk.probe, "read", lambda: 1 / 0)
    desk.recorder.enter("training", 0)
    assert desk.recorder.failure == "the energy cannot be read: division by zero"
    monkeypatch.undo()
    desk.after(1.0, 7.0).close()
    assert desk.total_j == 7.0


def test_a_doubt_that_comes_up_is_written_with_the_next_line(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    desk = Desk()
    desk.recorder.attach(path, None, 0)
    desk.after(1.0, 9.0).tick()
    desk.after(1.0, -5.0).tick()
    desk.recorder.close()
    assert [line.get("notes") for line in _lines(path)] == [
        ["a note"],
        None,
        ["H200 was reset: what it drew since the reading before that is not counted"],
        None,
        None,
    ]


def test_the_thread_writes_during_training_and_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / "nodes" / "0.jsonl"
    meter = Meter([Scripted(gpu("g"))])
    recorder = NodeRecorder(meter, lambda: {"load_1": 1.0}, 0, "host", tick_s=0.01, sample_s=0.01)
    recorder.attach(path, None, 0)
    recorder.enter("training", 0)
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s and not (path.is_file() and path.read_text().count('"sample"') > 2):
        time.sleep(0.01)
    recorder.close()
    lines = _lines(path)
    assert lines[0]["kind"] == "start"
    assert lines[-1]["kind"] == "end"
    assert sum(line["kind"] == "sample" for line in lines) > 2
    assert "training" in [line["phase"] for line in lines if line["kind"] == "energy"]
    times_s = [line["time_unix_s"] for line in lines if line["kind"] != "sample"]
    assert times_s == sorted(times_s)
    assert abs(times_s[0] - steady_unix_s()) < 60
    assert "stormo-recorder" not in [thread.name for thread in threading.enumerate()]


def test_training_never_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_writing, may_go_on = threading.Event(), threading.Event()

    def hang(self: LineFile, lines: object) -> None:
        is_writing.set()
        assert may_go_on.wait(30)

    monkeypatch.setattr(LineFile, "append", hang)
    recorder = NodeRecorder(Meter([Scripted(gpu("g"))]), None, 0, "host", tick_s=0.01)
    recorder.attach(tmp_path / "0.jsonl", None, 0)
    assert is_writing.wait(30)
    for phase in ("training", "validation", "checkpoint", "training"):  # would never return
        recorder.enter(phase, 1)
    recorder.rolled_back(0)
    assert recorder.power_w in (None, 0.0)  # by how long that took
    may_go_on.set()
    recorder.close()


def test_a_recorder_without_a_file_measures_nothing_and_writes_nothing(tmp_path: Path) -> None:
    none = NoNodeRecorder()
    none.attach(tmp_path / "0.jsonl", None, 0)
    none.enter("training", 0)
    none.advance(1)
    none.rolled_back(0)
    none.close()
    assert (none.mark(), none.between(None, None), none.power_w, none.latest_sample, none.failure) == (None,) * 5
    assert (list(tmp_path.iterdir()), none._lines) == ([], [])
