"""Scripts as users write them are compared with one process: equal, refused, or found to differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.own_tasks.scripts import Weights, _loader, _net, _weights, compare, sum_declared, sum_undeclared


def halved(world: Any) -> Weights:
    """Hides from stormo that its loss is a sum."""
    model = _net(6, 4, 2)
    model, optimizer = world.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for x, y in world.loader(_loader()):
        optimizer.zero_grad()
        world.backward(F.mse_loss(model(x), y, reduction="sum"), reduction="mean")
        optimizer.step()
    return _weights(model)


def test_a_script_is_equal_refused_or_silently_different(run_ranks: Callable[..., list[Any]]) -> None:
    found = {script: compare(run_ranks, script, (1, 2)) for script in (sum_declared, sum_undeclared, halved)}
    assert [outcome.verdict for outcome in found.values()] == ["equal", "refused", "silent"]
    assert 'reduction="sum"' in found[sum_undeclared].detail
