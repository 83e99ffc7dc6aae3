"""Sparse gradients: seen in the first pass, on all workers alike, and whatever cannot be had with them is told then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.launch import alone
from stormo.training.sanity_check import explain_errors
from tests.tiny_run import Parts, arrays, assert_same_bits, build, steps
from tests.tiny_task import Tiny

Ranks = Callable[..., list[Any]]


class Lookup(nn.Module):
    """A table of its own, not torch's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return functional.embedding(x, self.weight, sparse=True)


class Sparse(Tiny):
    """The tiny task on the signs of its points, each of which has a row in a table."""

    table: Callable[[], nn.Module] = Lookup

    def model(self) -> nn.Module:
        return nn.Sequential(type(self).table(), nn.Flatten(), nn.Linear(24, 3))

    def optimizer(self, model: nn.Module) -> Optimizer | None:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model((batch[0] > 0).long()), batch[1])


class SparseLayer(Sparse):
    """With torch's layer, of which DDP knows that its gradient is sparse."""

    @staticmethod
    def table() -> nn.Module:
        return nn.Embedding(2, 3, sparse=True)


def _alone(task_class: type[Tiny], **flags: Any) -> Parts:
    return build(World(alone(), torch.device("cpu")), task_class=task_class, global_batch_size=8, **flags)


@pytest.mark.parametrize("task_class", [Sparse, SparseLayer])
def test_sparse_gradients_are_not_measured_and_that_is_said(task_class: type[Tiny]) -> None:
    parts = _alone(task_class, accumulate=2)
    parts.strategy.warm_up(parts.loader)
    assert parts.strategy.noise_scale is None
    assert parts.strategy.noise_scale_reason == "the model has sparse gradients"
    said = "The gradient noise scale is not measured, as the model has sparse gradients."
    assert parts.strategy.notices.count(said) == 1
    parts.strategy.cut_as(parts.plan)
    assert parts.strategy.noise_scale is None
    losses = steps(parts, 20)
    assert losses[-1] < losses[0]
    parts.strategy.warm_up(parts.loader)
    assert parts.strategy.notices.count(said) == 1


def test_what_is_only_called_sparse_is_measured() -> None:
    class Named(nn.Linear):
        sparse = True

    class Dense(Tiny):
        def model(self) -> nn.Module:
            return Named(8, 3)

    parts = _alone(Dense, accumulate=2)
    parts.strategy.warm_up(parts.loader)
    assert parts.strategy.noise_scale is not None
    assert parts.strategy.noise_scale_reason == parts.plan.noise_scale_reason
    assert parts.strategy.notices == []


@pytest.mark.parametrize(
    "flags", [{"noise_scale": True, "accumulate": 2}, {"gradient_noise": 0.01}, {"clip_norm": 1.0}], ids=str
)
def test_what_needs_whole_gradients_is_refused_in_the_first_pass(flags: dict[str, Any]) -> None:
    parts = _alone(Sparse, **flags)
    said = f"--{next(iter(flags)).replace('_', '-')}.* was set, but the model has sparse gradients"
    with pytest.raises(SettingError, match=said):
        parts.strategy.warm_up(parts.loader)
    with pytest.raises(SettingError, match=said):
        parts.strategy.try_step(next(iter(parts.loader.epoch(1))).data)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lamb"])
def test_optimizers_that_take_no_sparse_gradients_are_refused_by_name(optimizer: str) -> None:
    class Given(Sparse):
        def optimizer(self, model: nn.Module) -> Optimizer | None:
            return None

    parts = _alone(Given, optimizer=optimizer)
    with pytest.raises(SettingError, match=rf"--optimizer {optimizer} is in force, but .* sparse=False, or give"):
        parts.strategy.warm_up(parts.loader)


def _train(world: World, measures: bool) -> dict[str, Any]:
    parts = build(world, task_class=SparseLayer, global_batch_size=8, noise_scale=None if measures else False)
    assert (parts.strategy.noise_scale is not None) is measures
    parts.strategy.warm_up(parts.loader)
    assert parts.strategy.noise_scale is None
    steps(parts, 5)
    return arrays(parts.strategy.module.named_parameters())


def test_workers_agree_and_exchange_sparse_gradients_as_ddp_does(run_ranks: Ranks) -> None:
    quiet, measured = run_ranks(_train, 3, False), run_ranks(_train, 3, True)
    for one, other in zip(quiet, measured, strict=True):
        assert_same_bits(one, other)


def _refused(world: World) -> str:
    parts = build(world, task_class=Sparse, global_batch_size=8)
    with (
        pytest.warns(UserWarning, match="Grad strides do not match"),
        pytest.raises(SettingError) as refused,
        explain_errors(parts.task, "train_data", "loss"),
    ):
        parts.strategy.warm_up(parts.loader)
    return str(refused.value)


def test_a_sparse_gradient_that_ddp_does_not_expect_is_explained(run_ranks: Ranks) -> None:
    for said in run_ranks(_refused, 2):
        assert "Sparse.loss() has a sparse gradient that is not of a layer nn.Embedding" in said
        assert said.endswith("leave sparse=True out.")
