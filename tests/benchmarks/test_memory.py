"""Bytes that a rank holds, and how they are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import held_bytes, memory
from stormo.tasks.language_model import Size

SMALL = Size(num_layers=2, width=32, num_heads=4, block=8)


def test_between_passes_every_stage_cuts_all() -> None:
    # 16 bytes a parameter in float32
    assert [memory.formula(zero, 1000, 64) for zero in range(4)] == [16000, 250, 250, 250]
    assert {memory.formula(zero, 1000, 1) for zero in range(4)} == {16000}


def test_memory_is_counted_once_with_gradients_and_without_what_was_there() -> None:
    earlier = torch.zeros(1000)
    before = held_bytes.living()
    weight = torch.zeros(100, requires_grad=True)
    views = [weight.detach(), weight.detach()[10:]]
    (weight.sum() * 2).backward()
    assert held_bytes.num_bytes(held_bytes.living(), without=before) == 2 * 400
    assert earlier.untyped_storage()._cdata in before
    del weight
    assert held_bytes.num_bytes(held_bytes.living(), without=before) == 400  # the views', whose gradient went
    assert len(views) == 2


def test_peak_sees_what_comes_and_goes() -> None:
    before = held_bytes.living()
    held = torch.zeros(100)
    with held_bytes.Peak(before) as peak:
        large = held.repeat(10)
        del large
        held.add_(1)
    assert peak.num_bytes == 400 + 4000


@pytest.mark.parametrize("zero", [2, 3])
def test_ranks_hold_what_the_formula_says(run_ranks: Callable[..., list[Any]], zero: int) -> None:
    found = run_ranks(memory.measure, 2, memory.STRATEGIES[zero], SMALL)
    num_parameters = SMALL.num_parameters(block=8, vocabulary=256)
    for held in found:
        assert held.total == pytest.approx(memory.formula(zero, num_parameters, 2), rel=memory.LIMIT)
        assert held.peak > held.total
        assert held.weights + held.gradients + held.state == pytest.approx(held.total, rel=0.01)
