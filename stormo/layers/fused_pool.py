# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-call, unused-ignore"
# ruff: noqa: D103, N803, PLR0124
"""Max-pooling of 2×2 windows on channels_last tensors as one Triton kernel each way.

The forward pass reads x once and keeps one byte an output value; the backward pass writes every input gradient exactly
once. No layout is checked here, and importing this file imports triton: `MaxPool2x2` does so on CUDA only.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from stormo.layers.kernel_calls import launch, on_device

# In bf16 a thread reads 16 bytes of each of the window's four pixels, twice, before it needs the first.
TILE: dict[str, Any] = {"BLOCK_PIXELS": 64, "BLOCK_CHANNELS": 32, "num_warps": 4}


@triton.jit
def _window(
    num_pixels: tl.tensor,
    num_channels: tl.tensor,
    out_width: tl.tensor,
    BLOCK_PIXELS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
) -> tl.tensor:
    # Channel blocks are neighbours in the grid, so that programs side by side read neighbouring bytes.
    num_blocks = tl.cdiv(num_channels, BLOCK_CHANNELS)
    pixels = (tl.program_id(0) // num_blocks) * BLOCK_PIXELS + tl.arange(0, BLOCK_PIXELS)
    channels = (tl.program_id(0) % num_blocks) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    mask = (pixels < num_pixels)[:, None] & (channels < num_channels)[None, :]
    wide = pixels.to(tl.int64)
    # Output pixel p = q · out_width + column has its window's corner at input pixel 4 · q · out_width + 2 · column.
    corner = 4 * wide - 2 * (pixels % out_width)
    outer = wide[:, None] * num_channels + channels[None, :]
    inner = corner[:, None] * num_channels + channels[None, :]
    return outer, inner, mask


@triton.jit
def _later(best: tl.tensor, index: tl.tensor, value: tl.tensor, position: tl.constexpr) -> tl.tensor:
    # torch's rule: the first of equal values, but the last of several NaN.
    better = (value > best) | (value != value)
    return tl.where(better, value, best), tl.where(better, position, index)


@triton.jit(do_not_specialize=["num_pixels", "out_width"])
def max_pool_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    index_ptr: tl.tensor,  # uint8, laid out as y: the position in the window, row by row
    num_pixels: tl.tensor,  # of the output, over all images
    num_channels: tl.tensor,
    out_width: tl.tensor,
    BLOCK_PIXELS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
) -> None:
    outer, inner, mask = _window(num_pixels, num_channels, out_width, BLOCK_PIXELS, BLOCK_CHANNELS)
    below = 2 * tl.cast(out_width, tl.int64) * num_channels
    first = tl.load(x_ptr + inner, mask=mask, other=0.0)
    second = tl.load(x_ptr + inner + num_channels, mask=mask, other=0.0)
    third = tl.load(x_ptr + inner + below, mask=mask, other=0.0)
    fourth = tl.load(x_ptr + inner + below + num_channels, mask=mask, other=0.0)
    best = first.to(tl.float32)
    index = tl.zeros((BLOCK_PIXELS, BLOCK_CHANNELS), tl.int32)
    best, index = _later(best, index, second.to(tl.float32), 1)
    best, index = _later(best, index, third.to(tl.float32), 2)
    best, index = _later(best, index, fourth.to(tl.float32), 3)
    tl.store(y_ptr + outer, best, mask=mask)
    tl.store(index_ptr + outer, index, mask=mask)


@triton.jit(do_not_specialize=["num_pixels", "out_width"])
def max_pool_gradient_kernel(
    grad_ptr: tl.tensor,
    index_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_pixels: tl.tensor,
    num_channels: tl.tensor,
    out_width: tl.tensor,
    BLOCK_PIXELS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
) -> None:
    outer, inner, mask = _window(num_pixels, num_channels, out_width, BLOCK_PIXELS, BLOCK_CHANNELS)
    below = 2 * tl.cast(out_width, tl.int64) * num_channels
    grad = tl.load(grad_ptr + outer, mask=mask, other=0.0)
    index = tl.load(index_ptr + outer, mask=mask, other=0)
    tl.store(out_ptr + inner, tl.where(index == 0, grad, 0.0), mask=mask)
    tl.store(out_ptr + inner + num_channels, tl.where(index == 1, grad, 0.0), mask=mask)
    tl.store(out_ptr + inner + below, tl.where(index == 2, grad, 0.0), mask=mask)
    tl.store(out_ptr + inner + below + num_channels, tl.where(index == 3, grad, 0.0), mask=mask)


def _sizes(y: Tensor) -> tuple[tuple[int], int, int, int]:
    """The grid, and the number of pixels, channels and columns of an output."""
    num_images, num_channels, height, width = y.shape
    num_pixels = num_images * height * width
    num_blocks = -(-num_channels // int(TILE["BLOCK_CHANNELS"]))
    # One dimension: CUDA allows 2^31 - 1 programs in the first and 65535 in the others.
    return (num_blocks * -(-num_pixels // int(TILE["BLOCK_PIXELS"])),), num_pixels, num_channels, width


class _FusedMaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        num_images, num_channels, height, width = x.shape
        shape = (num_images, num_channels, height // 2, width // 2)
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        index = torch.empty_like(y, dtype=torch.uint8)
        grid, *sizes = _sizes(y)
        with on_device(x):
            launch(max_pool_kernel, grid, x, y, index, *sizes, **TILE)
        ctx.save_for_backward(index)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (index,) = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        num_images, num_channels, height, width = grad.shape
        shape = (num_images, num_channels, 2 * height, 2 * width)
        out = torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)
        grid, *sizes = _sizes(grad)
        with on_device(grad):
            launch(max_pool_gradient_kernel, grid, grad, index, out, *sizes, **TILE)
        return out


def max_pool(x: Tensor) -> Tensor:
    """The largest value of each 2×2 window of a dense channels_last x with even sides."""
    y: Tensor = _FusedMaxPool.apply(x)
    return y
