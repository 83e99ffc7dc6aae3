"""Records a trace of energy readings, and replays it as a probe without any hardware.

A trace is JSON lines: {"sources": [...]} first, then {"time_s": t, "raw": {source id: counter in J or power in W}}.
Time runs from the opening of the probe or, with "origin_unix_s" in the first line, from that moment.
"""

from __future__ import annotations

import bisect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stormo.energy.probes import Probe, Source
from stormo.errors import SettingError

_RECORD_INTERVAL_S = 0.1


class ReplayProbe:
    """Interpolates the readings of a trace at the times of a clock."""

    def __init__(self, path: Path, clock: Callable[[], float] | None = None) -> None:
        try:
            header, *samples = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            self.sources = tuple(Source(**entry) for entry in header["sources"])
            self._times_s = [float(sample["time_s"]) for sample in samples]
            self._values = {
                one.id: _unwrapped(one, [sample["raw"][one.id] for sample in samples]) for one in self.sources
            }
            if len(samples) < 2 or self._times_s != sorted(self._times_s):
                raise ValueError("it needs two samples or more, in the order of time")
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise SettingError(
                f"the energy trace {path} was asked for",
                f"it is not one ({type(error).__name__}: {error})",
                "record one with stormo.energy.record_trace, or leave STORMO_ENERGY_TRACE unset to measure",
            ) from None
        self._path = path
        origin_unix_s = header.get("origin_unix_s")
        self._clock = clock or (time.monotonic if origin_unix_s is None else time.time)
        self._origin_s = self._clock() - self._times_s[0] if origin_unix_s is None else float(origin_unix_s)
        self._is_over = False

    @property
    def notes(self) -> tuple[str, ...]:
        """That nothing here was measured, and whether the recording was too short."""
        notes = [f"replayed from {self._path}: nothing was measured"]
        if self._is_over:
            notes.append(f"{self._path} ends at {self._times_s[-1]:g} s: nothing is added after that")
        return tuple(notes)

    def read(self) -> Mapping[str, float]:
        """The readings now; counters wrap around as they did."""
        now_s = self._clock() - self._origin_s
        self._is_over |= now_s > self._times_s[-1]
        after = min(max(bisect.bisect_right(self._times_s, now_s), 1), len(self._times_s) - 1)
        begin_s, end_s = self._times_s[after - 1 : after + 1]
        share = min(max((now_s - begin_s) / (end_s - begin_s), 0.0), 1.0) if end_s > begin_s else 1.0
        raw = {}
        for source in self.sources:
            before, behind = self._values[source.id][after - 1 : after + 1]
            value = before + share * (behind - before)
            raw[source.id] = value if source.wraps_at_j is None else value % source.wraps_at_j
        return raw

    def close(self) -> None:
        """Do nothing."""


def record_trace(
    probes: Sequence[Probe],
    path: Path,
    seconds: float,
    *,
    interval_s: float = _RECORD_INTERVAL_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Write what the probes give for so many seconds as a trace; return the number of samples."""
    sources = [asdict(source) for probe in probes for source in probe.sources]
    began_s, num_samples = clock(), 0
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"sources": sources}) + "\n")
        while True:
            now_s = clock() - began_s
            raw: dict[str, float] = {}
            for probe in probes:
                raw.update(probe.read())
            if len(raw) == len(sources):  # one that failed for a moment leaves a gap, which replaying bridges
                file.write(json.dumps({"time_s": now_s, "raw": raw}) + "\n")
                num_samples += 1
            if now_s >= seconds:
                return num_samples
            sleep(interval_s)


def _unwrapped(source: Source, raw: Sequence[Any]) -> list[float]:
    """The values of a counter without wrap-arounds."""
    values, added = [], 0.0
    for before, value in zip([raw[0], *raw] if raw else [], raw, strict=False):
        if source.wraps_at_j is not None and value < before:
            added += source.wraps_at_j
        values.append(float(value) + added)
    return values
