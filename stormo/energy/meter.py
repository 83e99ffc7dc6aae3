"""Joules by source since the meter was opened: unwraps counters, integrates power, bounds the error of windows."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from stormo.energy.probes import Missing, Probe, Source, open_nvidia, open_rapl
from stormo.energy.replay import ReplayProbe
from stormo.errors import StormoError

TRACE_VARIABLE = "STORMO_ENERGY_TRACE"
_POWER_PERIOD_S = 0.05  # power is sampled at 20 Hz: twice as often as NVML renews it
_LONGEST_PERIOD_S = 60.0
_POWER_INTERVALS = 5  # power is averaged over at least this many intervals of a source
# More than any CPU package or its memory draws; decides how often a counter that wraps must be read.
PLAUSIBLE_W = 1000.0


class _Tally:
    """The joules of one source, from its raw readings."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.joules = 0.0
        self.power_w: float | None = None  # recent
        self.doubts: dict[str, None] = {}  # in order, each once
        self.is_lost = False
        self._start_j = 0.0  # the counter at opening, less all wrap-arounds
        self._raw: float | None = None
        self._time_s = 0.0
        self._mark = (0.0, 0.0)  # time and joules from which the power is taken

    def take(self, raw: float | None, time_s: float) -> None:
        """Add a reading; after a failed one (None), the next closes the gap."""
        if raw is None:
            self._doubt_loss()
            return
        self.is_lost = False
        before, gap_s = self._raw, time_s - self._time_s
        self._raw, self._time_s = raw, time_s
        if before is None:
            self._start_j = raw
            self._mark = (time_s, 0.0)
            return
        if self.source.method == "power":
            self.joules += (before + raw) / 2 * gap_s
        else:
            if raw < before:
                self._start_j -= self._step_back(before, raw)
            self._doubt_wraps(gap_s)
            self.joules = raw - self._start_j
        mark_s, mark_j = self._mark
        if time_s - mark_s >= _POWER_INTERVALS * self.source.interval_s:
            self.power_w = (self.joules - mark_j) / (time_s - mark_s)
            self._mark = (time_s, self.joules)

    def _step_back(self, before: float, raw: float) -> float:
        """By how much the counter was set back."""
        if self.source.wraps_at_j is not None:
            return self.source.wraps_at_j
        # No counter of this kind wraps: the driver was loaded anew or the GPU was reset, and it counts from zero.
        self._doubt("was reset: what it drew since the reading before that is not counted")
        return before

    def _doubt_wraps(self, gap_s: float) -> None:
        wraps_at_j = self.source.wraps_at_j
        if wraps_at_j is not None and gap_s * PLAUSIBLE_W >= wraps_at_j:
            self._doubt(
                f"was not read for {gap_s:.0f} s and begins again every {wraps_at_j:.0f} J: "
                f"above {wraps_at_j / gap_s:.0f} W a wrap-around went unseen and {wraps_at_j:.0f} J are missing"
            )

    def _doubt_loss(self) -> None:
        if not self.is_lost:
            self._doubt("could not be read for a while: a reading after it closes the gap")
        self.is_lost = True

    def _doubt(self, text: str) -> None:
        self.doubts[f"{self.source.name} {text}"] = None


class Meter:
    """Reads probes; a thread reads sources that wrap around or give power only in between."""

    def __init__(
        self,
        probes: Sequence[Probe],
        clock: Callable[[], float] = time.monotonic,
        *,
        missing: Sequence[Missing] = (),
        machine: str | None = None,
        background: bool = True,
    ) -> None:
        self._probes = tuple(probes)
        self._clock = clock
        self._tallies: dict[str, _Tally] = {}
        for source in (source for probe in self._probes for source in probe.sources):
            if source.id in self._tallies:
                raise ValueError(f"two probes read {source.id}: its energy would count twice")
            self._tallies[source.id] = _Tally(source)
        self.sources = tuple(tally.source for tally in self._tallies.values())
        self.missing = tuple(missing)
        self.machine = machine if machine is not None else machine_id()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.read()
        period_s = self.period_s
        if background and period_s is not None:
            self._thread = threading.Thread(
                target=self._read_regularly, args=(period_s,), name="stormo-meter", daemon=True
            )
            self._thread.start()

    @property
    def period_s(self) -> float | None:
        """Seconds between readings of its thread; None: no source needs it."""
        needs = [_POWER_PERIOD_S for source in self.sources if source.method == "power"]
        # Twice within the shortest time in which a counter can wrap around.
        needs += [source.wraps_at_j / PLAUSIBLE_W / 2 for source in self.sources if source.wraps_at_j is not None]
        return min(*needs, _LONGEST_PERIOD_S) if needs else None

    def read(self) -> dict[str, float]:
        """Joules by source since the meter was opened."""
        with self._lock:
            for probe in self._probes:
                values, now_s = probe.read(), self._clock()
                for source in probe.sources:
                    self._tallies[source.id].take(values.get(source.id), now_s)
            return {source_id: tally.joules for source_id, tally in self._tallies.items()}

    def power_w(self) -> dict[str, float]:
        """Recent watts by source, without sources that were read for too short a time."""
        with self._lock:
            return {key: tally.power_w for key, tally in self._tallies.items() if tally.power_w is not None}

    @property
    def notes(self) -> tuple[str, ...]:
        """Whose energy is in the figures besides the job's, and what may be missing."""
        with self._lock:
            doubts = [doubt for tally in self._tallies.values() for doubt in tally.doubts]
        return (*(note for probe in self._probes for note in probe.notes), *doubts)

    @contextmanager
    def window(self, finish: Callable[[], None] = lambda: None) -> Iterator[Window]:
        """Measure the energy of a block; `finish` synchronises the device at both ends."""
        finish()
        power_before_w = self.power_w()
        begin_j, begin_s = self.read(), self._clock()
        window = Window(self.sources)
        try:
            yield window
        finally:
            finish()
            end_j, end_s = self.read(), self._clock()
            joules = {key: end_j[key] - begin_j[key] for key in end_j}
            window.close(joules, end_s - begin_s, power_before_w)

    def close(self) -> None:
        """End the thread and close the probes; a second call does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        for probe in self._probes:
            probe.close()

    def _read_regularly(self, period_s: float) -> None:
        while not self._closing.wait(period_s):
            self.read()


def machine_id() -> str:
    """The same in all containers on one machine, so that no device of it counts twice; empty where unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def own_meter(device_uuids: Sequence[str] | None, node_id: int | str) -> tuple[Meter, list[Missing]]:
    """The meter of this node: these GPUs (None: all that CUDA shows), all CPU packages and their memory.

    With STORMO_ENERGY_TRACE=FILE it replays that recording instead; `{node_id}` in the name is this node's.
    """
    trace = os.environ.get(TRACE_VARIABLE)
    if trace:
        replayed = ReplayProbe(Path(trace.replace("{node_id}", str(node_id))))
        # Nodes of one machine that replay their own recordings stand for machines of their own.
        return Meter([replayed], machine=f"replay-{node_id}"), []
    nvidia, gpus_missing = open_nvidia(device_uuids)
    rapl, cpus_missing = open_rapl()
    missing = [*gpus_missing, *cpus_missing]
    return Meter([probe for probe in (nvidia, rapl) if probe is not None], missing=missing), missing


MAX_ERROR = 0.05  # of the energy of a window


class WindowTooShortError(StormoError):
    """The window is too short for the interval of its counters."""


class Window:
    """Joules and seconds between two readings; filled when the block has ended."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = tuple(sources)
        self.seconds = 0.0
        self.joules_by_source: dict[str, float] = {}
        self.error_by_source_j: dict[str, float] = {}

    def close(self, joules: Mapping[str, float], seconds: float, power_before_w: Mapping[str, float]) -> None:
        """Set the readings; the power before the window bounds the error of the first one."""
        self.seconds = seconds
        self.joules_by_source = dict(joules)
        for source in self._sources:
            within_w = joules[source.id] / seconds if seconds > 0 else 0.0
            both_w = within_w + power_before_w.get(source.id, within_w)
            self.error_by_source_j[source.id] = both_w * source.interval_s + 2 * source.resolution_j

    @property
    def error_j(self) -> float:
        """The error bound of the sum: at each end, power × interval of every source."""
        return math.fsum(self.error_by_source_j.values())

    @property
    def is_too_short(self) -> bool:
        """Whether the bound is over 5 % of the energy."""
        return self.error_j > MAX_ERROR * self.measured_j

    @property
    def measured_j(self) -> float:
        """The joules of all sources, whatever their error: for sums over windows."""
        return math.fsum(self.joules_by_source.values())

    @property
    def joules(self) -> float:
        """The joules of all sources; refused where the error bound is over 5 %."""
        if self.is_too_short:
            raise WindowTooShortError(self.arithmetic)
        return self.measured_j

    @property
    def arithmetic(self) -> str:
        """The joules, their error bound, and how long the window had to be."""
        share = self.error_j / self.measured_j if self.measured_j > 0 else math.inf
        longest_s = max((source.interval_s for source in self._sources), default=0.0)
        text = f"{self.measured_j:.3f} J ± {self.error_j:.3f} J ({share:.1%}) in {self.seconds:.3f} s"
        if not self.is_too_short:
            return text
        return (
            f"{text} is over {MAX_ERROR:.0%}: figures are up to {longest_s:g} s old at both ends, so that a steady "
            f"load needs 2 × {longest_s:g} s / {MAX_ERROR:g} = {2 * longest_s / MAX_ERROR:g} s; "
            "measure longer, or several windows together."
        )
