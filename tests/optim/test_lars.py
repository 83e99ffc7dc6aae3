"""LARS and LARC: what holds of their rates, whatever the layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from stormo.optim import LARC, LARS
from tests.optim.layers import make_layers, set_gradients

powers = st.integers(-40, 40).map(lambda power: 2.0**power)


def _moved(kind: Any, weight: Tensor, gradient: Tensor, **options: Any) -> Tensor:
    layer = nn.Parameter(weight.clone())
    layer.grad = gradient
    kind([layer], **{"lr": 0.5, **options}).step()
    return layer.detach() - weight


def _layer(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


@given(st.integers(0, 1000), powers)
def test_the_step_of_lars_does_not_change_with_the_scale_of_the_gradient(seed: int, scale: float) -> None:
    weight, gradient = _layer(seed)
    step, scaled = _moved(LARS, weight, gradient), _moved(LARS, weight, gradient * scale)
    torch.testing.assert_close(scaled, step, rtol=1e-12, atol=1e-15)
    assert float(step.norm()) == pytest.approx(0.5 * 0.001 * float(weight.norm()))


@given(st.integers(0, 1000), powers, st.floats(1e-3, 1e3), st.floats(0, 1), st.floats(1e-3, 10))
def test_the_rate_of_larc_is_never_above_the_global_one(
    seed: int, scale: float, trust: float, decay: float, rate: float
) -> None:
    weight, gradient = _layer(seed)
    gradient = gradient * scale
    step = _moved(LARC, weight, gradient, lr=rate, trust_coefficient=trust, weight_decay=decay)
    whole = gradient + decay * weight
    norm = float(weight.norm())
    local = trust * norm / (float(gradient.norm()) + decay * norm)
    # Weights are rounded, and so is what they moved by.
    torch.testing.assert_close(-step, min(local, rate) * whole, rtol=1e-6, atol=1e-12)


def test_momentum_starts_with_the_scaled_step_and_keeps_the_rate_it_was_made_with() -> None:
    (layer,) = make_layers(shapes=[(4, 3)])
    optimizer = LARS([layer], lr=0.5, weight_decay=0.1)
    set_gradients([layer], 0)
    before = layer.detach().clone()
    optimizer.step()
    buffer = optimizer.state[layer]["momentum_buffer"].clone()
    torch.testing.assert_close(before - buffer, layer.detach(), rtol=0, atol=1e-15)
    optimizer.param_groups[0]["lr"] = 0.0  # nothing new is added, and what was goes on
    before = layer.detach().clone()
    optimizer.step()
    torch.testing.assert_close(before - 0.9 * buffer, layer.detach(), rtol=0, atol=1e-15)


def test_without_momentum_there_is_no_state() -> None:
    layers = make_layers()
    optimizer = LARC(layers, lr=0.5, momentum=0.0)
    set_gradients(layers, 0)
    optimizer.step()
    assert not any(optimizer.state.values())
