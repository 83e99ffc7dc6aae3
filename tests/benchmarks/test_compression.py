"""The benchmark of gradients that travel in fewer bytes: all sides take their steps; ratios are over plain ddp."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import compression
from benchmarks.paired_timing import Times, take_turns
from stormo.distributed.world import World

OPTIONS = argparse.Namespace(rank=1, width=8, batch_size=4, rate_mbit=100, steps=2)


def _turns(world: World) -> int:
    sides = [compression.side(world, name, OPTIONS) for name in compression.SIDES]
    return len(take_turns(world, sides, 1, OPTIONS.steps).wall_s[0])


def test_all_sides_step(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(_turns, 2) == [7, 7]


def test_the_ratios_are_over_plain_ddp(capsys: pytest.CaptureFixture[str]) -> None:
    compression._show(Times(wall_s=[[4.0, 2.0, 2.0, 1.0, 4.0, 3.0, 1.0]] * 2, cpu_s=[]), OPTIONS)
    assert capsys.readouterr().out.splitlines()[-1] == (
        "RESULT bf16=0.5 fp16=0.5 powersgd=0.25 script=1 script_bf16=0.75 torch_powersgd=0.25 pairs=2 rate_mbit=100"
    )
