"""The global sample order: a pure function of (seed, epoch, position), never of the number of workers.

An epoch is one permutation of the data set. A global batch is the next stretch of it, cut into the workers' shares
and those into passes; shares of one batch differ by at most one sample, and nothing is dropped or repeated.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part, and on nothing else (no process, no platform)."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def epoch_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """The permutation of an epoch: position -> sample, on the CPU; int32 where it fits, as each rank holds it whole."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
    return torch.randperm(num_samples, generator=generator, dtype=torch.int32 if num_samples < 2**31 else torch.int64)


def epoch_draws(num_samples: int, num_draws: int, seed: int, epoch: int) -> Tensor:
    """Random numbers in [0, 1) for each position of an epoch, [num_samples, num_draws] float32 on the CPU."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "draws", epoch))
    return torch.rand(num_samples, num_draws, generator=generator)


def part(start: int, stop: int, index: int, num_parts: int) -> tuple[int, int]:
    """The index-th of num_parts consecutive pieces of [start, stop), whose lengths differ by at most one."""
    length = stop - start
    return start + length * index // num_parts, start + length * (index + 1) // num_parts


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward and backward of one worker: the positions it takes, and its place in the global step."""

    start: int
    stop: int
    step_start: int  # positions of the whole global batch
    step_stop: int
    is_first: bool
    is_last: bool  # the optimizer steps after it

    @property
    def num_samples(self) -> int:
        """Samples of this pass."""
        return self.stop - self.start

    @property
    def step_samples(self) -> int:
        """Samples of the global batch."""
        return self.step_stop - self.step_start


def passes(
    num_samples: int, global_batch_size: int, accumulate: int, worker: int, num_workers: int, position: int = 0
) -> Iterator[Pass]:
    """One worker's passes from a position to the end of the epoch; a short last batch may leave some empty."""
    for step_start in range(position, num_samples, global_batch_size):
        step_stop = min(step_start + global_batch_size, num_samples)
        share = part(step_start, step_stop, worker, num_workers)
        for index in range(accumulate):
            start, stop = part(*share, index, accumulate)
            yield Pass(start, stop, step_start, step_stop, index == 0, index == accumulate - 1)
