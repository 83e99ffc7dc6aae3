"""The host's generators are seeded, kept and put back together."""

from __future__ import annotations

import random

import numpy
import torch

from stormo.data.generators import generators_kept, host_states, seed_host, set_host_states


def _draw() -> list[float]:
    return [float(torch.rand(())), random.random(), float(numpy.random.rand()), float(numpy.random.randn())]


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
