"""The benchmark of parameter servers: every side takes its steps, and each figure is the ratio of the right two."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import parameter_server
from benchmarks.paired_timing import Times

OPTIONS = argparse.Namespace(pairs=1, steps=3, width=8, batch_size=4, delay_ms=1.0, staleness=2)


def test_every_side_takes_its_turns(run_ranks: Callable[..., list[Any]]) -> None:
    for times in run_ranks(parameter_server.measure, 2, OPTIONS):
        ((*seconds,),) = times.wall_s
        assert len(seconds) == len(parameter_server.SIDES)
        assert min(seconds) > 0
        assert seconds[5] >= OPTIONS.steps * 1e-3 * OPTIONS.delay_ms  # one worker is held up in every step


def test_the_figures_are_of_the_sides_that_they_name(capsys: pytest.CaptureFixture[str]) -> None:
    parameter_server._show(Times(wall_s=[[1.0, 2.0, 3.0, 4.0, 1.0, 10.0, 9.0]] * 3, cpu_s=[]), 1)
    *lines, result = capsys.readouterr().out.splitlines()
    assert lines[4] == "1 server, stale, held up now and then: 1000.00 ms a step (mean)"
    for figure in ("one_server=2", "two_servers=3", "stale_now_and_then=0.25", "stale_always=0.9", "pairs=3"):
        assert f" {figure}" in result
