"""What reading by number costs beside the data set itself: `python -m benchmarks.reading`.

Two numbers, each against what plain torch takes on the same machine: a sample of a data set that draws nothing, and the
first batch of a shuffled loader over two million samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from stormo.data.order import derive_seed
from stormo.data.streaming import Seeded
from stormo.distributed.world import World as Workers
from stormo.launch import alone
from stormo.launch.failure_reporter import NoReporter
from stormo.script.world import World

_NUM_BATCHES, _BATCH_SIZE, _NUM_TRIES = 300, 64, 5


class _Rows(Dataset[Tensor]):
    def __init__(self, num_samples: int) -> None:
        self._rows = torch.randn(_NUM_BATCHES * _BATCH_SIZE, 8)
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Tensor:
        return self._rows[index % len(self._rows)]


def _fastest_s(call: Callable[[], object]) -> float:
    taken = []
    for _ in range(_NUM_TRIES):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return min(taken)


def _a_sample() -> None:
    data = _Rows(_NUM_BATCHES * _BATCH_SIZE)
    seeded = Seeded(data)
    batches = [
        [(index, derive_seed(0, 1, index)) for index in range(start, start + _BATCH_SIZE)]
        for start in range(0, len(data), _BATCH_SIZE)
    ]
    plain_s = _fastest_s(lambda: [[data[index] for index, _ in batch] for batch in batches]) / len(data)
    ours_s = _fastest_s(lambda: [seeded.__getitems__(batch) for batch in batches]) / len(data)
    print(f"a sample: {plain_s * 1e6:.1f} µs, through stormo {ours_s * 1e6:.1f} µs ({ours_s / plain_s:.1f} times)")


def _first_batch(num_samples: int = 2_000_000) -> None:
    own = DataLoader(_Rows(num_samples), batch_size=_BATCH_SIZE, shuffle=True)
    ours = World._of(Workers(alone(), torch.device("cpu")), NoReporter()).loader(own)
    plain_s, ours_s = (_fastest_s(lambda loader=loader: next(iter(loader))) for loader in (own, ours))  # type: ignore[misc]
    print(f"the first batch of {num_samples}: {plain_s:.2f} s, stormo {ours_s:.2f} s ({ours_s / plain_s:.1f} times)")


if __name__ == "__main__":
    _a_sample()
    _first_batch()
