from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stormo.errors import SettingError
from stormo.layers.norm_act import NormAct, fused_obstacle, is_row_major
from stormo.layers.sync_batch_norm import set_absent


def _images(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def test_state_dict_is_that_of_batch_norm() -> None:
    reference, layer = nn.BatchNorm2d(5), NormAct(5)
    nn.init.normal_(reference.weight)
    layer.load_state_dict(reference.state_dict(), strict=True)
    assert {name: (value.shape, value.dtype) for name, value in layer.state_dict().items()} == {
        name: (value.shape, value.dtype) for name, value in reference.state_dict().items()
    }
    assert torch.equal(layer.weight, reference.weight)


@pytest.mark.parametrize("shape", [(6, 5), (4, 5, 3), (4, 5, 3, 3), (4, 5, 2, 3, 2)])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", [False, True])
def test_training_equals_norm_then_relu_then_sum(shape: tuple[int, ...], residual: bool, activation: bool) -> None:
    x, other = _images(*shape), _images(*shape) if residual else None
    layer = NormAct(5, momentum=0.3, eps=1e-3, activation=activation).double()
    nn.init.normal_(layer.weight)
    mean, var = torch.zeros(5).double(), torch.ones(5).double()
    expected = F.batch_norm(x, mean, var, layer.weight, layer.bias, True, 0.3, 1e-3)
    expected = F.relu(expected) if activation else expected
    assert torch.equal(layer(x, other), expected if other is None else expected + other)
    assert torch.equal(layer.running_mean, mean)
    assert torch.equal(layer.running_var, var)
    assert layer.num_batches_tracked.item() == 1


def test_evaluation_uses_running_statistics_and_drops_nothing() -> None:
    layer = NormAct(5, dropout=0.5).double().eval()
    layer.running_mean.normal_()
    x = _images(4, 5, 3, 3)
    expected = F.relu(F.batch_norm(x, layer.running_mean.clone(), layer.running_var.clone(), layer.weight, layer.bias))
    assert torch.equal(layer(x), expected)
    assert layer.num_batches_tracked.item() == 0


def test_dropout_comes_before_the_residual() -> None:
    layer = NormAct(4, dropout=0.4, activation=False)
    torch.manual_seed(0)
    y = layer(_images(500, 4, dtype=torch.float32), torch.full((500, 4), 100.0))
    assert (y == 100.0).float().mean().item() == pytest.approx(0.4, abs=0.05)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_residual_bias_is_what_the_shortcuts_own_bias_would_be(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, shortcut = NormAct(5).to(dtype), nn.Conv2d(3, 5, kernel_size=1).to(dtype)
    assert shortcut.bias is not None
    x, hidden = _images(4, 3, 6, 6, dtype=dtype), _images(4, 5, 6, 6, dtype=dtype)
    y = layer(hidden, residual=F.conv2d(x, shortcut.weight), residual_bias=shortcut.bias)
    y.square().sum().backward()
    gradient, shortcut.bias.grad = shortcut.bias.grad, None
    expected = layer(hidden, residual=shortcut(x))
    expected.square().sum().backward()
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient, shortcut.bias.grad, rtol=tolerance, atol=tolerance)


def test_residual_bias_does_not_widen_the_dtype_under_autocast() -> None:
    layer, shortcut = NormAct(5), nn.Conv2d(3, 5, kernel_size=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        residual = F.conv2d(_images(4, 3, 6, 6, dtype=torch.float32), shortcut.weight)
        y = layer(_images(4, 5, 6, 6, dtype=torch.bfloat16), residual, shortcut.bias)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert shortcut.bias is not None
    assert shortcut.bias.grad is not None
    assert torch.equal(shortcut.bias.grad, torch.full((5,), 4.0 * 6 * 6))


@pytest.mark.parametrize("shape", [(6, 5), (4, 5, 3, 3)])
def test_residual_bias_needs_no_residual(shape: tuple[int, ...]) -> None:
    layer, x, bias = NormAct(5).double(), _images(*shape), _images(5)
    expected = layer(x) + bias.view(1, 5, *([1] * (len(shape) - 2)))
    assert torch.equal(layer(x, residual_bias=bias), expected)


def test_gradients_pass_gradcheck() -> None:
    layer = NormAct(3).double()
    x, residual = _images(4, 3, 2, 2).requires_grad_(), _images(4, 3, 2, 2).requires_grad_()
    assert torch.autograd.gradcheck(layer, (x, residual, _images(3).requires_grad_()))


def test_an_absent_rank_neither_uses_nor_moves_batch_statistics() -> None:
    layer = NormAct(3)
    layer.running_mean.normal_()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    x = _images(1, 3, dtype=torch.float32)
    expected = layer.eval()(x)
    layer.train()
    set_absent(layer, True)
    assert torch.equal(layer(x), expected)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    set_absent(layer, False)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(x)


@pytest.mark.parametrize("dropout", [-0.1, 1.0, float("nan")])
def test_impossible_dropout_is_refused(dropout: float) -> None:
    with pytest.raises(SettingError, match="0 <= dropout < 1"):
        NormAct(3, dropout=dropout)


def test_cpu_is_plain_and_says_why() -> None:
    assert not NormAct(3).is_fused(torch.zeros(2, 3))
    assert fused_obstacle(torch.device("cpu")) == "the fused kernels are for CUDA and the device is cpu"


def test_row_major_means_dense_rows_of_channels() -> None:
    x = torch.zeros(2, 4, 3, 3)
    assert not is_row_major(x)
    last = x.contiguous(memory_format=torch.channels_last)
    assert is_row_major(last)
    assert not is_row_major(last[:, :2])
    assert is_row_major(torch.zeros(3, 4))
    assert not is_row_major(torch.zeros(4, 3).T)
    assert not is_row_major(torch.zeros(2, 4, 3))
