"""The pool of ranks that benchmarks use."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from benchmarks import rank_pool
from benchmarks.rank_pool import RankFailedError, RankPool
from stormo.distributed.world import World
from tests import forked


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankPool]:
    monkeypatch.setattr(rank_pool, "_PRELOAD", forked.PRELOAD)  # one server for all tests
    with RankPool() as made:
        yield made


def sum_of_ranks(world: World) -> tuple[int, float, int]:
    return world.rank, float(world.sum(torch.tensor(world.rank + 1.0))), os.getpid()


def variable(world: World) -> tuple[str, str]:
    return os.environ["BENCHMARK_RANK"], world.device.type


def fail_alone(world: World) -> None:
    if world.rank == 1:
        raise ValueError("this one cannot")
    world.barrier()


def test_ranks_work_together_and_stay(pool: RankPool) -> None:
    first, second = pool.run(sum_of_ranks, 2), pool.run(sum_of_ranks, 2)
    assert [(rank, total) for rank, total, _ in first] == [(0, 3.0), (1, 3.0)]
    assert first == second


def test_ranks_have_variables_of_their_own() -> None:
    with RankPool(environments=[{"BENCHMARK_RANK": "first"}, {"BENCHMARK_RANK": "second"}]) as pool:
        assert pool.run(variable, 2) == [("first", "cpu"), ("second", "cpu")]


def test_ranks_with_too_many_threads_are_renewed(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_pool, "MAX_THREADS", 0)
    first, second = pool.run(sum_of_ranks, 1), pool.run(sum_of_ranks, 1)
    assert first[0][:2] == second[0][:2]
    assert first[0][2] != second[0][2]


def test_a_failure_is_reported_while_others_wait_and_the_pool_continues(pool: RankPool) -> None:
    with pytest.raises(RankFailedError, match="ValueError: this one cannot"):
        pool.run(fail_alone, 2)
    assert len(pool.run(sum_of_ranks, 2)) == 2
