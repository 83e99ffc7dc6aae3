"""The global random generators of the host (torch, Python, NumPy): seeded, kept and put back together.

A GPU's, which dropout draws from, is not touched. How they are written to a file is `checkpoint/random_state.py`.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

States = tuple[Any, Any, Any]

_MT19937_BYTES = 2500  # 624 words and a position
_without_number: bytes | None = None  # the memory of NumPy's generator when it held no number drawn ahead


def seed_host(seed: int) -> None:
    """Seed the generators."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would move the GPU's too
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def host_states() -> States:
    """Where the generators are, in memory."""
    return torch.get_rng_state(), random.getstate(), _numpy_state()


def _numpy_state() -> Any:
    # NumPy takes a hundred microseconds to tell its state, and none to show the memory that it is in. Beside it there
    # may be a normal number that was drawn ahead; where there was none, and nothing has moved since, there is none.
    global _without_number  # noqa: PLW0603
    generator = numpy.random.mtrand.get_bit_generator()
    if type(generator) is not numpy.random.MT19937:
        return numpy.random.get_state()
    memory = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    if memory == _without_number:
        words = numpy.frombuffer(memory, numpy.uint32)
        return "MT19937", words[:-1], int(words[-1]), 0, 0.0
    state: Any = numpy.random.get_state()
    _without_number = None if state[3] else memory
    return state


def set_host_states(states: States) -> None:
    """Go back to where they were."""
    global _without_number  # noqa: PLW0603
    _without_number = None
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])


def same_states(first: States, second: States) -> bool:
    """Whether nothing was drawn in between."""
    return (
        torch.equal(first[0], second[0])
        and first[1] == second[1]
        and first[2][2:] == second[2][2:]
        and numpy.array_equal(first[2][1], second[2][1])
    )


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put them back afterwards."""
    before = host_states()
    try:
        yield
    finally:
        set_host_states(before)
