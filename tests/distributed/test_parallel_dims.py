"""The workers along the axes of a mesh: who is in a line with whom, and what they sum."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.rank_pool import RankPool
from benchmarks.slice_devices import find_devices
from stormo.config.link import Link
from stormo.config.mesh import Mesh
from stormo.distributed.parallel_dims import _environment
from stormo.distributed.world import World

Ranks = Callable[..., list[Any]]


def _subgroups(world: World) -> dict[str, Any]:
    world.arrange(Mesh(pipeline=2, shard=2))
    grid = world.parallel_dims
    seen = {}
    for axes in (("pipeline",), ("shard",), ("replicate", "shard"), ("pipeline", "shard", "tensor"), ("tensor",)):
        line = grid.subgroup(*axes)
        total = line.sum(torch.tensor([float(world.rank)]))
        largest = line.max(torch.tensor([float(world.rank)]))
        seen["+".join(axes)] = (line.ranks, line.rank, int(total), int(largest))
    seen["data"] = (world.data.rank, world.data.size)
    seen["draws"] = world.random_stream
    return seen


def test_lines_are_the_workers_that_differ_along_these_axes_alone(run_ranks: Ranks) -> None:
    for rank, seen in enumerate(run_ranks(_subgroups, 4)):
        stage, shard = divmod(rank, 2)
        pipeline, shards = (shard, shard + 2), (2 * stage, 2 * stage + 1)
        assert seen["pipeline"] == (pipeline, stage, sum(pipeline), max(pipeline))
        assert seen["shard"] == seen["replicate+shard"] == (shards, shard, sum(shards), max(shards))
        assert seen["pipeline+shard+tensor"] == ((0, 1, 2, 3), rank, 6, 3)
        assert seen["tensor"] == ((rank,), 0, rank, rank)
        assert (seen["data"], seen["draws"]) == ((shard, 2), rank)


def _tensor(world: World) -> tuple[int, tuple[int, ...], float]:
    world.arrange(Mesh(replicate=2, tensor=2))
    copy = world.parallel_dims.subgroup("pipeline", "shard", "tensor")
    return world.random_stream, world.samplers, float(copy.sum(torch.tensor(1.0 + world.rank)))


def test_tensor_parallel_peers_share_a_random_stream(run_ranks: Ranks) -> None:
    assert run_ranks(_tensor, 4) == [(0, (0, 2), 3.0), (0, (0, 2), 3.0), (1, (0, 2), 7.0), (1, (0, 2), 7.0)]


def _limits(world: World) -> list[float]:
    world.arrange(Mesh(replicate=2, shard=2))
    subgroups = [world.parallel_dims.subgroup(*axes) for axes in (("replicate",), ("shard",))]
    return [_seconds(subgroup.group) for subgroup in subgroups]


def _seconds(group: Any) -> float:
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def test_subgroups_have_the_timeout_of_the_run(run_ranks: Ranks) -> None:
    assert run_ranks(_limits, 4) == [[60.0, 60.0]] * 4


def test_a_variable_is_set_for_a_moment_unless_the_user_has_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    with _environment("NCCL_ALGO", "Tree"):
        assert os.environ["NCCL_ALGO"] == "Tree"
    with _environment("NCCL_ALGO", None):
        assert "NCCL_ALGO" not in os.environ
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    with _environment("NCCL_ALGO", "Tree"):
        assert os.environ["NCCL_ALGO"] == "Ring"
    assert os.environ["NCCL_ALGO"] == "Ring"


def _small_messages(world: World) -> tuple[bool, float, float, bool]:
    world.link = Link(world_size=world.size, small_algo="tree")
    line = world.small_messages()
    total = float(line.sum(torch.ones(1, device=world.device)))
    assert line.group is not None
    options = line.group._get_backend(torch.device("cuda")).options
    return line.group is world.data.group, total, options._timeout.total_seconds(), "NCCL_ALGO" in os.environ


@pytest.mark.gpu
def test_small_messages_have_a_communicator_of_their_own_with_the_timeout_of_the_run() -> None:
    devices = find_devices()
    with RankPool(60.0, [devices.of_rank(rank) for rank in range(2)]) as pool:
        assert pool.run(_small_messages, 2) == [(False, 2.0, 60.0, False)] * 2
