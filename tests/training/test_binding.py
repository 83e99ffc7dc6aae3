"""A worker is bound to the cores next to its GPU, unless it must not be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stormo.config.layout import resolve_layout
from stormo.config.options import make_config
from stormo.launch import alone
from stormo.system.hardware import Gpu
from stormo.training import trainer

GPUS = [Gpu(name="NVIDIA H200", memory_bytes=1, capability=(9, 0), bus_id=bus) for bus in ("a", "b")]


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({}, [(["a", "b"], 1, 2)]),
        ({"bind": False}, []),
        ({"strategy": "dp"}, []),
        ({"device": "cpu", "num_gpus": 2}, [([], 1, 2)]),
    ],
)
def test_who_is_bound(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], asked: list[Any]) -> None:
    found: list[Any] = []

    def bind(*arguments: Any) -> str:
        found.append(arguments)
        return "bound to cores 4-7 (NUMA node 1 of its GPU)"

    monkeypatch.setattr(trainer, "bind_to_gpu", bind)
    config = make_config(settings, None)
    rank_info = replace(alone(), launcher="local", rank=1, world_size=2, local_rank=1, local_size=2)
    notices = trainer._bind(config, resolve_layout(config, GPUS), rank_info)
    assert found == asked
    expected = "rank 1 is bound to cores 4-7 (NUMA node 1 of its GPU); --no-bind turns it off"
    assert [notice.text for notice in notices] == [expected] * len(asked)
