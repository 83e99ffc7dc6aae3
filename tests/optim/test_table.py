"""The optimizers by name: what they take from the settings, and which parameters decay."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from stormo.config import schema
from stormo.config.options import options_of
from stormo.config.schema import OPTIMIZER_DEFAULTS
from stormo.errors import SettingError
from stormo.optim import LAMB, LARC, LARS, NovoGrad
from stormo.optim.table import OPTIMIZERS, make_optimizer, parameter_groups, start_momentum


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(6, 2))


def _step(model: nn.Module, settings: schema.Optimizer, lr: float) -> None:
    optimizer = make_optimizer(model, settings)
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = lr
    model(torch.ones(4, 2, 4) * torch.arange(1.0, 5.0).view(4, 1, 1)).square().sum().backward()
    optimizer.step()


def test_weights_decay_and_vectors_do_not() -> None:
    model = _model()
    weights, vectors = parameter_groups(model, 0.1)
    assert (weights["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {named[id(p)] for p in weights["params"]} == {"0.weight", "3.weight"}
    assert {named[id(p)] for p in vectors["params"]} == {"0.bias", "1.weight", "1.bias", "3.bias"}


def test_every_trained_parameter_is_in_one_group_and_frozen_ones_in_none() -> None:
    model = _model()
    model.get_parameter("3.weight").requires_grad_(False)
    grouped = [id(parameter) for group in parameter_groups(model, 0.0) for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters() if parameter.requires_grad)
    assert len(parameter_groups(nn.Linear(2, 2, bias=False), 0.1)) == 1  # no empty group


def test_every_optimizer_that_can_be_set_has_its_row() -> None:
    (declared,) = (option for option in options_of("optimizer", schema.Optimizer) if option.name == "optimizer")
    assert set(declared.choices) == set(OPTIMIZERS) == set(OPTIMIZER_DEFAULTS)


@pytest.mark.parametrize("name", sorted(OPTIMIZER_DEFAULTS))
def test_the_help_says_every_default_of_an_optimizer(name: str) -> None:
    declared = {option.name: option.help for option in options_of("optimizer", schema.Optimizer)}
    for setting, default in OPTIMIZER_DEFAULTS[name].items():
        assert name in declared[setting]
        if default is not False and default is not None:
            assert re.search(rf"{name}\b[^(]*\(default {default}\)", declared[setting]), declared[setting]


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("lars", LARS, {"momentum": 0.8, "nesterov": True, "trust_coefficient": 0.001}),
        ("larc", LARC, {"momentum": 0.8, "nesterov": True, "trust_coefficient": 0.001}),
        ("lamb", LAMB, {"betas": (0.8, 0.999), "eps": 1e-6, "norm_bounds": None}),
        ("novograd", NovoGrad, {"betas": (0.8, 0.98), "eps": 1e-8, "grad_averaging": False}),
    ],
)
def test_a_layerwise_optimizer_takes_its_settings_or_the_defaults_of_its_paper(
    name: Any, kind: type[Any], expected: dict[str, Any]
) -> None:
    settings = schema.Optimizer(optimizer=name, base_lr=0.3, momentum=0.8, nesterov=True, weight_decay=0.1)
    optimizer = make_optimizer(_model(), settings)
    assert type(optimizer) is kind
    for group, adapt in zip(optimizer.param_groups, (True, False), strict=True):
        assert {key: group[key] for key in expected} == expected
        assert (group["lr"], group["adapt"], group["weight_decay"]) == (0.3, adapt, 0.1 if adapt else 0.0)


def test_settings_of_one_optimizer_reach_it() -> None:
    settings = schema.Optimizer(optimizer="novograd", beta2=0.5, eps=0.25, grad_averaging=True)
    group = make_optimizer(_model(), settings).param_groups[0]
    assert (group["betas"], group["eps"], group["grad_averaging"]) == ((0.9, 0.5), 0.25, True)
    group = make_optimizer(_model(), schema.Optimizer(optimizer="larc", trust_coefficient=0.5)).param_groups[0]
    assert group["trust_coefficient"] == 0.5
    group = make_optimizer(_model(), schema.Optimizer(optimizer="adamw", beta2=0.5, eps=0.25)).param_groups[0]
    assert (group["betas"], group["eps"]) == ((0.9, 0.5), 0.25)


def test_norms_of_any_shape_are_found_by_their_layer() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm([3, 3]))
    weights, others = parameter_groups(model, 0.1, layerwise=True)
    assert (weights["adapt"], others["adapt"]) == (True, False)
    assert {id(p) for p in others["params"]} == {id(model[0].bias), id(model[1].weight), id(model[1].bias)}
    assert all("adapt" not in group for group in parameter_groups(model, 0.1))


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("sgd", torch.optim.SGD, {"momentum": 0.8, "nesterov": True, "lr": 0.3}),
        ("adamw", torch.optim.AdamW, {"betas": (0.8, 0.999), "lr": 0.3}),
    ],
)
def test_an_optimizer_takes_its_settings_and_one_kernel_for_all(
    name: Any, kind: type[Any], expected: dict[str, Any]
) -> None:
    optimizer = make_optimizer(_model(), schema.Optimizer(optimizer=name, base_lr=0.3, momentum=0.8, nesterov=True))
    assert isinstance(optimizer, kind)
    for group in optimizer.param_groups:
        assert group["fused"] is True
        assert {key: group[key] for key in expected} == expected


def test_parameters_that_no_fused_kernel_takes_fall_to_the_plain_one() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))

    assert make_optimizer(Complex(), schema.Optimizer()).param_groups[0]["fused"] is False


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_fused_step_is_the_step_of_the_reference_implementation(name: Any) -> None:
    settings = schema.Optimizer(optimizer=name, weight_decay=0.1, momentum=0.9)
    fused, plain = _model().double(), _model().double()
    torch.set_default_dtype(torch.float64)
    try:
        _step(fused, settings, 0.05)
        groups = parameter_groups(plain, 0.1)
        reference: Any = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]
        extra: Any = {"sgd": {"momentum": 0.9}, "adamw": {"betas": (0.9, 0.999)}}[name]
        optimizer = reference(groups, lr=0.05, foreach=False, fused=False, **extra)
        plain(torch.ones(4, 2, 4) * torch.arange(1.0, 5.0).view(4, 1, 1)).square().sum().backward()
        optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_decay_moves_weights_alone() -> None:
    model = _model()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer = make_optimizer(model, schema.Optimizer(weight_decay=0.5, base_lr=0.1, momentum=0.0))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 0.95 if parameter.ndim > 1 else 1.0
        torch.testing.assert_close(parameter, before[name] * factor)


def test_a_momentum_with_dampening_does_not_start_from_a_scaled_gradient() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, dampening=0.5, fused=True)
    with pytest.raises(SettingError, match="leave out fused=True or dampening"):
        start_momentum(optimizer, may_skip=True)
