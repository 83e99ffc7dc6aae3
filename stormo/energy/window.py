"""The energy of one stretch of time, and how wrong it can be: a counter's figure is up to one interval old."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from stormo.energy.probe import Source
from stormo.errors import StormoError

MAX_ERROR = 0.05  # of the energy of a window


class WindowTooShortError(StormoError):
    """The stretch is too short for the interval of its counters."""


class Window:
    """Joules and seconds between two readings; filled when the stretch has ended."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = tuple(sources)
        self.seconds = 0.0
        self.joules_by_source: dict[str, float] = {}
        self.error_by_source_j: dict[str, float] = {}

    def close(self, joules: Mapping[str, float], seconds: float, power_before_w: Mapping[str, float]) -> None:
        """Take the readings; the power before the stretch bounds how old its first one may be."""
        self.seconds = seconds
        self.joules_by_source = dict(joules)
        for source in self._sources:
            within_w = joules[source.id] / seconds if seconds > 0 else 0.0
            both_w = within_w + power_before_w.get(source.id, within_w)
            self.error_by_source_j[source.id] = both_w * source.interval_s + 2 * source.resolution_j

    @property
    def error_j(self) -> float:
        """By how much the sum can be wrong: at each end, power × interval of every source."""
        return math.fsum(self.error_by_source_j.values())

    @property
    def is_too_short(self) -> bool:
        """Whether the bound is over 5 % of the energy."""
        return self.error_j > MAX_ERROR * self.measured_j

    @property
    def measured_j(self) -> float:
        """The joules of all sources together, however uncertain: for adding several windows up."""
        return math.fsum(self.joules_by_source.values())

    @property
    def joules(self) -> float:
        """The joules of all sources together; refused where the bound is over 5 % of them."""
        if self.is_too_short:
            raise WindowTooShortError(self.arithmetic)
        return self.measured_j

    @property
    def arithmetic(self) -> str:
        """The figure, its bound, and how long the stretch had to be."""
        share = self.error_j / self.measured_j if self.measured_j > 0 else math.inf
        longest_s = max((source.interval_s for source in self._sources), default=0.0)
        text = f"{self.measured_j:.3f} J ± {self.error_j:.3f} J ({share:.1%}) in {self.seconds:.3f} s"
        if not self.is_too_short:
            return text
        return (
            f"{text} is over {MAX_ERROR:.0%}: figures are up to {longest_s:g} s old at both ends, so that a steady "
            f"load needs 2 × {longest_s:g} s / {MAX_ERROR:g} = {2 * longest_s / MAX_ERROR:g} s; "
            "measure a longer stretch, or several together."
        )
