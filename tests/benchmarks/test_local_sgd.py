"""The benchmark of workers that step by themselves: both sides take their steps; the ratio is local's over ddp's."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from benchmarks import local_sgd
from benchmarks.paired_timing import Times, take_turns
from stormo.distributed.world import World

OPTIONS = argparse.Namespace(average_every=2, width=8, batch_size=4, rate_mbit=100, steps=4)


def _turns(world: World) -> tuple[int, list[int]]:
    sums, plain = list[int](), world.sum

    def spy(tensor: Tensor) -> Tensor:
        sums.append(tensor.numel())
        return plain(tensor)

    world.sum = spy  # type: ignore[method-assign]
    times = take_turns(world, [local_sgd.side(world, name, OPTIONS) for name in local_sgd.SIDES], 1, OPTIONS.steps)
    return len(times.wall_s), sums


def test_both_sides_step_and_weights_travel_every_so_many_steps(run_ranks: Callable[..., list[Any]]) -> None:
    for num_pairs, sums in run_ranks(_turns, 2):
        assert num_pairs == 1
        num_weights = 4 * (8 * 8 + 8)
        assert sums.count(num_weights) == 3 * 4 // 2  # three turns with those to warm up, of four steps


def test_the_ratio_is_that_of_local_over_ddp(capsys: pytest.CaptureFixture[str]) -> None:
    local_sgd._show(Times(wall_s=[[4.0, 1.0], [4.0, 2.0], [8.0, 2.0]], cpu_s=[]), OPTIONS)
    assert capsys.readouterr().out.splitlines()[-1] == "RESULT ratio=0.25 q25=0.25 q75=0.375 pairs=3 average_every=2"
