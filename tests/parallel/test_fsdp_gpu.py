"""Sharded models of one worker on a GPU over NCCL have the weights of plain training there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stormo.data import TensorData
from stormo.distributed.world import World
from stormo.launch import alone
from stormo.layers.norm_act import NormAct
from stormo.tasks.wide_resnet import WideResNet
from tests.sharded_models import Images, Words, assert_close, trained
from tests.tiny_run import build, steps

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
def test_one_sharded_worker_trains_as_one_process(optimizer: str, more: dict[str, Any]) -> None:
    flags = {**SGD, "optimizer": optimizer, "nesterov": optimizer == "sgd"}
    expected = [trained(World(alone(), torch.device("cuda", 0)), Words, flags)]
    world = World(alone(), torch.device("cuda", 0), backend="nccl", needs_group=True)
    try:
        found = [trained(world, Words, {**flags, **more})]
    finally:
        world.close()
    assert_close(found, expected, 1e-10)


class Reference(Images):
    """The reference network, whole."""

    def model(self) -> nn.Module:
        return WideResNet(dropout=0.0)

    def train_data(self) -> TensorData:
        return TensorData(torch.randn(48, 1, 28, 28, generator=torch.Generator().manual_seed(0)), torch.arange(48) % 10)


class Rows(Images):
    """A batch norm whose inputs are rows, which the fused kernels take."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(49, 32), NormAct(32), nn.Linear(32, 10))


@pytest.mark.parametrize("task_class", [Reference, Rows])
def test_fused_batch_norms_are_sharded_in_half_precision(task_class: type[Images]) -> None:
    flags = {**SGD, "precision": "bf16", "global_batch_size": 16}
    found = []
    for strategy in ("zero1", "fsdp"):
        world = World(alone(), torch.device("cuda", 0), backend="nccl", needs_group=True)
        try:
            parts = build(world, {"dropout": 0.0}, task_class=task_class, strategy=strategy, **flags)
            parts.strategy.warm_up(parts.loader)
            found.append(steps(parts, 3))
        finally:
            world.close()
            torch.set_default_dtype(torch.float32)
    assert found[1] == pytest.approx(found[0], rel=0.03)
