"""The global sample order: a pure function of (seed, epoch, position), never of the number of workers.

An epoch is one permutation of the data set. A global batch is its next part, split into micro-batches and those into
the workers' shares. The shares of a micro-batch differ by at most one sample. Nothing is dropped or repeated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part, and on nothing else (no process, no platform)."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


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
class MicroBatch:
    """The positions of one forward and backward of one worker, and those of the global batch around it."""

    start: int
    stop: int
    step_start: int
    step_stop: int
    is_first: bool
    is_last: bool  # the optimizer steps after it

    @property
    def num_samples(self) -> int:
        """Samples of this micro-batch."""
        return self.stop - self.start

    @property
    def step_samples(self) -> int:
        """Samples of the global batch."""
        return self.step_stop - self.step_start

    @property
    def padded(self) -> tuple[int, int]:
        """Its positions; an empty one borrows the first of the global batch, with weight zero."""
        return (self.start, self.stop) if self.num_samples else (self.step_start, self.step_start + 1)


def split_step(start: int, stop: int, accumulate: int, worker: int, num_workers: int) -> list[MicroBatch]:
    """One worker's micro-batches of the global batch [start, stop).

    Those of all workers are together the micro-batch of one: synchronised batch norm then has the same statistics.
    """
    wholes = [part(start, stop, index, accumulate) for index in range(accumulate)]
    return [
        MicroBatch(*part(*whole, worker, num_workers), start, stop, index == 0, index == accumulate - 1)
        for index, whole in enumerate(wholes)
    ]


def micro_batches(
    num_samples: int, global_batch_size: int, accumulate: int, worker: int, num_workers: int, position: int = 0
) -> Iterator[MicroBatch]:
    """One worker's micro-batches from a position to the end of the epoch; a short last batch may leave some empty."""
    for start in range(position, num_samples, global_batch_size):
        yield from split_step(start, min(start + global_batch_size, num_samples), accumulate, worker, num_workers)
