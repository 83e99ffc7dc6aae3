"""A recording gives back what was recorded, at the caller's clock."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from stormo.energy import Meter, ReplayProbe, record_trace
from stormo.errors import SettingError
from tests.energy.job import Clock, cpu, gpu

SOURCE = {"id": "g", "kind": "gpu", "name": "H200", "method": "counter", "resolution_j": 0.001, "interval_s": 0.1}


def _trace(path: Path, *samples: tuple[float, float], **source: object) -> Path:
    lines = [{"sources": [{**SOURCE, **source}]}, *({"time_s": time_s, "raw": {"g": raw}} for time_s, raw in samples)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_time_runs_from_the_opening_and_lines_are_straight(tmp_path: Path) -> None:
    clock = Clock(1000.0)
    probe = ReplayProbe(_trace(tmp_path / "t", (5.0, 10.0), (7.0, 30.0), (8.0, 30.0)), clock)
    for now_s, expected in ((1000.0, 10.0), (1001.0, 20.0), (1002.0, 30.0), (1002.5, 30.0)):
        clock.now_s = now_s
        assert probe.read() == {"g": expected}
    assert len(probe.notes) == 1
    clock.now_s = 2000.0
    assert probe.read() == {"g": 30.0}
    assert probe.notes[1] == f"{tmp_path / 't'} ends at 8 s: nothing is added after that"
    clock.now_s = 0.0
    assert probe.read() == {"g": 10.0}


def test_a_wrap_between_two_samples_is_straight_too(tmp_path: Path) -> None:
    clock = Clock()
    probe = ReplayProbe(_trace(tmp_path / "t", (0.0, 80.0), (4.0, 20.0), wraps_at_j=100.0), clock)
    found = []
    for now_s in range(5):
        clock.now_s = float(now_s)
        found.append(probe.read()["g"])
    assert found == [80.0, 90.0, 0.0, 10.0, 20.0]


class Drawing:
    """Two sources at steady power."""

    sources = (gpu("g"), replace(cpu("p"), wraps_at_j=50.0))
    notes = ()

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def read(self) -> Mapping[str, float]:
        if self._clock.now_s == 3.0:
            return {"g": 1.0}  # one fails for a moment
        return {"g": 1000.0 + 100.0 * self._clock.now_s, "p": 20.0 * self._clock.now_s % 50.0}

    def close(self) -> None:
        pass


def test_what_is_recorded_is_replayed(tmp_path: Path) -> None:
    clock = Clock()

    def sleep(seconds: float) -> None:
        clock.now_s += seconds

    path = tmp_path / "trace"
    num_samples = record_trace([Drawing(clock)], path, 8.0, interval_s=1.0, clock=clock, sleep=sleep)
    assert num_samples == 8
    replayed = ReplayProbe(path, clock)
    assert replayed.sources == Drawing.sources
    meter = Meter([replayed], clock, background=False)
    for _ in range(15):
        clock.now_s += 0.5
        found = meter.read()
    assert found == pytest.approx({"g": 750.0, "p": 150.0})


@pytest.mark.parametrize(
    "text", ["", "{}\n", "nonsense\n", '{"sources": [{"id": 1}]}\n', '{"sources": []}\n{"time_s": 1, "raw": {}}\n']
)
def test_a_file_that_is_no_trace_is_refused_in_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(SettingError, match=r"is not one .* leave STORMO_ENERGY_TRACE unset to measure"):
        ReplayProbe(path)


def test_samples_out_of_order_or_without_a_source_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="in the order of time"):
        ReplayProbe(_trace(tmp_path / "t", (2.0, 1.0), (1.0, 2.0)))
    with pytest.raises(SettingError, match="KeyError"):
        ReplayProbe(_trace(tmp_path / "t", (1.0, 1.0), (2.0, 2.0), id="h"))
    with pytest.raises(SettingError, match="No such file"):
        ReplayProbe(tmp_path / "none")
