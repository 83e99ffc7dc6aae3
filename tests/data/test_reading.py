"""Reading by number: as torch's loaders do, and with the same random numbers for a sample however it is read."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from stormo.data.generators import generators_kept, host_states, same_states, seed_host
from stormo.data.reading import SeededDataset
from stormo.distributed.world import World as Workers
from stormo.launch import alone
from tests.script.loops import world_of

KEYS = [(index, 1000 + 7 * index) for index in range(12)]


class AtOnce(Dataset[Tensor]):
    """Reads many samples at once, and no single one."""

    def __init__(self, draws: bool = False) -> None:
        self.draws = draws
        self.reads: list[int] = []

    def __len__(self) -> int:
        return 12

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        self.reads.append(len(indices))
        return [torch.tensor([float(index), float(torch.rand(())) if self.draws else 0.0]) for index in indices]


class Both(AtOnce):
    """Has both ways."""

    def __getitem__(self, index: int) -> Tensor:
        self.reads.append(1)
        return torch.tensor([float(index), float(torch.rand(())) if self.draws else 0.0])


class Drawing(Dataset[Any]):
    """Draws in one of many ways, some of which leave no trace on the generators, and some for a few samples only."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if self.how == "torch":
            return torch.rand(2)
        if self.how == "python":
            return {"x": random.random()}
        if self.how == "numpy":
            return numpy.random.rand(3)
        if self.how == "late":
            return index if index < 7 else float(torch.rand(()))
        if self.how == "without a trace":
            with generators_kept():
                return float(torch.rand(()))
        return torch.initial_seed()


@pytest.mark.parametrize("how", ["torch", "python", "numpy", "late", "without a trace", "the seed itself"])
def test_a_sample_draws_what_its_own_seed_gives_in_whatever_batch_it_is_read(how: str) -> None:
    data = Drawing(how)
    expected = []
    with generators_kept():
        for index, seed in KEYS:
            seed_host(seed)
            expected.append(data[index])
    for size in (1, 4, 12):
        seeded, before = SeededDataset(data), host_states()
        found = [sample for start in range(0, 12, size) for sample in seeded.__getitems__(KEYS[start : start + size])]
        assert repr(found) == repr(expected)
        assert same_states(before, host_states())


@pytest.mark.parametrize("make", [AtOnce, Both, lambda draws=False: Subset(AtOnce(draws), range(12))])
def test_many_samples_are_read_at_once_where_nothing_is_drawn_and_one_by_one_where_it_is(make: Any) -> None:
    still, drawing = make(), make(draws=True)
    inner = still.dataset if isinstance(still, Subset) else still
    seeded = SeededDataset(still)
    for start in (0, 4, 8):
        assert [int(x[0]) for x in seeded.__getitems__(KEYS[start : start + 4])] == list(range(start, start + 4))
    assert inner.reads == [1] * 5 + [4, 4]  # the first batch and its first sample by one, to see whether they draw
    together = torch.stack(SeededDataset(drawing).__getitems__(KEYS))
    by_one = torch.stack([SeededDataset(drawing)[key] for key in KEYS])
    assert torch.equal(together, by_one)


@pytest.mark.parametrize("sample", [torch.tensor([1.0, math.nan]), torch.eye(3).to_sparse()])
def test_samples_that_hold_nan_or_are_sparse_are_read_without_seeds_where_they_do_not_draw(sample: Tensor) -> None:
    class Same(Dataset[Any]):
        def __getitem__(self, index: int) -> Tensor:
            return sample.clone()

    seeded = SeededDataset(Same())
    assert len(seeded.__getitems__(KEYS[:4])) == 4
    assert seeded._needs_seeds is False


def test_a_script_reads_a_data_set_that_has_no_single_samples() -> None:
    world = world_of(Workers(alone(), torch.device("cpu")))
    for loader in (world.loader(DataLoader(AtOnce(), batch_size=5)), world.loader(AtOnce(), 5)):
        assert [x for batch in loader for x in batch[:, 0].tolist()] == [float(index) for index in range(12)]
