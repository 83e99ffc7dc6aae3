"""16-bit gradients of sharded layers, sent as they are: the sums are those of 32 bits."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.rank_pool import RankPool
from benchmarks.slice_devices import find_devices
from stormo.config.link import Link
from stormo.distributed.world import World
from stormo.parallel import fsdp
from stormo.parallel.half_gradients import HalfReduceScatter
from stormo.tasks.task import Task
from tests.config.test_plan import H200, configured, plan_of
from tests.sharded_models import Images
from tests.tiny_run import build, steps
from tests.tiny_task import Tiny

Ranks = Callable[..., list[Any]]


def _reduced(world: World, dtype: torch.dtype, op: Any) -> tuple[Tensor, Tensor]:
    """What this rank gets, and what it gives to each rank."""
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator().manual_seed(world.rank)
    rows = torch.randn(world.size, 1000, generator=generator).to(dtype).float()
    reduce_scatter = HalfReduceScatter(dtype)
    found = reduce_scatter.allocate((1000,), dtype=torch.float32, device=world.device)
    reduce_scatter(found, rows.flatten().to(world.device), group, op)
    return found.cpu(), rows


def _check_sums(found: list[tuple[Tensor, Tensor]], op: Any) -> None:
    for rank, (reduced, _) in enumerate(found):
        exact = torch.stack([rows[rank].double() for _, rows in found]).sum(dim=0)
        if op == dist.ReduceOp.AVG:
            exact /= len(found)
        torch.testing.assert_close(reduced.double(), exact, rtol=1e-6, atol=1e-6)  # 16 bits would be off by 1e-3


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG], ids=["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_sums_have_32_bits(run_ranks: Ranks, dtype: torch.dtype, op: Any) -> None:
    _check_sums(run_ranks(_reduced, 3, dtype, op), op)


def _trained(world: World, task_class: type[Task], half_gradients: bool, flags: dict[str, Any]) -> tuple[Any, int]:
    """Losses of a few steps, and how many reductions had half the bytes."""
    calls, call = [0], HalfReduceScatter.__call__

    def counted(*arguments: Any, **named: Any) -> None:
        calls[0] += 1
        call(*arguments, **named)

    world.link = Link(world_size=world.size, half_gradients=half_gradients)
    HalfReduceScatter.__call__ = counted  # type: ignore[method-assign]
    try:
        parts = build(world, {"dropout": 0.0}, task_class=task_class, precision="bf16", global_batch_size=16, **flags)
        return steps(parts, 3), calls[0]
    finally:
        HalfReduceScatter.__call__ = call  # type: ignore[method-assign]
        world.link = None


@pytest.mark.parametrize(
    ("task_class", "size", "flags"),
    [
        (Tiny, 2, {"strategy": "fsdp"}),
        (Images, 2, {"strategy": "fsdp"}),  # with batch norms, whose gradients have 32 bits
        (Tiny, 2, {"strategy": "fsdp", "accumulate": 2}),
        (Tiny, 4, {"mesh": "replicate=2,shard=2"}),
    ],
    ids=str,
)
def test_a_sharded_training_is_the_same(
    run_ranks: Ranks, task_class: type[Task], size: int, flags: dict[str, Any]
) -> None:
    for (losses, calls), (expected, none) in zip(
        run_ranks(_trained, size, task_class, True, flags),
        run_ranks(_trained, size, task_class, False, flags),
        strict=True,
    ):
        assert none == 0
        assert calls >= 3 * flags.get("accumulate", 1)
        assert losses == expected  # a sum of two, in any order


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "ddp"])
def test_gradients_of_32_bits_are_sent_whole(run_ranks: Ranks, strategy: str) -> None:
    assert [calls for _, calls in run_ranks(_trained, 2, Tiny, True, {"strategy": strategy})] == [0, 0]


@pytest.mark.parametrize(
    ("flags", "num_rows", "is_freed"),
    [
        ({}, 2**17, False),  # 2^17 x 2^10 values of 2 bytes are 256 MiB
        ({}, 2**17 + 1, True),
        ({"precision": "fp32"}, 2**17, True),
        ({"offload": True}, 8, True),
        ({"checkpoint_activations": True}, 8, True),
        ({"strategy": "zero2"}, 2**20, False),
    ],
    ids=str,
)
def test_few_gathered_weights_stay_until_backward(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], num_rows: int, is_freed: bool
) -> None:
    flags = {"strategy": "fsdp", "num_gpus": 2, "compile": False, **flags}
    told: dict[str, Any] = {}
    monkeypatch.setattr(fsdp, "shard", lambda *_, **options: told.update(options))
    model = nn.Sequential(nn.Linear(2**10, num_rows, bias=False, device="meta"))
    plan: Any = plan_of([H200] * 2, **flags)
    dims: Any = SimpleNamespace(mesh=plan.layout.mesh)
    task: Any = None
    fsdp.compose(model, [model], plan, configured(**flags), task, dims)
    assert told["frees"] is is_freed


@pytest.mark.gpu
def test_the_same_over_nccl() -> None:
    devices = find_devices()
    with RankPool(60.0, [devices.of_rank(rank) for rank in range(4)]) as pool:
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            _check_sums(pool.run(_reduced, 4, torch.bfloat16, op), op)
        found = pool.run(_trained, 2, Tiny, True, {"strategy": "fsdp"})
        expected = pool.run(_trained, 2, Tiny, False, {"strategy": "fsdp"})
        assert all(calls for _, calls in found)
        assert [losses for losses, _ in found] == [losses for losses, _ in expected]
