"""Spread models on one GPU over NCCL: a lone worker, whose weights are those of plain training there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stormo.launch import alone
from stormo.world.world import World
from tests.spread import Words, assert_close, trained

pytestmark = pytest.mark.gpu
SGD = {"momentum": 0.9, "nesterov": True, "num_gpus": 1, "graph": False}


@pytest.mark.parametrize("optimizer", ["sgd", "lamb"])
@pytest.mark.parametrize(
    "more",
    [
        {"strategy": "fsdp"},
        {"strategy": "zero1"},
        {"strategy": "zero2"},
        {"strategy": "fsdp", "offload": True},
        {"strategy": "zero2", "offload": True},
        {"strategy": "fsdp", "checkpoint_activations": True},
        {"strategy": "fsdp", "accumulate": 2},
    ],
    ids=str,
)
def test_a_lone_worker_trains_as_one_process(optimizer: str, more: dict[str, Any]) -> None:
    flags = {**SGD, "optimizer": optimizer, "nesterov": optimizer == "sgd"}
    expected = [trained(World(alone(), torch.device("cuda", 0)), Words, flags)]
    world = World(alone(), torch.device("cuda", 0), backend="nccl", needs_group=True)
    try:
        found = [trained(world, Words, {**flags, **more})]
    finally:
        world.close()
    assert_close(found, expected, 1e-10)
