"""Sets of moments as sorted, disjoint intervals of whole nanoseconds, so that sums are exact."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]  # begin and end, in nanoseconds
Moments = list[Interval]


def union(intervals: Iterable[Interval]) -> Moments:
    """All moments that are in one of them."""
    merged: Moments = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = merged[-1][0], end
        elif end > begin:
            merged.append((begin, end))
    return merged


def both(first: Moments, second: Moments) -> Moments:
    """The moments in both sets."""
    shared: Moments = []
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if end > begin:
            shared.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return shared


def without(first: Moments, second: Moments) -> Moments:
    """The moments of the first set that are not in the second."""
    if not first or not second:
        return first
    low, high = min(first[0][0], second[0][0]), max(first[-1][1], second[-1][1])
    edges = [low, *(edge for interval in second for edge in interval), high]
    return both(first, list(zip(edges[::2], edges[1::2], strict=True)))


def lengths(spans: Sequence[Interval], moments: Moments) -> list[int]:
    """How much of the set lies in each of these spans, which are sorted and disjoint."""
    found, i = [0] * len(spans), 0
    for number, (begin, end) in enumerate(spans):
        while i < len(moments) and moments[i][1] <= begin:
            i += 1
        j = i
        while j < len(moments) and moments[j][0] < end:
            found[number] += min(end, moments[j][1]) - max(begin, moments[j][0])
            j += 1
    return found
