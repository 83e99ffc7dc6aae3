"""Strategies over NCCL, on one GPU: no step waits for the device, and a replayed step is that of Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.rank_pool import RankFailedError, RankPool
from benchmarks.slice_devices import find_devices
from stormo.distributed.world import World
from stormo.parallel.base import Strategy
from tests.parallel.test_ddp import assert_both_are_trained, no_batch_norm, trained_branches
from tests.parallel.test_exposed import SETUPS, Trunk, assert_waits_are_counted, waited
from tests.tiny_run import Parts, build
from tests.tiny_task import points
from tests.uncounted_task import Uncounted

pytestmark = pytest.mark.gpu
NUM_STEPS = 6


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    devices = find_devices()
    with RankPool(60.0, [devices.of_rank(rank) for rank in range(4)]) as made:
        yield made


def _built(world: World, flags: dict[str, Any], *, norm: bool = False) -> Parts:
    task_class = Trunk if flags.get("strategy") == "hybrid" else Uncounted
    parts = build(world, {"num_train": 200, "norm": norm}, task_class=task_class, global_batch_size=16, **flags)
    parts.strategy.warm_up(parts.loader)
    return parts


def _train(parts: Parts, num_steps: int, before: Callable[[int], None] = lambda number: None) -> None:
    for number, batch in enumerate(parts.loader.epoch(1)):
        if number == num_steps:
            break
        before(number)
        parts.strategy.micro_step(batch)
        parts.strategy.step(parts.plan.learning_rate)
        parts.state.progress.advance(parts.loader.samples(batch.span))
        parts.strategy.exchange_weights()
        if parts.strategy.noise_scale is not None:
            parts.strategy.noise_scale.read()  # as the records of steps do


def _trained_without_waiting(world: World, flags: dict[str, Any]) -> bool:
    def refuse_waits(number: int) -> None:
        if number == NUM_STEPS:  # the first ones find shapes, and the epoch's order is copied before them
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")

    parts = _built(world, flags, norm=bool(flags.get("sync_batch_norm")))
    try:
        _train(parts, 2 * NUM_STEPS, refuse_waits)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        parts.strategy.close()
    return all(bool(weight.isfinite().all()) for weight in parts.strategy.weights())


# Servers hold weights in host memory.
WITHOUT_WAITING: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: setup for name, setup in SETUPS.items() if name != "server"},
    "pipelines": (4, {"mesh": "pipeline=2,replicate=2"}),
    "pipelines of shards": (4, {"mesh": "pipeline=2,shard=2"}),
    "shards of tensor-parallel models": (4, {"mesh": "shard=2,tensor=2"}),
    "16-bit gradients": (4, {"strategy": "ddp", "compress": "fp16"}),
    "low-rank gradients": (4, {"strategy": "ddp", "compress": "powersgd", "compress_rank": 1}),
    "synchronised batch norm": (4, {"strategy": "ddp", "sync_batch_norm": True}),
    "synchronised batch norm of shards": (4, {"strategy": "fsdp", "sync_batch_norm": True}),
}


@pytest.mark.parametrize("name", WITHOUT_WAITING)
def test_no_step_waits_for_the_device(pool: RankPool, name: str) -> None:
    size, flags = WITHOUT_WAITING[name]
    assert pool.run(_trained_without_waiting, size, flags) == [True] * size


@pytest.mark.parametrize("name", SETUPS)
def test_waits_of_a_strategy_are_counted_over_nccl(pool: RankPool, name: str) -> None:
    size, flags = SETUPS[name]
    assert_waits_are_counted(pool.run(waited, size, flags))


def _priorities(world: World) -> tuple[bool, bool]:
    """Of the streams of small messages, and of gradients."""
    groups = (world.small_messages().group, world.data.group)
    backends = [group._get_backend(world.device) for group in groups if group is not None]
    first, second = (backend.options.is_high_priority_stream for backend in backends)
    return first, second


def test_small_messages_have_a_stream_of_high_priority(pool: RankPool) -> None:
    assert pool.run(_priorities, 4) == [(True, False)] * 4


def _trained(world: World, flags: dict[str, Any]) -> tuple[list[Any], list[float] | None, bool]:
    """Weights and scores, the noise scale, and whether the step was captured."""
    parts = _built(world, flags, norm=True)
    strategy: Strategy = parts.strategy
    inputs = points(32, seed=1).tensors[0].to(world.device)

    def scores() -> torch.Tensor:
        strategy.module.eval()
        with torch.no_grad(), strategy.autocast():
            made: torch.Tensor = strategy.module(inputs)
        strategy.module.train()
        return made.float()

    scores()  # gathers weights, which are old once a step was replayed
    for _ in range(2):
        _train(parts, 2 * NUM_STEPS + 1)  # the last batch is short, so it is not replayed
    values = [value.detach().cpu().numpy() for value in (*strategy.weights(), scores())]
    noise = None if strategy.noise_scale is None else strategy.noise_scale.collect_moments()
    is_captured = strategy._graph is not None
    strategy.close()
    return values, noise, is_captured


@pytest.mark.parametrize(("strategy", "precision"), [("ddp", "fp32"), ("fsdp", "fp32"), ("fsdp", "bf16")])
def test_a_replayed_step_is_that_of_python(pool: RankPool, strategy: str, precision: str) -> None:
    flags = {"strategy": strategy, "precision": precision}
    relative, absolute = (1e-5, 1e-6) if precision == "fp32" else (2e-2, 2e-2)
    replayed, eager = (pool.run(_trained, 4, {**flags, "graph": graph}) for graph in (True, False))
    for (values, noise, is_captured), (expected, expected_noise, is_eager_captured) in zip(
        replayed, eager, strict=True
    ):
        assert is_captured
        assert not is_eager_captured
        assert (noise is None) == (strategy == "fsdp")
        assert noise == (None if expected_noise is None else pytest.approx(expected_noise, rel=1e-4))
        for one, other in zip(values, expected, strict=True):
            assert one == pytest.approx(other, rel=relative, abs=absolute)


@pytest.mark.parametrize("through_host", [True, False])
def test_workers_that_use_different_parameters_exchange_gradients_and_statistics(
    pool: RankPool, through_host: bool
) -> None:
    assert_both_are_trained(pool.run(trained_branches, 4, through_host))


def _note_refusal(world: World, accumulate: int, folder: str) -> None:
    (Path(folder) / str(world.rank)).write_text(no_batch_norm(world, accumulate))
    raise RuntimeError("refused")  # closing the world would wait for what DDP has sent and the other worker has not


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_worker_that_comes_to_no_batch_norm_is_refused(pool: RankPool, accumulate: int, tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="refused"):
        pool.run(_note_refusal, 2, accumulate, str(tmp_path))
    said = "rank 0 is at the batch norm branches.1.1 and rank 1 at the end of its micro-batch"
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [said] * 2
