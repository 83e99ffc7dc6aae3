"""A loss whose result would depend on the number of workers or micro-batches is refused, and no other is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric

from stormo.data.loaders import Batch
from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.tasks.task import Task
from stormo.training.loss_check import _compared, _Evaluation, check_loss_parts
from tests.sharded_models import Plain, Words
from tests.tiny_run import build
from tests.tiny_task import Tiny, TinyOptions

Ranks = Callable[..., list[Any]]


class Mean(Tiny):
    """With batch norm and dropout."""


class Regularised(Plain):
    """A mean and a penalty on the weights."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) + 0.1 * sum(parameter.square().sum() for parameter in model.parameters())


class Cancelling(Plain):
    """A small difference of large numbers, of which most digits are rounding."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        each = cross_entropy(model(x), y, reduction="none")
        return (each + 100 * y).mean() - 100 * y.to(each.dtype).mean()


class Minute(Plain):
    """A loss close to the smallest numbers."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * 1e-38


class Noisy(Plain):
    """Draws random numbers."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return cross_entropy(model(x + torch.randn_like(x)), y)


class Whole(Plain):
    """Takes no part of a batch."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if len(batch[0]) < 8:
            raise ValueError("a whole batch, please")
        return super().loss(model, batch) ** 2


class OnlyInTraining(Plain):
    """Gives no loss in a validation, as models for detection do."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch) ** 2 if model.training else {"boxes": batch[0]}


class NoRunningStatistics(Plain):
    """Batch norm that knows nothing but its batch."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, track_running_stats=False), nn.Linear(16, 3))


class Counted(Plain):
    """A mean over samples, with their number."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch), len(batch[1])


class Weighted(Plain):
    """torch's own mean with class weights: over the sum of these."""

    weight = torch.tensor([1.0, 5.0, 25.0])

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return cross_entropy(model(x), y, weight=self.weight.to(x.dtype))


class WeightedCount(Weighted):
    """The same, with what it is a mean of."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch), self.weight[batch[1]].sum()


class WrongCount(Weighted):
    """The same, with a count that it is no mean of."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch), len(batch[1])


class Root(Plain):
    """A function of the mean, as a root mean square is."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch).sqrt()


class Sum(Plain):
    """A sum that is not said to be one."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch) * len(batch[1])


class SaidSum(Sum):
    """A sum."""

    loss_reduction = "sum"


class NoSum(Plain):
    """A mean that is said to be a sum."""

    loss_reduction = "sum"


class SumAndMore(Sum):
    """A sum, and a penalty that every part would add once more."""

    loss_reduction = "sum"

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) + sum(parameter.square().sum() for parameter in model.parameters())


class Local(Root):
    """The user knows."""

    loss_reduction = "local"


class Nothing(Plain):
    """The mean over samples of one class, of which a part may have none: it is no number then."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        each, mask = cross_entropy(model(x), y, reduction="none"), y == 0
        return (each * mask).sum() / mask.sum()


RIGHT = (
    *(Mean, Regularised, Cancelling, Minute, Noisy, Whole, OnlyInTraining, NoRunningStatistics, Counted, WeightedCount),
    *(SaidSum, Local),
)
WRONG: dict[type[Task], tuple[str, ...]] = {
    Weighted: ("(loss, count)", "no mean over samples"),
    WrongCount: ("(loss, count)", "its count"),
    Root: ("(loss, count)", '"local"'),
    Nothing: ("(loss, count)",),
    Sum: ("it is a sum", 'loss_reduction = "sum"'),
    NoSum: ("leave loss_reduction out",),
    SumAndMore: ("no sum over samples",),
}
FLAGS = {"global_batch_size": 16}


def _refusals(world: World, tasks: list[type[Task]], flags: Mapping[str, Any]) -> dict[str, str]:
    """The refusal of each task, by its name."""
    found = {}
    for task in tasks:
        parts = build(world, {"num_train": 40}, task_class=task, **{**FLAGS, **flags})
        batch = next(parts.loader.first_and_last())
        try:
            check_loss_parts(parts.strategy, batch, parts.plan.accumulate)
            found[task.__name__] = ""
        except SettingError as error:
            found[task.__name__] = str(error)
    return found


@pytest.mark.parametrize(("size", "flags"), [(1, {"accumulate": 2}), (2, {"strategy": "ddp"})])
def test_what_does_not_follow_from_its_parts_is_refused_by_all_workers_and_nothing_else(
    run_ranks: Ranks, size: int, flags: dict[str, Any]
) -> None:
    every = {**dict.fromkeys(RIGHT, ()), **WRONG}
    results = run_ranks(_refusals, size, list(every), flags)
    assert all(result == results[0] for result in results)
    for task, words in every.items():
        said = results[0][task.__name__]
        assert bool(said) == bool(words), said or task.__name__
        assert all(word in said for word in words), said


class TokenMean(Words):
    """A mean over the words below 6."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        (words,) = batch
        targets = words[:, 1:].flatten()
        return cross_entropy(model(words[:, :-1]).flatten(0, 1), torch.where(targets < 6, targets, -100))


@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "tensor", "pipeline", "server"])
def test_sharded_models_are_checked_by_all_workers_together(run_ranks: Ranks, strategy: str) -> None:
    flags = {"strategy": strategy, "accumulate": 2 if strategy == "tensor" else 1, "global_batch_size": 16}
    for result in run_ranks(_refusals, 2, [TokenMean, Words], flags):
        assert "(loss, count)" in result["TokenMean"]
        assert result["Words"] == ""


class FailsOnOne(Words):
    """Fails on rank 1, in the second evaluation."""

    is_inside = False
    num_calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Any:
        type(self).num_calls += 1
        fails = (self.is_inside or torch.distributed.get_rank() == 1) and type(self).num_calls == 2
        if fails and not self.is_inside:
            raise ValueError("before the model")
        hook = model.register_forward_pre_hook(_run_out) if fails else None
        try:
            return super().loss(model, batch)
        finally:
            if hook is not None:
                hook.remove()


class FailsInside(FailsOnOne):
    """Fails in the model, on every rank: one that fails there alone leaves the others waiting until its end."""

    is_inside = True


def _run_out(module: nn.Module, inputs: Any) -> None:
    raise MemoryError("in the model")


def _error(world: World, task: type[FailsOnOne]) -> str:
    task.num_calls = 0
    try:
        return _refusals(world, [task], {"strategy": "fsdp"})[task.__name__]
    except MemoryError as error:
        return str(error)


def test_an_error_of_one_worker_of_a_model_that_is_sharded_is_passed_by_before_the_model_and_ends_all_in_it(
    run_ranks: Ranks,
) -> None:
    assert run_ranks(_error, 2, FailsOnOne) == ["", ""]
    assert run_ranks(_error, 2, FailsInside) == ["in the model"] * 2


def test_one_micro_batch_of_one_worker_may_take_any_loss_and_so_may_local_updates(
    run_ranks: Ranks,
) -> None:
    assert set(run_ranks(_refusals, 1, list(WRONG), {})[0].values()) == {""}
    local = {"strategy": "local", "average_every": "1"}
    assert set(run_ranks(_refusals, 2, [Root], local)[0].values()) == {""}
    assert run_ranks(_refusals, 2, [Root], {**local, "accumulate": 2})[0]["Root"]


def _of_one_sample(world: World) -> dict[str, str]:
    return _refusals(world, [Root], {"strategy": "ddp", "global_batch_size": 2})


def test_a_batch_of_one_sample_says_nothing(run_ranks: Ranks) -> None:
    assert run_ranks(_of_one_sample, 2)[0]["Root"] == ""


def test_a_loss_of_the_batch_as_a_whole_is_reported(run_ranks: Ranks) -> None:
    assert run_ranks(_notices, 2, Local)[0]
    assert not run_ranks(_notices, 2, Mean)[0]


def _notices(world: World, task: type[Task]) -> list[str]:
    parts = build(world, {"num_train": 40}, task_class=task, strategy="ddp", **FLAGS)
    check_loss_parts(parts.strategy, next(parts.loader.first_and_last()), 1)
    return [notice for notice in parts.strategy.notices if '"local"' in notice]


class Opaque:
    """A batch that knows how to move itself and shows nothing."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def to(self, device: Any) -> Opaque:
        return self


class InObjects(Root):
    """Batches of its own."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch.batch if isinstance(batch, Opaque) else batch)


class TimeFirst(Root):
    """Samples along the second dimension."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return super().loss(model, (x[0], y[0]))


def _odd_batches(world: World, task: type[Task], change: str) -> None:
    parts = build(world, {"num_train": 40}, task_class=task, strategy="ddp", **FLAGS)
    batch = next(parts.loader.first_and_last())
    time_first = [tensor[None].repeat_interleave(3, 0) for tensor in batch.data]
    data: Any = Opaque(batch.data) if change == "opaque" else time_first
    check_loss_parts(parts.strategy, Batch(data, batch.span, is_padding=False), 1)


def test_batches_that_cannot_be_cut_say_nothing(run_ranks: Ranks) -> None:
    run_ranks(_odd_batches, 2, InObjects, "opaque")
    run_ranks(_odd_batches, 2, TimeFirst, "time first")


class Remembering(Mean):
    """Keeps books in its loss."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.history: list[float] = []
        self.by_size: dict[int, int] = {}
        self.running = torch.zeros(2)
        self.metric = MeanMetric()
        self.teacher = nn.BatchNorm1d(8)
        self.num_notes = 0
        self.note = self._note  # a bound method, which changes this very task

    def _note(self) -> None:
        self.num_notes += 1

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, _ = batch
        loss = super().loss(model, batch)
        self.history.append(float(loss.detach()))
        self.by_size[len(x)] = self.by_size.get(len(x), 0) + 1
        self.running += 1
        self.metric.update(loss.detach())
        self.teacher(x)
        self.note()
        self.newest = loss.detach()
        return loss


def _remembered(world: World) -> None:
    parts = build(world, {"num_train": 40}, task_class=Remembering, strategy="ddp", **FLAGS)
    task, module = parts.task, parts.strategy.module
    assert isinstance(task, Remembering)
    batch = next(parts.loader.first_and_last())
    parts.strategy.micro_step(batch)
    before = _books(task), [tensor.clone() for tensor in itertools.chain(module.buffers(), task.teacher.buffers())]
    state, gradients = torch.get_rng_state(), [parameter.grad for parameter in module.parameters()]
    check_loss_parts(parts.strategy, batch, 1)
    assert _books(task) == before[0]
    now = [*module.buffers(), *task.teacher.buffers()]
    assert all(torch.equal(a, b) for a, b in zip(now, before[1], strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is old for parameter, old in zip(module.parameters(), gradients, strict=True))
    assert module.training


def _books(task: Remembering) -> list[Any]:
    kept = [list(task.history), dict(task.by_size), task.running.tolist(), float(task.metric.compute()), task.num_calls]
    return [*kept, id(task.newest), float(task.newest), task.num_notes]


def test_looking_leaves_no_trace_in_the_task_nor_in_the_model(run_ranks: Ranks) -> None:
    run_ranks(_remembered, 2)


def test_beside_a_part_without_any_loss_a_mean_is_not_taken_for_a_sum() -> None:
    def seen(num_samples: int, loss: float) -> _Evaluation:
        return _Evaluation(num_samples=num_samples, loss=loss, count=None, rounding=1e-11, rows=None)

    task = Plain(TinyOptions())
    masked = _compared(task, 0.0, seen(5, 0.4), seen(1, 0.0), seen(4, 0.4))
    summed = _compared(task, 0.0, seen(5, 0.7), seen(1, 0.3), seen(4, 0.4))
    assert masked is not None
    assert summed is not None
    assert (masked.is_sum, summed.is_sum) == (False, True)
