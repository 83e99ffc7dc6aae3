"""Validation counts every sample once, and the number of workers changes not one bit of the result."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from stormo.data.batches import batch_length
from stormo.distributed.world import World
from stormo.launch import alone
from stormo.tasks.task import Task
from stormo.training.validation import Validation
from tests.tiny_task import Tiny, TinyOptions

Ranks = Callable[..., list[Any]]


class Plain(Dataset[Any]):
    """The same samples without tensors."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


class LossOnly(Tiny):
    """A task that writes no metrics of its own."""

    metrics = Task.metrics


def _validate(world: World, num_samples: int, batch_size: int, *, plain: bool = False) -> tuple[Any, int, int]:
    task = Tiny(TinyOptions(num_validation=num_samples))
    torch.manual_seed(0)
    model = task.model().train()
    data = task.validation_data()
    validation = Validation(task, Plain(data) if plain else data, batch_size, world, resident=not plain)
    found = list(validation.run(model, nullcontext))
    assert found[:-1] == [None] * (validation.num_rounds - 1)
    assert all(module.training for module in model.modules())
    return found[-1], len(found), validation.num_batches


def _alone(num_samples: int, batch_size: int, **more: Any) -> tuple[Any, int, int]:
    return _validate(World(alone(), torch.device("cpu")), num_samples, batch_size, **more)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_1001_samples_give_the_same_bits_on_any_number_of_ranks(run_ranks: Ranks, size: int) -> None:
    expected, _, num_batches = _alone(1001, 100)
    assert num_batches == 11
    for metrics, num_rounds, _ in run_ranks(_validate, size, 1001, 100):
        assert metrics == expected  # floats, so to the last bit
        assert num_rounds == math.ceil(11 / size)


def test_fewer_batches_than_ranks_leave_some_without_work_and_the_result_unchanged(run_ranks: Ranks) -> None:
    expected, _, num_batches = _alone(150, 100)
    assert num_batches == 2
    assert [result for result, _, _ in run_ranks(_validate, 4, 150, 100)] == [expected] * 4


def test_the_counts_are_those_of_all_samples_at_once() -> None:
    task = Tiny(TinyOptions(num_validation=1001))
    torch.manual_seed(0)
    model = task.model().eval()
    points, labels = task.validation_data().tensors  # type: ignore[attr-defined]
    with torch.no_grad():
        right = int((model(points).argmax(dim=1) == labels).sum())
        loss = float(nn.functional.cross_entropy(model(points), labels))
    for batch_size in (1, 7, 100, 1000, 1001, 5000):
        metrics, _, _ = _alone(1001, batch_size)
        assert metrics["accuracy"] == right / 1001
        assert metrics["loss"] == pytest.approx(loss, rel=1e-6)


def test_a_data_set_without_tensors_gives_the_same_result() -> None:
    assert _alone(301, 64, plain=True) == _alone(301, 64)


def test_a_task_without_metrics_reports_its_loss() -> None:
    task = LossOnly()
    model = task.model().eval()
    data = task.validation_data()
    (metrics,) = (found for found in _run(task, model, data) if found)
    with torch.no_grad():
        expected = float(task.loss(model, tuple(data.tensors)))  # type: ignore[attr-defined]
    assert metrics == {"loss": pytest.approx(expected, rel=1e-6)}
    assert batch_length({"a": [torch.zeros(3, 2)]}) == 3


def _run(task: Task, model: nn.Module, data: Any) -> list[Any]:
    world = World(alone(), torch.device("cpu"))
    return list(Validation(task, data, 100, world, resident=True).run(model, nullcontext))


def test_neither_gradients_nor_statistics_nor_dropout_are_at_work() -> None:
    task = Tiny(TinyOptions(dropout=0.9))
    model = task.model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    first, second = _run(task, model, task.validation_data()), _run(task, model, task.validation_data())
    assert first[-1] == second[-1]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_caller_that_gives_up_between_rounds_gets_the_model_back_in_training_mode() -> None:
    task = Tiny()
    model = task.model()
    rounds = Validation(task, task.validation_data(), 10, World(alone(), torch.device("cpu")), resident=True).run(
        model, nullcontext
    )
    next(rounds)
    assert not model.training
    rounds.close()  # type: ignore[attr-defined]
    assert model.training


class Masked(Tiny):
    """Means over samples of one class, which many batches have none of."""

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        each, mask = cross_entropy(model(x), y, reduction="none"), y == 2
        count = mask.sum()
        return {
            "loss": cross_entropy(model(x), y, reduction="sum"),
            "masked": ((each * mask).sum() / count, count),
            "by number": (float((each * mask).sum() / max(int(count), 1)), int(count)),
            "never": (torch.tensor(math.nan), 0),
        }


def _masked(world: World) -> dict[str, float]:
    task = Masked(TinyOptions(num_validation=50))
    torch.manual_seed(0)
    found = list(Validation(task, task.validation_data(), 3, world).run(task.model(), nullcontext))[-1]
    assert found is not None
    return found


def test_a_mean_with_its_count_is_that_over_all_items_on_any_number_of_ranks(run_ranks: Ranks) -> None:
    (expected,) = run_ranks(_masked, 1)
    task = Masked(TinyOptions(num_validation=50))
    torch.manual_seed(0)
    model, (x, y) = task.model().eval(), task.validation_data().tensors
    with torch.no_grad():
        each = cross_entropy(model(x), y, reduction="none")
    assert list(expected) == ["by number", "loss", "masked", "never"]
    assert expected["loss"] == pytest.approx(float(each.mean()), rel=1e-6)
    assert expected["masked"] == pytest.approx(float(each[y == 2].mean()), rel=1e-6)
    assert expected["by number"] == pytest.approx(expected["masked"], rel=1e-6)
    assert math.isnan(expected["never"])  # there was no item at all
    for result in run_ranks(_masked, 3):
        assert {name: result[name] for name in ("loss", "masked", "by number")} == {
            name: expected[name] for name in ("loss", "masked", "by number")
        }


class CountedLoss(LossOnly):
    """Its loss is a mean over samples of some classes."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return cross_entropy(model(x), y, ignore_index=0), (y != 0).sum()


class SummedLoss(LossOnly):
    """Its loss is a sum."""

    loss_reduction = "sum"

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return cross_entropy(model(x), y, reduction="sum")


@pytest.mark.parametrize("kind", [CountedLoss, SummedLoss])
def test_a_task_without_metrics_reports_the_mean_of_whatever_its_loss_is(kind: type[Tiny]) -> None:
    task = kind(TinyOptions(num_validation=50))
    torch.manual_seed(0)
    model, (x, y) = task.model().eval(), task.validation_data().tensors
    (*_, found) = Validation(task, task.validation_data(), 16, World(alone(), torch.device("cpu"))).run(
        model, nullcontext
    )
    with torch.no_grad():
        expected = cross_entropy(model(x), y, ignore_index=0 if kind is CountedLoss else -100)
    assert found == {"loss": pytest.approx(float(expected), rel=1e-6)}
