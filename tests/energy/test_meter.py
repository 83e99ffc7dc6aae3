"""Counters that wrap, counters that are reset, power that is integrated, windows and their bounds."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stormo.energy import Meter, ReplayProbe, Source, own_meter
from stormo.energy.meter import WindowTooShortError, machine_id
from tests.energy.job import Clock, cpu, gpu, truth, write_trace
from tests.fake_nvml import Card, FakeNvml


class Scripted:
    """A probe whose figures a test sets."""

    notes = ("a note",)

    def __init__(self, *sources: Source) -> None:
        self.sources = sources
        self.raw: dict[str, float] = {source.id: 0.0 for source in sources}
        self.num_reads = 0
        self.num_closed = 0

    def read(self) -> Mapping[str, float]:
        self.num_reads += 1
        return dict(self.raw)

    def close(self) -> None:
        self.num_closed += 1


def _meter(*sources: Source) -> tuple[Meter, Scripted, Clock]:
    probe, clock = Scripted(*sources), Clock()
    return Meter([probe], clock, background=False), probe, clock


@settings(max_examples=30)
@given(steps=st.lists(st.tuples(st.integers(1, 10), st.integers(0, 99_999)), max_size=40))
def test_a_counter_that_wraps_adds_up(steps: list[tuple[int, int]]) -> None:
    source = replace(cpu("p"), wraps_at_j=100_000.0)
    probe, clock = Scripted(source), Clock()
    probe.raw["p"] = 99_990.0
    meter = Meter([probe], clock, background=False)
    drawn_j = 0
    for seconds, more_j in steps:  # less than once around, or nobody could tell
        clock.now_s += seconds
        drawn_j += more_j
        probe.raw["p"] = (99_990.0 + drawn_j) % 100_000.0
        assert meter.read() == {"p": float(drawn_j)}
    assert meter.notes == ("a note",)


def test_a_gap_in_which_a_wrap_could_go_unseen_is_said_with_its_arithmetic() -> None:
    meter, probe, clock = _meter(replace(cpu("p"), wraps_at_j=262_143.0))
    clock.now_s, probe.raw["p"] = 262.0, 10.0
    meter.read()
    assert meter.notes == ("a note",)
    clock.now_s, probe.raw["p"] = 1162.0, 20.0  # stopped for a quarter of an hour
    assert meter.read() == {"p": 20.0}
    assert meter.notes[1:] == (
        "package-0 was not read for 900 s and begins again every 262143 J: above 291 W a wrap-around went unseen and "
        "262143 J are missing",
    )


def test_a_counter_that_was_reset_continues_from_there() -> None:
    meter, probe, clock = _meter(gpu("g"))
    for raw, expected in ((500.0, 500.0), (30.0, 530.0), (40.0, 540.0)):
        clock.now_s += 1
        probe.raw["g"] = raw
        assert meter.read() == {"g": expected}
    assert meter.notes[1:] == ("H200 was reset: what it drew since the reading before that is not counted",)


def test_a_source_that_fails_for_a_while_loses_nothing() -> None:
    meter, probe, clock = _meter(gpu("g"), gpu("h"))
    probe.raw = {"h": 7.0}
    assert meter.read() == {"g": 0.0, "h": 7.0}
    assert meter.read() == {"g": 0.0, "h": 7.0}
    probe.raw = {"g": 100.0, "h": 9.0}
    clock.now_s += 1
    assert meter.read() == {"g": 100.0, "h": 9.0}
    assert meter.notes[1:] == ("H200 could not be read for a while: a reading after it closes the gap",)


def test_power_is_integrated_between_readings() -> None:
    meter, probe, clock = _meter(replace(gpu("g"), method="power"))
    for seconds, watts, expected in ((2.0, 100.0, 100.0), (0.5, 300.0, 200.0), (1.0, 300.0, 500.0)):
        clock.now_s += seconds
        probe.raw["g"] = watts
        assert meter.read() == pytest.approx({"g": expected})


def test_the_same_device_in_two_probes_is_refused() -> None:
    with pytest.raises(ValueError, match="would count twice"):
        Meter([Scripted(gpu("g")), Scripted(gpu("g"))])


@pytest.mark.parametrize(
    ("source", "period_s"),
    [
        (gpu("g"), None),
        (replace(gpu("g"), method="power"), 0.05),
        (replace(cpu("p"), wraps_at_j=262_143.0), 60.0),
        (replace(cpu("p"), wraps_at_j=65_536.0), pytest.approx(32.768)),
    ],
)
def test_it_looks_in_between_only_where_it_must(source: Source, period_s: Any) -> None:
    probe = Scripted(source)
    meter = Meter([probe])
    assert meter.period_s == period_s
    assert [thread.name for thread in threading.enumerate()].count("stormo-meter") == int(period_s is not None)
    if period_s == 0.05:
        deadline_s = time.monotonic() + 60
        while probe.num_reads < 4 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert probe.num_reads >= 4
    meter.close()
    meter.close()
    assert probe.num_closed == 1
    assert "stormo-meter" not in [thread.name for thread in threading.enumerate()]


def test_a_window_has_the_bound_of_both_its_ends() -> None:
    meter, probe, clock = _meter(gpu("g"))
    clock.now_s, probe.raw["g"] = 1.0, 50.0  # 50 W before it
    meter.read()
    with meter.window() as window:
        clock.now_s, probe.raw["g"] = 21.0, 2050.0  # 100 W within
    assert (window.joules, window.seconds) == (2000.0, 20.0)
    assert window.error_j == pytest.approx(50.0 * 0.1 + 100.0 * 0.1 + 2 * 0.001)
    assert not window.is_too_short
    assert window.arithmetic == "2000.000 J ± 15.002 J (0.8%) in 20.000 s"


@pytest.mark.parametrize(("seconds", "is_too_short"), [(3.9, True), (4.1, False)])
def test_a_window_too_short_for_its_counter_is_refused(seconds: float, is_too_short: bool) -> None:
    meter, probe, clock = _meter(replace(gpu("g"), resolution_j=1e-9))
    with meter.window() as window:
        clock.now_s, probe.raw["g"] = seconds, 100.0 * seconds
    assert window.is_too_short is is_too_short
    assert window.measured_j == pytest.approx(100.0 * seconds)
    if is_too_short:
        with pytest.raises(WindowTooShortError, match=r"2 × 0\.1 s / 0\.05 = 4 s; measure longer"):
            _ = window.joules


def test_a_window_begins_and_ends_when_the_device_has_finished() -> None:
    meter, probe, clock = _meter(gpu("g"))

    def finish() -> None:
        clock.now_s += 10.0
        probe.raw["g"] += 1000.0

    with meter.window(finish) as window:
        pass
    assert (window.joules, window.seconds) == (1000.0, 10.0)


def test_a_window_in_which_something_fails_is_measured_too() -> None:
    meter, probe, _ = _meter(gpu("g"))
    with contextlib.suppress(KeyError), meter.window() as window:
        probe.raw["g"] = 5.0
        raise KeyError
    assert window.measured_j == 5.0


def test_own_meter_replays_the_trace_of_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_trace(tmp_path / "trace-1.jsonl", [gpu("g")], 5)
    monkeypatch.setenv("STORMO_ENERGY_TRACE", str(tmp_path / "trace-{node_id}.jsonl"))
    meter, missing = own_meter([], 1)
    assert ([source.id for source in meter.sources], missing, meter.machine) == (["g"], [], "replay-1")
    assert meter.notes[0] == f"replayed from {tmp_path / 'trace-1.jsonl'}: nothing was measured"
    meter.close()


def test_own_meter_takes_the_gpus_of_the_job_and_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml([Card("GPU-a", tells={"energy_mj": 5000}), Card("GPU-b", tells={"energy_mj": 5000})])
    monkeypatch.delenv("STORMO_ENERGY_TRACE", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr("stormo.energy.probes.POWERCAP", Path("/nowhere"))
    meter, missing = own_meter(["b", "c"], 0)
    assert [source.id for source in meter.sources] == ["GPU-b"]
    assert [one.kind for one in missing] == ["gpu", "cpu"]
    assert missing[0].reason == "c: NVML shows no such GPU here"
    assert meter.missing == tuple(missing)
    assert meter.machine == machine_id() != ""
    meter.close()
    assert library.num_open == 0
    alone, missing = own_meter([], 0)  # a job without GPUs misses none
    assert [one.kind for one in missing] == ["cpu"]
    assert alone.read() == {}


def test_a_replayed_counter_equals_its_truth_at_any_moment(tmp_path: Path) -> None:
    clock = Clock(3.25)
    sources = [gpu("g"), cpu("p")]
    probe = ReplayProbe(write_trace(tmp_path / "trace", sources, 60), clock)
    meter = Meter([probe], clock, background=False)
    for now_s in (3.25, 4.0, 9.125, 9.5, 15.75, 25.0, 33.0, 41.9):
        clock.now_s = now_s
        meter.read()
    for source in sources:
        assert meter.read()[source.id] == pytest.approx(truth(source, 3.25, 41.9), abs=1e-9)
