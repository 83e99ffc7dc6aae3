"""Every strategy counts the time in which a worker waits for others."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stormo.distributed.world import World
from stormo.parallel.exposed import ExposedWait, HostCopy
from tests.tiny_run import build, steps
from tests.tiny_task import Tiny

Ranks = Callable[..., list[Any]]
SETUPS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"strategy": "ddp"}),
    "zero1": (2, {"strategy": "zero1"}),
    "zero2": (2, {"strategy": "zero2"}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "tensor": (2, {"strategy": "tensor"}),
    "hybrid": (3, {"strategy": "hybrid"}),
    "pipeline": (2, {"strategy": "pipeline"}),
    "server": (2, {"strategy": "server"}),
    "local": (2, {"strategy": "local", "average_every": "1"}),
    "replicas of shards": (4, {"mesh": "replicate=2,shard=2"}),
    "replicas of tensor-parallel models": (4, {"mesh": "replicate=2,tensor=2"}),
}

SHARDING = {  # collectives of `fully_shard`, by their names until torch 2.11 and since torch 2.13
    "gather": ("all_gather_into_tensor", "all_gather_single"),
    "reduce": ("reduce_scatter_tensor", "reduce_scatter_single"),
}


class Trunk(Tiny):
    """Layers before a classifier, which the hybrid splits."""

    def model(self) -> nn.Module:
        trunk = nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten())
        return nn.Sequential(trunk, nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 3))


def waited(world: World, flags: dict[str, Any]) -> tuple[float | None, float | None, float]:
    """The exposed wait before some steps and after them, and how long they took."""
    task_class = Trunk if flags.get("strategy") == "hybrid" else Tiny
    parts = build(world, {"num_train": 64, "norm": False}, task_class=task_class, global_batch_size=16, **flags)
    parts.strategy.warm_up(parts.loader)
    before_s, began_s = parts.strategy.exposed_s, time.perf_counter()
    steps(parts, 3)
    if world.device.type == "cuda":  # where a figure is that of an earlier read
        for _ in range(2):
            torch.cuda.synchronize()
            _ = parts.strategy.exposed_s
        torch.cuda.synchronize()
    return before_s, parts.strategy.exposed_s, time.perf_counter() - began_s


@pytest.mark.parametrize("name", SETUPS)
def test_waits_of_a_strategy_are_counted(run_ranks: Ranks, name: str) -> None:
    size, flags = SETUPS[name]
    assert_waits_are_counted(run_ranks(waited, size, flags))


def assert_waits_are_counted(found: list[tuple[float | None, float | None, float]]) -> None:
    """Of the ranks of `waited`."""
    for before_s, exposed_s, wall_s in found:
        assert before_s == 0.0  # what the warm-up has waited is not of the training
        assert exposed_s is not None
        assert 0.0 <= exposed_s <= wall_s
    # A server that has its own reply at once does not wait for the other worker's.
    assert any((exposed_s or 0.0) > 0.0 for _, exposed_s, _ in found)


def _uncounted(world: World, flags: dict[str, Any]) -> dict[str, list[bool]]:
    parts = build(world, {"num_train": 64, "norm": False}, global_batch_size=16, **flags)
    exposed, found = parts.strategy.exposed, dict[str, list[bool]]()

    def watched(kind: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            found.setdefault(kind, []).append(exposed._depth > 0)
            return collective(*arguments, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for kind, names in SHARDING.items():
            for name in names:
                if hasattr(dist, name):
                    patch.setattr(dist, name, watched(kind, getattr(dist, name)))
        steps(parts, 2)
    return found


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
def test_all_collectives_of_shards_on_cpus_count(run_ranks: Ranks, strategy: str) -> None:
    for found in run_ranks(_uncounted, 2, {"strategy": strategy}):
        assert set(found) == set(SHARDING)
        assert all(all(counted) for counted in found.values()), found


def test_a_wait_inside_another_one_counts_once() -> None:
    wait = ExposedWait(torch.device("cpu"))
    began_s = time.perf_counter()
    with wait.waiting(), wait.waiting():
        time.sleep(0.05)
    assert 0.05 <= wait.total_s <= time.perf_counter() - began_s
    wait.reset()
    assert wait.total_s == 0.0


def test_the_host_reads_what_has_arrived() -> None:
    values = torch.tensor([1.0, 2.0])
    copy = HostCopy(values, values.tolist())
    copy._copied = cast(Any, SimpleNamespace(record=lambda: None, query=lambda: has_arrived))
    has_arrived = False
    copy.begin(values * 10)
    assert copy.read() == [1.0, 2.0]
    assert copy.is_copying
    has_arrived = True
    assert copy.read() == [10.0, 20.0]
    assert not copy.is_copying


def test_on_a_cpu_it_is_there_at_once() -> None:
    copy = HostCopy(torch.zeros(1), [0.0])
    copy.begin(torch.ones(1))
    assert copy.read() == [1.0]
