from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stormo.layers.max_pool import MaxPool2x2

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_HAS_TRITON = importlib.util.find_spec("triton") is not None

interpreted = pytest.mark.skipif(not (_HAS_TRITON and _INTERPRETED), reason="runs inside test_interpreter.py")
needs_cuda = pytest.mark.skipif(
    not (_HAS_TRITON and torch.cuda.is_available()), reason="needs a CUDA device and the package triton"
)
# Several tiles (64 pixels, 32 channels), tails in both directions, sides that differ, windows of one row or column.
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(3, 16, 10, 12), (2, 40, 28, 28), (5, 7, 2, 6), (1, 33, 8, 2), (2, 1, 4, 4), (1, 160, 14, 14)]


def _images(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Few distinct values, so that most windows have ties."""
    values = torch.randint(-3, 3, shape, generator=torch.Generator().manual_seed(sum(shape))).clamp(min=-1)
    return values.to(device, dtype).contiguous(memory_format=torch.channels_last)


def _both(pool: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = pool(x)
    y.backward(grad)
    assert x.grad is not None
    return y.detach(), x.grad


def _check(x: Tensor, reference: str | None = None) -> None:
    """Against torch's own pool on the same device, or on another."""
    from stormo.layers.fused_pool import max_pool

    num_images, num_channels, height, width = x.shape
    grad = torch.randn(num_images, num_channels, height // 2, width // 2).to(x.device, x.dtype)  # not channels_last
    y, grad_x = _both(max_pool, x, grad)
    where = reference or x.device
    expected, expected_grad = _both(lambda values: F.max_pool2d(values, 2), x.to(where), grad.to(where))
    torch.testing.assert_close(y.to(where), expected, rtol=0.0, atol=0.0, equal_nan=True)
    assert torch.equal(grad_x.to(where), expected_grad)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert y.dtype == x.dtype


@interpreted
@pytest.mark.parametrize(("shape", "dtype"), list(zip(SHAPES, [*DTYPES, *DTYPES], strict=True)))
def test_interpreted_pool_equals_torchs_in_every_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    _check(_images(shape, dtype))


def _with_odd_values(device: str, dtype: torch.dtype) -> Tensor:
    """Each window holds one of the 256 arrangements of NaN, infinities and a plain number."""
    values = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0])
    codes = torch.cartesian_prod(*[torch.arange(4)] * 4)  # [256, 4]
    windows = values[codes].view(1, 16, 16, 2, 2)
    images = windows.permute(0, 1, 3, 2, 4).reshape(1, 1, 32, 32).expand(2, 8, 32, 32)
    return images.to(device, dtype).contiguous(memory_format=torch.channels_last)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_interpreted_nan_and_infinity_go_where_torch_sends_them(dtype: torch.dtype) -> None:
    _check(_with_odd_values("cpu", dtype))


@interpreted
def test_interpreted_gradient_is_written_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from stormo.layers import fused_pool

    x = _images((3, 40, 6, 10), torch.float32)
    pooled = fused_pool.max_pool(x.requires_grad_())
    empty = torch.empty

    def full_of_nan(*shape: int, **options: object) -> Tensor:
        return empty(*shape, **options).fill_(float("nan"))  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", full_of_nan)
    pooled.backward(torch.ones_like(pooled))
    monkeypatch.undo()
    assert x.grad is not None
    assert x.grad.sum().item() == pooled.numel()  # no element was left out, none was written twice to another place


@pytest.mark.parametrize("shape", [(2, 3, 6, 8), (2, 3, 7, 9)])
def test_cpu_is_torchs_own_pool(shape: tuple[int, ...]) -> None:
    x = _images(shape, torch.float64)
    assert not MaxPool2x2().is_fused(x)
    assert torch.equal(MaxPool2x2()(x), F.max_pool2d(x, 2))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("shape", [*SHAPES, (64, 160, 28, 28), (65, 320, 14, 14)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_pool_equals_torchs_in_every_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = _images(shape, dtype, "cuda")
    assert MaxPool2x2().is_fused(x)
    _check(x)


@pytest.mark.gpu
@needs_cuda
def test_gpu_nan_and_infinity_go_where_torch_sends_them() -> None:
    # As on the CPU: torch's CUDA kernel begins with minus infinity and sets no index in a window of nothing else.
    _check(_with_odd_values("cuda", torch.bfloat16), reference="cpu")


@pytest.mark.gpu
@needs_cuda
def test_gpu_odd_sides_and_other_layouts_are_torchs() -> None:
    pool = MaxPool2x2()
    odd, plain = torch.randn(2, 8, 5, 6, device="cuda"), torch.randn(2, 8, 6, 6, device="cuda")
    odd = odd.contiguous(memory_format=torch.channels_last)
    for x in (odd, plain, plain.double()):
        assert not pool.is_fused(x)
        assert torch.equal(pool(x), F.max_pool2d(x, 2))


@pytest.mark.gpu
@needs_cuda
def test_gpu_tensors_beyond_two_to_the_31_elements_are_indexed_right() -> None:
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of free device memory")
    shape = (2**9 + 1, 2**10, 2**6, 2**6)  # 2.15e9 elements
    x = torch.empty(shape, device="cuda", dtype=torch.bfloat16, memory_format=torch.channels_last).zero_()
    x[-1, -5:, -1, -2] = 3.0
    x.requires_grad_()
    y = MaxPool2x2()(x)
    assert y[-1, -5:, -1, -1].tolist() == [3.0] * 5
    assert y.count_nonzero().item() == 5
    (grad,) = torch.autograd.grad(y, x, y)
    assert grad[-1, -5:, -1, -2].tolist() == [3.0] * 5
    assert grad.count_nonzero().item() == 5
