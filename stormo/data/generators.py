"""The global random generators of the host (torch, Python, NumPy): seeded, kept and put back together.

A GPU's, which dropout draws from, is not touched. How they are written to a file is `checkpoint/state.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

States = tuple[Any, Any, Any]


def seed_host(seed: int) -> None:
    """Seed the generators."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would move the GPU's too
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def host_states() -> States:
    """Where the generators are, in memory."""
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state()


def set_host_states(states: States) -> None:
    """Go back to where they were."""
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
