"""Frozen parameters, and learning rates by layer: chosen by names, and the same under every strategy."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from stormo.config import schema
from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.launch import alone
from stormo.optim.table import OPTIMIZERS, freeze, make_optimizer
from tests.sharded_models import Plain, Words, assert_close, trained, whole

Ranks = Callable[..., list[Any]]


def _model() -> nn.Module:
    return nn.ModuleDict({"backbone": nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), "head": nn.Linear(4, 2)})


def test_freeze_says_how_many_of_how_many() -> None:
    model = _model()
    assert freeze(model, "backbone.*, head.bias") == "5 of the model's 6 parameters are frozen: 30 of 38 values."
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == ["head.weight"]


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        ("bakcbone.*", "no parameter of the model fits bakcbone.*; set something like backbone.* or backbone."),
        ("*", "all 6 parameters of the model are frozen then; leave some to be trained."),
    ],
)
def test_freeze_refuses_in_one_sentence(patterns: str, said: str) -> None:
    with pytest.raises(SettingError) as refused:
        freeze(_model(), patterns)
    assert str(refused.value).startswith(f"--freeze {patterns} was set, but {said}")


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_takes_the_factor_of_the_first_pattern_that_fits(name: str) -> None:
    model = _model()
    settings = schema.Optimizer(optimizer=name, base_lr=0.5, weight_decay=0.1)  # type: ignore[arg-type]
    made = make_optimizer(model, settings, {"*.bias": 2.0, "head.*": 10.0, "backbone.*": 0.1})
    names = {parameter: name for name, parameter in model.named_parameters()}
    rates = {names[p]: (g["lr"], g["weight_decay"]) for g in made.param_groups for p in g["params"]}
    assert rates == {
        "backbone.0.weight": (0.05, 0.1),
        "backbone.0.bias": (1.0, 0.0),
        "backbone.1.weight": (0.05, 0.0),
        "backbone.1.bias": (1.0, 0.0),
        "head.weight": (5.0, 0.1),
        "head.bias": (1.0, 0.0),
    }


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        ({"haed.*": 2.0}, "lr_factors of the task has 'haed.*', but no parameter of the model fits haed.*; set "),
        (
            {"head.*": float("inf")},
            "lr_factors of the task has 'head.*': inf, but it multiplies a learning rate; set a",
        ),
        ({3: 2.0}, "lr_factors of the task has 3, but no parameter of the model fits 3; set something like"),
        ({"head.*": 0.0}, "lr_factors of the task has 'head.*': 0.0, but it multiplies a learning rate; set a number "),
    ],
)
def test_a_wrong_factor_is_refused(factors: dict[str, float], said: str) -> None:
    with pytest.raises(SettingError) as refused:
        make_optimizer(_model(), schema.Optimizer(), factors)
    assert str(refused.value).startswith(said)


class Layers(Plain):
    """Layers at rates of their own."""

    lr_factors: ClassVar[dict[str, float]] = {"0.*": 0.25, "2.weight": 3.0}


class Blocks(Words):
    """Blocks at rates of their own."""

    lr_factors: ClassVar[dict[str, float]] = {"blocks.0.*": 0.25, "head.*": 3.0}


@cache
def _expected(task: Any, flags: tuple[tuple[str, Any], ...]) -> list[dict[str, Any]]:
    return [trained(World(alone(), torch.device("cpu")), task, dict(flags))]


@pytest.mark.parametrize(
    ("task", "flags", "mesh"),
    [
        (Layers, {"freeze": "2.*"}, {"strategy": "ddp"}),
        (Layers, {"freeze": "2.*"}, {"strategy": "server", "servers": 2}),
        (Blocks, {"freeze": "blocks.1.*", "optimizer": "lamb"}, {"strategy": "zero2"}),
        (Blocks, {"freeze": "blocks.1.*", "optimizer": "lamb"}, {"strategy": "fsdp"}),
        (Layers, {"freeze": "0.*"}, {"strategy": "pipeline"}),  # nothing is trained in the first stage
    ],
    ids=str,
)
def test_every_strategy_trains_as_one_process(run_ranks: Ranks, task: Any, flags: Any, mesh: Any) -> None:
    expected = _expected(task, tuple(flags.items()))
    results = run_ranks(trained, 2, task, {**flags, **mesh})
    assert_close(results, expected, 1e-12)
    layer = flags["freeze"].removesuffix("*")
    frozen = {name for name in whole(results) if name.startswith(layer)}
    assert frozen
    assert not any("|" in name for name in frozen)  # no state of the optimizer
    start = _expected(task, (*flags.items(), ("base_lr", 1e-30)))
    for name in frozen:
        assert np.array_equal(whole(results)[name], whole(start)[name])
    assert " of the model's " in results[0]["notices"][0]
