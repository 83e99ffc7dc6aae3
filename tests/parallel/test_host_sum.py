"""Sums through host memory between workers on one GPU: right, in the order of ranks, also in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.rank_pool import RankPool
from benchmarks.slice_devices import find_devices
from stormo.distributed.world import World
from stormo.parallel import host_sum as module
from stormo.parallel.host_sum import open_host_sum

SIZES = (1, 33, 1281, 5000)


def _vectors(number: int, size: int, num_ranks: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(1000 * number + size)
    return [torch.randn(size, dtype=torch.float64, generator=made) for _ in range(num_ranks)]


def _summed(world: World, ranks: list[list[int]]) -> list[list[float]]:
    mine = next(group for group in ranks if world.rank in group)
    host_sum = open_host_sum(world, mine)
    assert host_sum is not None
    found = []
    for number in range(60):
        for size in SIZES:
            vector = _vectors(number, size, world.size)[world.rank].to(world.device)
            host_sum(vector)
            found.append(vector.cpu().tolist())
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [[[0, 1, 2, 3]], [[0, 2], [1, 3]]], ids=["all", "two groups"])
def test_sums_are_those_in_the_order_of_ranks(groups: list[list[int]]) -> None:
    devices = find_devices()
    with RankPool(60.0, [devices.of_rank(rank) for rank in range(4)]) as pool:
        found = pool.run(_summed, 4, groups)
    for rank, sums in enumerate(found):
        group = next(group for group in groups if rank in group)
        for place, got in enumerate(sums):
            vectors = _vectors(place // len(SIZES), SIZES[place % len(SIZES)], 4)
            expected = torch.zeros_like(vectors[0])
            for peer in group:
                expected += vectors[peer]
            assert got == expected.tolist()


def _replayed(world: World) -> list[float]:
    host_sum = open_host_sum(world, range(world.size))
    assert host_sum is not None
    vector, graph = torch.full((100,), 1.0, dtype=torch.float64, device=world.device), torch.cuda.CUDAGraph()
    host_sum(vector)  # compiles for this size
    vector.fill_(1.0)
    with torch.cuda.graph(graph):
        for _ in range(3):
            host_sum(vector)
    for _ in range(4):
        graph.replay()
    return vector.cpu().tolist()[:2]


@pytest.mark.gpu
def test_a_replayed_graph_sums_anew() -> None:
    devices = find_devices()
    with RankPool(60.0, [devices.of_rank(rank) for rank in range(4)]) as pool:
        found: list[Any] = pool.run(_replayed, 4)
    assert found == [[4.0**12] * 2] * 4


def _without_gpus(world: World, folder: str) -> bool:
    module._MEMORY = Path(folder)
    return open_host_sum(world, range(world.size)) is None


def test_where_no_gpu_maps_host_memory_all_workers_do_without_it(
    run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    assert run_ranks(_without_gpus, 2, str(tmp_path)) == [True, True]
    assert list(tmp_path.iterdir()) == []


def test_a_file_for_which_there_is_no_room_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_MEMORY", tmp_path)
    monkeypatch.setattr(module.os, "posix_fallocate", full)
    assert module._new_file(4096) == ""
    assert list(tmp_path.iterdir()) == []
