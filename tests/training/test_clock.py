"""The peak memory of a run, with a fake allocator of a GPU; and which rank records a node, by which clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from stormo.distributed.world import World
from stormo.energy.node_recorder import NoNodeRecorder, steady_unix_s
from stormo.launch import alone
from stormo.training.clock import GpuPeak, TrainingClock, open_node_recorder
from tests.tiny_run import build

GPU = torch.device("cuda", 1)
Ranks = Callable[..., list[Any]]


class Allocator:
    """What torch.cuda tells of one: peaks that start anew, and segments with their pools."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.backend = "native"
        self.live, self.taken = 0, 0  # now
        self.peaks = [0, 0]
        self.segments: list[dict[str, Any]] = []
        for name, answer in {
            "max_memory_allocated": lambda device: self.peaks[0],
            "max_memory_reserved": lambda device: self.peaks[1],
            "reset_peak_memory_stats": lambda device: self.hold(self.live, self.taken, anew=True),
            "memory_snapshot": lambda: self.segments,
            "get_allocator_backend": lambda: self.backend,
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)

    def hold(self, live: int, taken: int, *, anew: bool = False) -> None:
        self.live, self.taken = live, taken
        before = [0, 0] if anew else self.peaks
        self.peaks = [max(before[0], live), max(before[1], taken)]

    def add(self, pool: tuple[int, int], total: int, live: int, device: int = 1) -> None:
        named = {"device": device, "segment_pool_id": pool, "total_size": total, "allocated_size": live}
        self.segments.append(named)


def captured(monkeypatch: pytest.MonkeyPatch, checked: int) -> Allocator:
    """10 of weights; a micro-batch of 70, of which 10 are gradients that stay; other memory is kept for later."""
    allocator = Allocator(monkeypatch)
    allocator.hold(checked, checked + 5)
    allocator.add((0, 0), 40, 10)
    allocator.add((0, 1), 50, 10)
    allocator.add((0, 1), 20, 0)
    allocator.add((0, 2), 1000, 0, device=0)
    allocator.hold(20, 110)
    return allocator


def test_what_a_captured_pass_holds_is_counted_beside_what_came_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = captured(monkeypatch, checked=90)
    peak = GpuPeak(GPU)
    assert (peak.used_bytes(), peak.reserved_bytes()) == (90, 110)
    allocator.hold(40, 130)  # a step: the optimizer's state of 20 is there
    allocator.hold(47, 137)  # a validation
    allocator.hold(40, 137)
    assert (peak.used_bytes(), peak.reserved_bytes()) == (47 + 60, 137)


def test_micro_batches_before_the_capture_may_have_held_more(monkeypatch: pytest.MonkeyPatch) -> None:
    captured(monkeypatch, checked=500)
    peak = GpuPeak(GPU)
    assert (peak.used_bytes(), peak.reserved_bytes()) == (500, 505)


def test_an_allocator_without_pools_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = captured(monkeypatch, checked=15)
    allocator.backend = "cudaMallocAsync"
    assert GpuPeak(GPU).used_bytes() == 20


def test_a_worker_reports_the_most_of_all_and_without_a_gpu_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = build(World(alone(), torch.device("cpu")), {"num_train": 8, "num_validation": 8}, global_batch_size=4)
    watch = TrainingClock(parts.world, parts.loader, parts.state.progress, parts.strategy, NoNodeRecorder())
    held, taken = watch.peak_memory_bytes()
    assert held > 2**20
    assert taken is None
    captured(monkeypatch, checked=90)
    watch._memory = GpuPeak(GPU)
    monkeypatch.setattr(parts.world, "max", lambda row: torch.maximum(row, torch.tensor([80, 600])))
    assert watch.peak_memory_bytes() == (90, 600)


def _opened(world: World, num_nodes: int) -> tuple[bool, float]:
    """Whether this rank records, and since when, on nodes whose clocks differ by an hour."""
    rank_info = world.rank_info
    local_size = world.size // num_nodes
    node_id, local_rank = divmod(world.rank, local_size)
    changes = {"node_id": node_id, "num_nodes": num_nodes, "local_rank": local_rank, "local_size": local_size}
    world.rank_info = replace(rank_info, **changes)
    try:
        with mock.patch("stormo.training.clock.steady_unix_s", side_effect=lambda: steady_unix_s() + 3600 * node_id):
            recorder = open_node_recorder(world, devices_per_worker=1, is_on=True)
            assert isinstance(open_node_recorder(world, devices_per_worker=1, is_on=False), NoNodeRecorder)
    finally:
        world.rank_info = rank_info
    recorder.close()
    return not isinstance(recorder, NoNodeRecorder), recorder._began_unix_s


def test_one_rank_of_each_node_records_by_the_clock_of_rank_0(run_ranks: Ranks) -> None:
    (first, main_unix_s), (second, _) = run_ranks(_opened, 2, 1)
    assert (first, second) == (True, False)
    (first, main_unix_s), (second, other_unix_s) = run_ranks(_opened, 2, 2)
    assert (first, second) == (True, True)
    assert other_unix_s == pytest.approx(main_unix_s, abs=600)
