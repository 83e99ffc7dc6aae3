"""The memory that a run is said to have taken, with a stand-in for the allocator of a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stormo.distributed.world import World
from stormo.energy.node_recorder import NoNodeRecorder
from stormo.launch import alone
from stormo.training.clock import GpuPeak, TrainingClock
from tests.tiny_run import build

GPU = torch.device("cuda", 1)


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
    """10 of weights; a pass of 70, of which 10 are the gradients that stay; other memory that is kept for later."""
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


def test_passes_before_the_capture_may_have_held_more(monkeypatch: pytest.MonkeyPatch) -> None:
    captured(monkeypatch, checked=500)
    peak = GpuPeak(GPU)
    assert (peak.used_bytes(), peak.reserved_bytes()) == (500, 505)


def test_an_allocator_without_pools_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = captured(monkeypatch, checked=15)
    allocator.backend = "cudaMallocAsync"
    assert GpuPeak(GPU).used_bytes() == 20


def test_a_worker_tells_the_most_of_all_and_without_a_gpu_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = build(World(alone(), torch.device("cpu")), {"num_train": 8, "num_validation": 8}, global_batch_size=4)
    watch = TrainingClock(parts.world, parts.loader, parts.state.progress, parts.strategy, NoNodeRecorder())
    held, taken = watch.peak_memory_bytes()
    assert held > 2**20
    assert taken is None
    captured(monkeypatch, checked=90)
    watch._memory = GpuPeak(GPU)
    monkeypatch.setattr(parts.world, "max", lambda row: torch.maximum(row, torch.tensor([80, 600])))
    assert watch.peak_memory_bytes() == (90, 600)
