"""The running time of a run: wall-clock time without the pauses between its attempts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_SHORTEST_PAUSE_S = 30.0  # a shorter one is setting up: nodes and the main worker do not write their first line at once


class Clock:
    """Maps a time of day to the seconds for which the run has been running until then."""

    def __init__(self, spans_unix_s: Sequence[tuple[float, float]]) -> None:
        self._begins = [begin for begin, _ in spans_unix_s]
        self._ends = [end for _, end in spans_unix_s]
        self._before_s = [0.0]
        for begin, end in spans_unix_s:
            self._before_s.append(self._before_s[-1] + end - begin)

    @property
    def total_s(self) -> float:
        """How long all attempts have been running together."""
        return self._before_s[-1]

    def running_s(self, time_unix_s: float) -> float:
        """The running time at a time of day; during a pause it stands still."""
        attempt = bisect_right(self._begins, time_unix_s) - 1
        if attempt < 0:
            return 0.0
        until = min(time_unix_s, self._ends[attempt])
        return self._before_s[attempt] + max(until - self._begins[attempt], 0.0)


def make_clock(events: Iterable[Mapping[str, Any]], nodes: Iterable[Sequence[Mapping[str, Any]]]) -> Clock:
    """The attempts of a run, from the times of everything it wrote."""
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
