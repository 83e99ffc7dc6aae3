"""A scheduler of torch that a task brings: stepped by the loop, scaled by the batch, saved and resumed."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from stormo.config import schema
from stormo.errors import SettingError, StormoError
from stormo.optim.schedule import make_schedule
from stormo.optim.table import make_optimizer
from stormo.optim.task_optimizer import JoinedOptimizer
from stormo.optim.task_scheduler import TaskScheduler
from stormo.training.loop import train
from tests.tiny_task import Tiny
from tests.training.test_loop import Run, prepare

EVERY: dict[str, Any] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], gamma=0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=12),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, step_size_up=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def _optimizer() -> Optimizer:
    layer = nn.Linear(2, 2)
    return torch.optim.SGD([{"params": [layer.weight]}, {"params": [layer.bias], "lr": 0.3}], lr=0.1, momentum=0.9)


def _advance(scheduler: TaskScheduler, first: int, last: int) -> list[Any]:
    found = []
    for number in range(first, last):
        scheduler.step({"loss": 1.0 + number})
        found.append((scheduler.rates, [group["momentum"] for group in scheduler._optimizer.param_groups]))
    return found


@pytest.mark.filterwarnings("ignore")  # torch's own, of the reference
@pytest.mark.parametrize("name", sorted(EVERY))
def test_it_sets_what_torch_sets_and_resumes_from_json(name: str) -> None:
    plain = _optimizer()
    reference, expected = EVERY[name](plain), []
    whole = TaskScheduler(EVERY[name], _optimizer(), "epoch")
    assert whole.rates == [group["lr"] for group in plain.param_groups]
    for number in range(8):
        reference.step(*([1.0 + number] if name == "ReduceLROnPlateau" else []))
        groups = plain.param_groups
        expected.append(([group["lr"] for group in groups], [group["momentum"] for group in groups]))
    assert _advance(whole, 0, 4) == expected[:4]
    resumed = TaskScheduler(EVERY[name], _optimizer(), "epoch")
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert resumed.rates == whole.rates
    assert _advance(resumed, 4, 8) == _advance(whole, 4, 8) == expected[4:]


@pytest.mark.parametrize("name", ["lamb", "joined"])
def test_stormos_own_optimizers_take_one(name: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = make_optimizer(model, schema.Optimizer(optimizer="lamb", base_lr=0.1))
    if name == "joined":
        one, two = torch.optim.SGD([model.weight], lr=0.1), torch.optim.Adam([model.bias], lr=0.3)
        optimizer = JoinedOptimizer({"one": one, "two": two})
    scheduler = TaskScheduler(EVERY["OneCycleLR" if name == "lamb" else "ExponentialLR"], optimizer, "step")
    before = scheduler.rates
    scheduler.step()
    assert len(scheduler.rates) == 2
    assert scheduler.rates != before
    assert optimizer.param_groups[0]["params"] == [model.weight]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda o: None, "scheduler() returned a NoneType, but it must be one of torch.optim.lr_scheduler for the "),
        (lambda o: lr_scheduler.ConstantLR(_optimizer()), "scheduler() returned a ConstantLR, but it must be one of "),
        (lr_scheduler.ReduceLROnPlateau, "scheduler() returned a ReduceLROnPlateau, but it follows the validation "),
    ],
)
def test_what_cannot_be_stepped_is_refused(make: Any, said: str) -> None:
    with pytest.raises(SettingError) as refused:
        TaskScheduler(make, _optimizer(), "step")
    assert str(refused.value).startswith(said)


def test_the_state_of_another_scheduler_is_refused() -> None:
    scheduler = TaskScheduler(EVERY["MultiStepLR"], _optimizer(), "step")
    with pytest.raises(StormoError, match="does not fit MultiStepLR"):
        scheduler.load_state_dict({"groups": []})


class Halved(Tiny):
    """Half the learning rate after every step or epoch."""

    scheduler_interval: ClassVar[Any] = "step"

    def scheduler(self, optimizer: Optimizer) -> Any:
        return lr_scheduler.ExponentialLR(optimizer, 0.5)


class HalvedByEpoch(Halved):
    """After every epoch."""

    scheduler_interval: ClassVar[Any] = "epoch"


def _rates(task: type[Tiny], **flags: Any) -> tuple[Run, list[list[float]]]:
    rates: dict[int, list[float]] = {}  # a validation gives signs of life, too
    run = prepare(
        task_class=task,
        on_step=lambda run, step: rates.setdefault(step, [g["lr"] for g in run.parts.strategy.optimizer.param_groups]),
        **flags,
    )
    parts = run.parts
    factor = parts.strategy.lr_factor
    run.training.schedule = make_schedule(parts.config, parts.plan, factor, is_constant=True)
    train(run.training)
    return run, list(rates.values())


@pytest.mark.parametrize(("task", "powers"), [(Halved, [0, 1, 2, 3, 4, 5]), (HalvedByEpoch, [0, 0, 0, 1, 1, 1])])
def test_the_loop_steps_it_once_a_step_or_an_epoch(task: Any, powers: list[int]) -> None:
    run, rates = _rates(task, lr_rule="linear", base_batch_size=8, decay="cosine", warmup_epochs=1.0)
    assert rates == [[0.2 * 0.5**power] * 2 for power in powers]  # × 2 for the batch; no other warm-up or decay
    (warning,) = run.parts.strategy.warnings  # --decay was set
    assert warning.startswith("The task's ExponentialLR sets the learning rates, once a")
    assert run.training.last_learning_rate == rates[-1][0]
