"""An optimizer that a task brings: what is asked of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

from stormo.config.schema import TrainConfig
from stormo.errors import SettingError
from stormo.optim.task_optimizer import group_learning_rates, make_task_optimizer, optimizer_notice, parameters_not_in


def test_none_leaves_it_to_the_settings_and_a_good_one_is_taken_as_it_is() -> None:
    model = nn.Linear(2, 2)
    assert make_task_optimizer(lambda model: None, model) is None
    made = torch.optim.RMSprop(model.parameters(), lr=torch.tensor(0.5))
    assert make_task_optimizer(lambda model: made, model) is made
    assert group_learning_rates(made) == [0.5]


def test_what_it_leaves_out_is_frozen() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    make_task_optimizer(lambda model: torch.optim.SGD(model[1].parameters(), lr=0.1), model)
    assert [parameter.requires_grad for parameter in model.parameters()] == [False, False, True, True]


@pytest.mark.parametrize(
    ("trained", "said"),
    [
        (0, "leaves out 4 of the model's parameters, which are frozen: 1.weight, 1.bias, 2.weight and 1 more."),
        (slice(2), "leaves out 2 of the model's parameters, which are frozen: 2.weight, 2.bias."),
        (slice(3), None),
    ],
)
def test_what_it_leaves_out_is_counted_and_named(trained: Any, said: str | None) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    made = make_task_optimizer(lambda model: torch.optim.SGD(cast(Any, model)[trained].parameters(), lr=0.1), model)
    assert made is not None
    text = optimizer_notice(made, parameters_not_in(made, model), TrainConfig(), 0.1)
    assert "leaves out" not in text if said is None else said in text


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda model: model, r"returned a Linear, but a torch\.optim\.Optimizer is stepped; return one, None for"),
        (
            lambda model: torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(1))], lr=0.1),
            r"returned a SGD, but 1 of its parameters are not the model's; make it from the parameters of the model",
        ),
        (lambda model: torch.optim.LBFGS(model.parameters()), r"returned a LBFGS, but its step\(\) needs a closure"),
        (
            lambda model: torch.optim.SGD([{"params": [model.bias], "lr": 0.0}, {"params": [model.weight], "lr": 0.1}]),
            r"with the learning rates 0, 0\.1, but the schedule multiplies them.*; set lr above 0 in the first group",
        ),
    ],
)
def test_what_cannot_be_stepped_by_the_schedule_is_refused(make: Callable[[Any], Any], sentence: str) -> None:
    with pytest.raises(SettingError, match=sentence):
        make_task_optimizer(make, nn.Linear(2, 2))


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
    ],
)
def test_a_scheduler_on_it_is_refused(schedule: Callable[[Any], Any]) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule(optimizer)
        return optimizer

    with pytest.raises(SettingError, match=r"a learning-rate scheduler.*set --decay and --warmup-epochs"):
        make_task_optimizer(make, nn.Linear(2, 2))


def test_groups_that_once_had_a_scheduler_are_taken() -> None:
    model = nn.Linear(2, 2)
    scheduled = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.ConstantLR(scheduled)
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    made.load_state_dict(scheduled.state_dict())
    assert "initial_lr" in made.param_groups[0]
    assert make_task_optimizer(lambda model: made, model) is made
