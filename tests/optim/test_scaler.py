"""Workers with different parts of a model leave a step out together, and keep one loss scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stormo.distributed.world import World
from stormo.optim import LARS
from stormo.optim.scaler import AgreedGradScaler

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

    scaler = AgreedGradScaler(world.device, agree, init_scale=8.0, growth_interval=100)
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
    off = AgreedGradScaler(torch.device("cpu"), nobody, enabled=False)
    off.unscale_(optimizer)
    off.step(optimizer)
    off.update()
    assert parameter.tolist() == [-1.0, -1.0]
    assert off.state_dict() == {}
    on, plain = AgreedGradScaler(torch.device("cpu"), lambda found: found), torch.amp.GradScaler("cpu")
    assert on.state_dict() == plain.state_dict()
    on.load_state_dict({**plain.state_dict(), "scale": 32.0})
    assert on.scale(torch.ones(())).item() == on.get_scale() == 32.0
