"""LAMB: what holds of its step and its state."""

from __future__ import annotations

import pytest
import torch

from stormo.optim import LAMB
from tests.optim.layers import make_layers, set_gradients, take_steps


def test_a_layer_moves_by_the_rate_times_its_norm() -> None:
    layers = make_layers(shapes=[(4, 3), (2, 2, 3)])
    optimizer = LAMB(layers, lr=0.25, weight_decay=0.1)
    for seed in range(5):
        set_gradients(layers, seed)
        before = [layer.detach().clone() for layer in layers]
        optimizer.step()
        for layer, old in zip(layers, before, strict=True):
            assert float((layer.detach() - old).norm()) == pytest.approx(0.25 * float(old.norm()), rel=1e-12)


def test_bounds_hold_the_norm_of_the_weights() -> None:
    (layer,) = make_layers(shapes=[(4, 3)])
    for bounds, norm in (((0.0, 0.5), 0.5), ((9.0, 10.0), 9.0)):
        before = layer.detach().clone()
        set_gradients([layer], 0)
        LAMB([layer], lr=0.25, norm_bounds=bounds).step()
        assert float((layer.detach() - before).norm()) == pytest.approx(0.25 * norm, rel=1e-12)


def test_a_low_bound_gives_a_layer_of_zeros_its_ratio_and_groups_have_bounds_of_their_own() -> None:
    zeros, free = (torch.nn.Parameter(torch.zeros(4, 3, dtype=torch.float64)) for _ in range(2))
    optimizer = LAMB([zeros], lr=0.25, norm_bounds=(2.0, 10.0))
    optimizer.add_param_group({"params": [free], "norm_bounds": None})
    set_gradients([zeros, free], 0)
    optimizer.step()
    assert float(zeros.detach().norm()) == pytest.approx(0.25 * 2.0, rel=1e-12)
    assert free.detach().abs().max() == pytest.approx(0.25, rel=1e-5)  # the plain rate: each element by 1 in Adam


def test_layers_count_their_own_steps_in_host_memory() -> None:
    layers = make_layers()
    optimizer = LAMB(layers, lr=0.1)
    take_steps(optimizer, layers, range(2))
    set_gradients(layers, 2)
    layers[0].grad = None
    optimizer.step()
    steps = [optimizer.state[layer]["step"] for layer in layers]
    assert [int(step) for step in steps] == [2, 3, 3, 3]
    assert {(step.device.type, step.dtype, step.ndim) for step in steps} == {("cpu", torch.float32, 0)}
    assert {key for layer in layers for key in optimizer.state[layer]} == {"step", "exp_avg", "exp_avg_sq"}
