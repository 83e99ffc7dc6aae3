"""NovoGrad: what holds of its state and its step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stormo.optim import NovoGrad
from tests.optim.layers import make_layers, set_gradients, take_steps


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_second_moment_is_one_number_a_layer(dtype: Any) -> None:
    layers = make_layers(dtype)
    optimizer = NovoGrad(layers, lr=0.1, adapt=True)
    take_steps(optimizer, layers, range(3))
    for layer in layers:
        state = optimizer.state[layer]
        assert state.keys() == {"exp_avg", "exp_avg_sq"}
        assert state["exp_avg_sq"].shape == ()
        assert state["exp_avg"].shape == layer.shape
    default = NovoGrad(layers, lr=0.1)
    take_steps(default, layers, [0])
    assert [("exp_avg_sq" in default.state[layer]) for layer in layers] == [True, True, False, False]


def test_it_starts_as_the_square_of_the_first_norm() -> None:
    layers = make_layers()[:2]
    optimizer = NovoGrad(layers, lr=0.1)
    for seed in range(2):
        set_gradients(layers, seed)
        squares = [float(layer.grad.square().sum()) for layer in layers if layer.grad is not None]
        before = [
            optimizer.state[layer].get("exp_avg_sq", torch.tensor(square)).item()
            for layer, square in zip(layers, squares, strict=True)
        ]
        optimizer.step()
        for layer, old, square in zip(layers, before, squares, strict=True):
            expected = 0.98 * old + 0.02 * square
            assert float(optimizer.state[layer]["exp_avg_sq"]) == pytest.approx(expected, rel=1e-6)


def test_the_first_step_is_as_long_as_the_rate() -> None:
    layers = make_layers()[:2]
    before = [layer.detach().clone() for layer in layers]
    take_steps(NovoGrad(layers, lr=0.25), layers, [0])
    for layer, old in zip(layers, before, strict=True):
        assert float((layer.detach() - old).norm()) == pytest.approx(0.25, rel=1e-7)


def test_averaging_scales_a_step_by_what_beta1_leaves() -> None:
    layers, averaged = make_layers(), make_layers()
    before = [layer.detach().clone() for layer in layers]
    take_steps(NovoGrad(layers, lr=0.1), layers, [0])
    take_steps(NovoGrad(averaged, lr=0.1, grad_averaging=True), averaged, [0])
    for layer, other, old in zip(layers, averaged, before, strict=True):
        torch.testing.assert_close(other.detach() - old, 0.05 * (layer.detach() - old), rtol=1e-10, atol=1e-15)
