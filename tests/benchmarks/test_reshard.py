"""The comparison of meshes that take up each other's checkpoints, of two meshes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import reshard
from stormo.checkpoint import Snapshot
from stormo.parallel.base import Strategy
from stormo.parallel.fsdp import Sharded

Ranks = Callable[..., list[Any]]


def snapshot(values: float, **optimizer: torch.Tensor) -> Snapshot:
    return Snapshot(model={"w": torch.full((2,), values)}, optimizer=optimizer, ranks={}, state={})


def test_any_bit_name_type_or_shape_that_differs_is_named() -> None:
    good = snapshot(1.0, m=torch.zeros(2))
    assert reshard.difference(good, snapshot(1.0, m=torch.zeros(2))) == ""
    assert reshard.difference(good, snapshot(1.0 + 1e-7, m=torch.zeros(2))) == "w"
    assert reshard.difference(good, snapshot(1.0, m=-torch.zeros(2))) == "m"  # equal numbers, other bits
    assert reshard.difference(good, snapshot(1.0, m=torch.zeros(2).double())) == "m"
    assert reshard.difference(good, snapshot(1.0, m=torch.zeros(2, 1))) == "m"
    assert reshard.difference(good, snapshot(1.0)) == "names: m"


def pool(run_ranks: Ranks) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: nullcontext(SimpleNamespace(run=run_ranks))


def test_two_meshes_take_up_each_other(
    run_ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reshard, "RankPool", pool(run_ranks))
    assert reshard.main(["--meshes", "single,zero1 2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "RESULT pairs=4 identical=4"


def _forgetful(world: Any, *arguments: Any) -> Any:
    """Workers that compute with other weights than they have read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sharded, "micro_step", lambda self, batch: 2 * Strategy.micro_step(self, batch))
        return reshard.restore_and_save(world, *arguments)


def test_a_mesh_that_computes_with_other_weights_than_it_saves_is_found(
    run_ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(function: Callable[..., Any], *rest: Any) -> list[Any]:
        return run_ranks(_forgetful if function is reshard.restore_and_save else function, *rest)

    monkeypatch.setattr(reshard, "RankPool", pool(run))
    assert reshard.main(["--meshes", "zero1 2"]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert "zero1 2 to zero1 2: the next loss differs" in printed
    assert printed[-1] == "RESULT pairs=1 identical=0"


def test_an_unknown_mesh_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        reshard.main(["--meshes", "fsdp 2,cube"])
    assert "'cube' is none of: single, ddp 2," in capsys.readouterr().err
