"""The global random generators of torch, Python and NumPy: seeded, kept and put back together.

Only `seed_generators` touches those of a GPU, which dropout draws from. `checkpoint/state.py` writes all of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

States = tuple[Any, Any, Any]


def seed_generators(seed: int) -> None:
    """Seed all generators, those of a GPU too."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def seed_host(seed: int) -> None:
    """Seed the generators of the host."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def host_states() -> States:
    """The states of the generators."""
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state()


def set_host_states(states: States) -> None:
    """Restore these states."""
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])


def same_states(first: States, second: States) -> bool:
    """Whether nothing was drawn between the two."""
    return (
        torch.equal(first[0], second[0])
        and first[1] == second[1]
        and first[2][2:] == second[2][2:]
        and numpy.array_equal(first[2][1], second[2][1])
    )


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the states afterwards."""
    before = host_states()
    try:
        yield
    finally:
        set_host_states(before)
