"""GELU in the form for torch.compile, at every 16-bit number."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stormo.layers.gelu import gelu


def _numbers(dtype: torch.dtype) -> Tensor:
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    return numbers[numbers.isfinite()]


def _exact(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.double().requires_grad_()
    y = F.gelu(wide)
    y.sum().backward()
    assert wide.grad is not None
    return y.detach(), wide.grad


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile does so itself
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compiled_it_is_as_good_as_torchs_own(dtype: torch.dtype) -> None:
    x = _numbers(dtype).requires_grad_()
    y = torch.compile(gelu, fullgraph=True, backend="aot_eager")(x)
    y.sum().backward()
    assert x.grad is not None
    assert y.dtype == x.grad.dtype == dtype
    exact, derivative = _exact(x.detach())
    step = torch.finfo(dtype).eps  # twice what rounding to nearest may be off
    torch.testing.assert_close(y.double(), exact, rtol=0.51 * step, atol=1e-6)
    torch.testing.assert_close(x.grad.double(), derivative, rtol=0.51 * step, atol=1e-6)
    ours, torchs = ((each.double() - exact).abs().mean() for each in (y, F.gelu(x)))
    assert ours <= torchs * 1.0001  # halfway between two 16-bit numbers, 2e-7 decide how one is rounded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_it_is_torchs_own_unless_compiled_in_16_bits(dtype: torch.dtype) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(gelu(x), F.gelu(x))
    if dtype != torch.bfloat16:
        assert torch.equal(torch.compile(gelu, fullgraph=True, backend="aot_eager")(x), F.gelu(x))
