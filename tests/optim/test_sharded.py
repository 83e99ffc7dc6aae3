"""Optimizers on shards of layers, and the loss scale of sharded models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stormo.config import schema
from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.optim import LARS
from stormo.optim.sharded import ShardedGradScaler, check_elementwise, to_local_params
from stormo.optim.table import OPTIMIZERS, make_optimizer
from tests.optim.layers import set_gradients

MADE: dict[str, Any] = {
    "sgd": lambda p, **how: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **how),
    "adam": lambda p, **how: torch.optim.Adam(p, lr=0.1, amsgrad=True, **how),
    "adamw": lambda p, **how: torch.optim.AdamW(p, lr=0.1, **how),
    "adagrad": lambda p, **how: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5, **how),
    "adadelta": lambda p, **how: torch.optim.Adadelta(p, lr=0.1, **how),
    "adamax": lambda p, **how: torch.optim.Adamax(p, lr=0.1, **how),
    "nadam": lambda p, **how: torch.optim.NAdam(p, lr=0.1, **how),
    "radam": lambda p, **how: torch.optim.RAdam(p, lr=0.1, **how),
    "rmsprop": lambda p, **how: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True, **how),
    "asgd": lambda p, **how: torch.optim.ASGD(p, lr=0.1, t0=2, **how),
    "rprop": lambda p, **how: torch.optim.Rprop(p, lr=0.1, **how),
}
FUSED = ("sgd", "adam", "adamw", "adagrad")
SHAPES = ((5, 3), (4,), (3, 2, 2), (2, 2))
CUTS = ((0, 2, 5), (0, 4, 4), (0, 1, 3), None)  # rows of two workers; of the last layer the first has all, as one box


def _part(worker: int, layer: int, whole: Tensor) -> Tensor | None:
    cuts = CUTS[layer]
    if cuts is None:
        return None if worker else whole
    return whole[cuts[worker] : cuts[worker + 1]]


def _made(name: str, layers: list[nn.Parameter], how: dict[str, bool]) -> torch.optim.Optimizer:
    named = [(f"layer{number}", layer) for number, layer in enumerate(layers)]
    groups = [{"params": named[:3], "weight_decay": 0.1}, {"params": named[3:], "lr": 0.2}]
    return MADE[name](groups, **how)  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["loop", "foreach", "fused"])
@pytest.mark.parametrize("name", MADE)
def test_parts_are_stepped_as_the_whole(name: str, how: str) -> None:
    if how == "fused" and name not in FUSED:
        with pytest.raises(TypeError):
            MADE[name]([nn.Parameter(torch.ones(1))], fused=True)
        return
    options = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}[how]
    generator = torch.Generator().manual_seed(0)
    whole = [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in SHAPES]
    workers: list[tuple[torch.optim.Optimizer, list[Tensor | None]]] = []
    for worker in range(2):
        found = [_part(worker, number, layer.detach().clone()) for number, layer in enumerate(whole)]
        parts = [None if part is None else nn.Parameter(part.clone()) for part in found]
        optimizer = _made(name, whole, options)
        check_elementwise(optimizer)
        to_local_params(optimizer, dict(zip(whole, parts, strict=True)))
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
        assert [group["param_names"] for group in optimizer.param_groups] == [
            ["layer0", "layer1", "layer2"],
            [] if worker else ["layer3"],
        ]
        workers.append((optimizer, list(parts)))
    expected = _made(name, whole, options)
    for step in range(6):
        set_gradients(whole, step)
        for worker, (optimizer, local) in enumerate(workers):
            for number, (layer, part) in enumerate(zip(whole, local, strict=True)):
                if part is not None:
                    assert layer.grad is not None
                    given = _part(worker, number, layer.grad)
                    assert given is not None
                    part.grad = given.clone()
            optimizer.step()
        expected.step()  # last, as torch's sgd may change gradients
    for worker, (optimizer, local) in enumerate(workers):
        assert set(optimizer.state) == {part for part in local if part is not None}
        for number, (layer, part) in enumerate(zip(whole, local, strict=True)):
            if part is not None:
                answer = _part(worker, number, layer.detach())
                torch.testing.assert_close(part.detach(), answer, rtol=1e-13, atol=1e-13)


def test_an_optimizer_of_a_model_without_values_is_moved_too() -> None:
    for name in ("adamw", "adagrad"):
        whole = nn.Parameter(torch.empty(4, 2, device="meta"))
        optimizer = MADE[name]([whole], fused=True)
        part = nn.Parameter(torch.ones(3, 2))
        to_local_params(optimizer, {whole: part})
        part.grad = torch.ones(3, 2)
        optimizer.step()
        assert (part < 1).all()
        assert all(value.device.type == "cpu" for value in optimizer.state[part].values())


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_an_optimizer_that_has_taken_steps_is_not_moved(name: str) -> None:
    layer = nn.Parameter(torch.ones(4, 2))
    optimizer = MADE[name]([layer])
    layer.grad = torch.ones(4, 2)
    optimizer.step()
    with pytest.raises(SettingError, match=r"(SGD|Adagrad), comes with a state, but"):
        to_local_params(optimizer, {layer: nn.Parameter(torch.ones(2, 2))})


class Other(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Same(torch.optim.AdamW):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)


class Gathering(torch.optim.AdamW):
    def _init_group(self, *arguments: Any) -> Any:
        return super()._init_group(*arguments)


class Layered(LARS):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Certain(Other):
    elementwise = True


class Doubtful(torch.optim.SGD):
    elementwise = False


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_those_of_the_table_may_step_parts(name: str) -> None:
    optimizer = make_optimizer(nn.Linear(2, 2), schema.Optimizer(optimizer=name))
    check_elementwise(optimizer)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # wraps `step`
    check_elementwise(optimizer)


@pytest.mark.parametrize("kind", [Same, Certain])
def test_a_class_that_steps_the_same_or_says_so_may(kind: Any) -> None:
    check_elementwise(kind([nn.Parameter(torch.ones(2, 2))]))


@pytest.mark.parametrize(
    "kind",
    [
        *(torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Muon),
        *(Other, Gathering, Doubtful),
        lambda layers: Layered(layers, lr=0.1),
    ],
)
def test_a_step_that_may_need_the_whole_is_refused(kind: Any) -> None:
    optimizer = kind([nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(SettingError) as refused:
        check_elementwise(optimizer)
    said = str(refused.value)
    assert said.startswith(f"the optimizer is {type(optimizer).__name__}, but ")
    assert "set --strategy ddp" in said


def clipped(*_: Any) -> None:
    """A hook."""


@pytest.mark.parametrize("method", ["register_step_pre_hook", "register_step_post_hook"])
@pytest.mark.parametrize("make", [MADE["sgd"], lambda p: LARS(p, lr=0.1)], ids=["sgd", "lars"])
def test_a_hook_is_named_not_the_kind_of_optimizer(make: Any, method: str) -> None:
    optimizer = make([nn.Parameter(torch.ones(2))])
    handle = getattr(optimizer, method)(clipped)
    with pytest.raises(SettingError, match=rf"has a hook, {method}\(clipped\), but .*; leave the hook out"):
        check_elementwise(optimizer)
    handle.remove()
    check_elementwise(optimizer)


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda parameters: torch.optim.SGD(parameters, lr=1.0, fused=True),  # looks for infinities by itself
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    "layer-wise": lambda parameters: LARS(parameters, lr=1.0, momentum=0.0),
}


def _steps(world: World, kind: str, unscales: bool) -> list[tuple[list[float], float, int]]:
    """The last worker has infinities in the second of three steps; the first holds nothing at all."""
    held = [] if world.rank == 0 else [nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(2))]
    optimizer = KINDS[kind]([{"params": [nn.Parameter(torch.zeros(1))]}])
    optimizer.param_groups[0]["params"] = held
    calls = 0

    def agree(found: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return world.max(found)

    scaler = ShardedGradScaler(world.device, agree, init_scale=8.0, growth_interval=100)
    result = []
    for step in range(3):
        for parameter in held:
            parameter.grad = torch.full_like(parameter, scaler.get_scale())
            if step == 1 and world.rank == world.size - 1:
                parameter.grad[:1] = torch.inf
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        result.append(([number for part in held for number in part.tolist()], scaler.get_scale(), calls))
    return result


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_infinities_of_one_worker_stop_all(run_ranks: Callable[..., list[Any]], kind: str, unscales: bool) -> None:
    nothing, *others = run_ranks(_steps, 3, kind, unscales)
    assert nothing == [([], 8.0, 1), ([], 4.0, 2), ([], 4.0, 3)]
    for steps in others:
        assert steps == [([-1.0, -1.0], 8.0, 1), ([-1.0, -1.0], 4.0, 2), ([-2.0, -2.0], 4.0, 3)]


def test_one_that_is_off_asks_nobody_and_its_state_is_that_of_torch() -> None:
    def nobody(found: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    optimizer = KINDS["plain"]([parameter])
    off = ShardedGradScaler(torch.device("cpu"), nobody, enabled=False)
    off.unscale_(optimizer)
    off.step(optimizer)
    off.update()
    assert parameter.tolist() == [-1.0, -1.0]
    assert off.state_dict() == {}
    on, plain = ShardedGradScaler(torch.device("cpu"), lambda found: found), torch.amp.GradScaler("cpu")
    assert on.state_dict() == plain.state_dict()
    on.load_state_dict({**plain.state_dict(), "scale": 32.0})
    assert on.scale(torch.ones(())).item() == on.get_scale() == 32.0
