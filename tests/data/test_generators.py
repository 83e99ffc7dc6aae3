"""The host's generators are seeded, kept and put back together."""

from __future__ import annotations

import random

import numpy
import torch

from stormo.data.generators import generators_kept, host_states, same_states, seed_host, set_host_states


def _draw() -> list[float]:
    return [float(torch.rand(())), random.random(), float(numpy.random.rand()), float(numpy.random.randn())]


def test_a_number_that_a_state_set_by_hand_holds_ahead_is_seen() -> None:
    with generators_kept():
        seed_host(1)
        before = host_states()
        name, words, position, *_ = numpy.random.get_state()
        numpy.random.set_state((name, words, position, 1, 0.5))
        assert not same_states(before, host_states())
        set_host_states(host_states())
        assert numpy.random.randn() == 0.5


def test_one_number_that_was_drawn_is_seen() -> None:
    draws = (lambda: torch.rand(()), random.random, numpy.random.rand, numpy.random.randn, numpy.random.randn)
    with generators_kept():
        seed_host(1)
        for draw in draws:  # the last takes a number that was drawn ahead
            before = host_states()
            assert same_states(before, host_states())
            draw()
            assert not same_states(before, host_states())
            set_host_states(before)
            assert same_states(before, host_states())
            draw()


def test_a_seed_and_a_state_both_lead_back() -> None:
    with generators_kept():
        seed_host(2**40 + 3)
        _draw()
        states = host_states()
        first = _draw()
        seed_host(4)
        other = _draw()
        assert all(a != b for a, b in zip(first, other, strict=True))
        seed_host(4)
        assert _draw() == other
        set_host_states(states)
        assert _draw() == first


def test_they_are_put_back_after_an_error_too() -> None:
    before = host_states()
    expected = _draw()
    set_host_states(before)
    try:
        with generators_kept():
            seed_host(5)
            raise KeyError
    except KeyError:
        pass
    assert _draw() == expected
