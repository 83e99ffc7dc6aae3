"""Sets of moments against sets of numbers."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from stormo.profiling.intervals import Interval, Moments, both, lengths, union, without

INTERVALS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 8)).map(lambda pair: (pair[0], sum(pair))), max_size=8
)


def _numbers(intervals: list[Interval]) -> set[int]:
    return {number for begin, end in intervals for number in range(begin, end)}


def _is_tidy(moments: Moments) -> bool:
    return all(begin < end for begin, end in moments) and all(
        end <= begin for (_, end), (begin, _) in itertools.pairwise(moments)
    )


@settings(deadline=None)
@given(first=INTERVALS, second=INTERVALS, spans=INTERVALS)
def test_sets_of_moments_are_those_of_their_numbers(
    first: list[Interval], second: list[Interval], spans: list[Interval]
) -> None:
    a, b, steps = union(first), union(second), union(spans)
    assert _numbers(a) == _numbers(first)
    assert _numbers(both(a, b)) == _numbers(first) & _numbers(second)
    assert _numbers(without(a, b)) == _numbers(first) - _numbers(second)
    assert all(map(_is_tidy, (a, both(a, b), without(a, b))))
    assert lengths(steps, a) == [len(_numbers([span]) & _numbers(a)) for span in steps]
