"""Who measures a node, and by which clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from stormo.distributed.world import World
from stormo.energy.node_recorder import NodeRecorder, NoNodeRecorder, steady_unix_s
from stormo.training.measuring import open_node_recorder

Ranks = Callable[..., list[Any]]


def _opened(world: World, num_nodes: int) -> tuple[bool, float]:
    """Whether this worker keeps a file, and the time that it began, on nodes whose clocks are an hour apart."""
    place = world.place
    local_size = world.size // num_nodes
    node_id, local_rank = divmod(world.rank, local_size)
    world.place = replace(place, node_id=node_id, num_nodes=num_nodes, local_rank=local_rank, local_size=local_size)
    try:
        with mock.patch(
            "stormo.training.measuring.steady_unix_s", side_effect=lambda: steady_unix_s() + 3600 * node_id
        ):
            keeper = open_node_recorder(world, devices_per_worker=1, is_on=True)
            assert isinstance(open_node_recorder(world, devices_per_worker=1, is_on=False), NoNodeRecorder)
    finally:
        world.place = place
    keeper.close()
    return isinstance(keeper, NodeRecorder), keeper._began_unix_s if isinstance(keeper, NodeRecorder) else 0.0


def test_one_worker_of_each_node_measures_by_the_clock_of_the_main_one(run_ranks: Ranks) -> None:
    (first, main_unix_s), (second, _) = run_ranks(_opened, 2, 1)
    assert (first, second) == (True, False)
    (first, main_unix_s), (second, other_unix_s) = run_ranks(_opened, 2, 2)
    assert (first, second) == (True, True)
    assert other_unix_s == pytest.approx(main_unix_s, abs=600)
