"""A loss is a mean over samples, over other items with their count, or a sum; on any number of workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from stormo.data import TensorData
from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.launch.rank_info import alone
from stormo.parallel.loss_weights import REASON, LossWeights
from tests.sharded_models import LENGTH, VOCABULARY, Plain, Words, assert_close, chunks, trained
from tests.tiny_run import build, steps
from tests.tiny_task import TinyOptions

Ranks = Callable[..., list[Any]]


class Masked(Words):
    """The mean over the words that are not masked, by hand: of no words it is 0/0."""

    gives_number = False

    def train_data(self) -> TensorData:
        generator = torch.Generator().manual_seed(3)
        words = torch.randint(VOCABULARY, (40, LENGTH + 1), generator=generator)
        lengths = torch.randint(-4, LENGTH + 1, (40,), generator=generator).clamp(min=0)  # many have no word at all
        return TensorData(words, torch.arange(LENGTH)[None] < lengths[:, None])

    def loss(self, model: nn.Module, batch: Any) -> Any:
        words, mask = batch
        logits = model(words[:, :-1])
        each = cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten(), reduction="none").view(mask.shape)
        count = mask.sum()
        return (each * mask).sum() / count, int(count) if self.gives_number else count


class MaskedByNumber(Masked):
    """Gives the count as a number."""

    gives_number = True


class Summed(Words):
    """A sum over samples."""

    loss_reduction = "sum"

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch) * len(batch[0])


STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "accumulate": (1, {"accumulate": 4}),
    "ddp": (3, {"strategy": "ddp", "accumulate": 2}),
    "fsdp": (2, {"strategy": "fsdp", "accumulate": 2}),
    "tensor": (2, {"strategy": "tensor", "accumulate": 2}),
    "hybrid": (2, {"strategy": "hybrid"}),
    "pipeline": (2, {"strategy": "pipeline", "accumulate": 2}),
    "server": (2, {"strategy": "server", "servers": 1, "accumulate": 2}),
}


@pytest.mark.parametrize(
    ("strategy", "task"), [*((strategy, Masked) for strategy in STRATEGIES), ("ddp", Summed), ("pipeline", Summed)]
)
def test_the_gradient_is_that_of_all_items(run_ranks: Ranks, strategy: str, task: type[Words]) -> None:
    size, flags = STRATEGIES[strategy]
    data = {"global_batch_size": 12} if strategy != "pipeline" else {"global_batch_size": 8}
    expected = run_ranks(trained, 1, task, data)
    assert np.isfinite(expected[0]["losses"]).all()
    assert_close(run_ranks(trained, size, task, {**data, **flags}), expected, 1e-11)


def test_a_count_may_be_a_number(run_ranks: Ranks) -> None:
    flags = {"strategy": "ddp", "accumulate": 2}
    assert_close(run_ranks(trained, 2, MaskedByNumber, flags), run_ranks(trained, 1, Masked, {}), 1e-11)


def test_a_sum_steps_as_its_mean_at_a_smaller_learning_rate(run_ranks: Ranks) -> None:
    """Without clipping and decay, as both see the size of a gradient."""
    plain = {"clip_norm": None, "weight_decay": 0.0, "momentum": 0.0, "global_batch_size": 8}
    by_sum = run_ranks(trained, 1, Summed, {**plain, "base_lr": 0.05 / 8}, 4)
    assert_close(by_sum, run_ranks(trained, 1, Words, {**plain, "base_lr": 0.05}, 4), 1e-12)


def _own_means(world: World) -> Any:
    parts = build(world, task_class=Masked, strategy="local", average_every="1", precision="fp64", global_batch_size=12)
    return steps(parts, 4), chunks(parts)


def test_local_updates_use_the_mean_over_own_items(run_ranks: Ranks) -> None:
    results = run_ranks(_own_means, 2)
    assert np.isfinite(results[0][0]).all()
    assert all(np.isfinite(values).all() for _, chunks in results for *_, values in chunks)


def _after_warm_up(world: World, flags: Mapping[str, Any]) -> Any:
    parts = build(world, task_class=Masked, **flags)
    parts.strategy.warm_up(parts.loader)
    losses = steps(parts, 4)
    return losses, chunks(parts), parts.strategy.noise_scale_reason, parts.strategy.noise_scale is None


def test_warm_up_changes_no_bit_and_turns_off_the_noise_scale(run_ranks: Ranks) -> None:
    """Sums are kept as small as means by a power of two, which rounds nothing."""
    flags = {"strategy": "ddp", "global_batch_size": 12, "noise_scale": True}
    losses, own, reason, is_off = run_ranks(_after_warm_up, 2, flags)[0]
    plain = run_ranks(_without_warm_up, 2, flags)[0]
    assert losses == plain[0]
    assert all(np.array_equal(a[-1], b[-1]) for a, b in zip(own, plain[1], strict=True))
    assert (reason, is_off) == (REASON, True)


def _without_warm_up(world: World, flags: Mapping[str, Any]) -> Any:
    parts = build(world, task_class=Masked, **flags)
    return steps(parts, 4), chunks(parts)


class Nothing(Masked):
    """All is masked in every batch."""

    def train_data(self) -> TensorData:
        words, mask = super().train_data().tensors
        return TensorData(words, torch.zeros_like(mask))


def test_steps_without_a_single_item_change_nothing(run_ranks: Ranks) -> None:
    flags = {"weight_decay": 0.0, "clip_norm": None, "strategy": "ddp"}
    (result, _) = run_ranks(trained, 2, Nothing, flags, 2)
    assert result["losses"] == [0.0, 0.0]
    for name, *_, values in result["chunks"]:
        assert np.isfinite(values).all(), name


class Sometimes(Plain):
    """Gives a count with every second loss."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.num_calls += 1
        x, y = batch
        loss = cross_entropy(model(x), y)
        return (loss, len(y)) if self.num_calls % 2 else loss


class Odd(Plain):
    """Returns a count that is none."""

    count: Any = None

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return cross_entropy(model(x), y), self.count


def test_a_count_that_comes_and_goes_is_refused() -> None:
    parts = build(World(alone(), torch.device("cpu")), task_class=Sometimes, accumulate=2, global_batch_size=8)
    with pytest.raises(SettingError, match="for every batch"):
        steps(parts, 1)


@pytest.mark.parametrize("count", [None, "4", -1, float("nan"), torch.ones(2)], ids=str)
def test_a_count_that_is_no_number_of_items_is_refused(count: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Odd, "count", count)
    parts = build(World(alone(), torch.device("cpu")), task_class=Odd, global_batch_size=8)
    with pytest.raises(SettingError, match="count"):
        steps(parts, 1)


def _stale(world: World) -> str:
    parts = build(world, task_class=Masked, strategy="server", servers=1, staleness=2, global_batch_size=12)
    with pytest.raises(SettingError) as refusal:
        parts.strategy.warm_up(parts.loader)
    return str(refusal.value)


def test_workers_that_do_not_wait_for_each_other_cannot_count_together(run_ranks: Ranks) -> None:
    assert all("--staleness 2" in text for text in run_ranks(_stale, 2))


class Sparse(Masked):
    """With an embedding whose gradient is sparse."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(VOCABULARY, 8, sparse=True), nn.Linear(8, VOCABULARY))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def pieces(self, model: nn.Module) -> Any:
        return None


def test_sparse_gradients_are_divided_too(run_ranks: Ranks) -> None:
    flags = {"clip_norm": None, "noise_scale": False}
    expected = run_ranks(trained, 1, Sparse, flags)
    assert_close(run_ranks(trained, 2, Sparse, {**flags, "strategy": "ddp", "accumulate": 2}), expected, 1e-11)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gradients_of_16_bits_are_divided_by_a_factor_of_more(device: str) -> None:
    """A third in bfloat16 is 0.2 % off, on top of the rounding of each gradient."""
    weighing = LossWeights(Masked(TinyOptions()), World(alone(), torch.device(device, 0)))
    gradients = [
        torch.linspace(1, 2, 1000, device=device).to(torch.bfloat16),
        torch.linspace(1, 2, 1000, device=device, dtype=torch.float64),
    ]
    expected = [gradient.double() / 3 for gradient in gradients]
    weighing.divide(gradients, torch.tensor(3.0, dtype=torch.float64, device=device))
    assert torch.equal(gradients[0], expected[0].to(torch.bfloat16))
    assert torch.allclose(gradients[1], expected[1], rtol=1e-15)


@pytest.mark.parametrize(
    ("count", "weight", "hooks", "gradient"), [(3, 1.0, 0, 3.0), (0, 1.0, 1, 0.0), (3, 0.0, 1, 0.0)]
)
def test_a_count_that_is_a_number_is_decided_on_the_host(
    count: int, weight: float, hooks: int, gradient: float
) -> None:
    """Where there are items, the gradient of the outputs goes by untouched."""
    weighing, model = LossWeights(Masked(TinyOptions()), World(alone(), torch.device("cpu"))), nn.Linear(2, 2)
    outputs: list[Any] = []
    model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    with weighing.guarded(model) as guard:
        loss = model(torch.ones(1, 2)).sum() * (1.0 if count and weight else float("nan"))
    loss, factor = weighing.weigh(loss, count, weight, guard)
    assert len(outputs[0]._backward_hooks or ()) == hooks
    (loss * factor).backward()
    assert model.bias.grad is not None
    assert model.bias.grad.tolist() == [gradient] * 2


def test_a_task_without_counts_launches_nothing_at_the_beginning_of_a_step() -> None:
    weighing = LossWeights(Plain(TinyOptions()), World(alone(), torch.device("cpu")))
    for has_counts, expected in ((None, 1), (False, 0)):
        weighing.has_counts = has_counts
        version = weighing.own._version
        weighing.begin()
        assert weighing.own._version == version + expected
