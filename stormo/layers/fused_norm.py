# mypy: disable-error-code="no-untyped-call, unused-ignore"
"""Batch norm + ReLU + dropout + residual sum as one differentiable operation on the Triton kernels of `norm_kernels`.

Of the activations only x is kept for the backward pass; the residual's gradient is the incoming one, not a copy.
Importing this file imports triton: `NormAct` does so on CUDA only, after checking dtypes and layouts.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stormo.layers import norm_kernels
from stormo.layers.sync_batch_norm import Reduce, unpack_moments, update_running

# One channel width for all tiles: 32 divides the usual channel counts, so no lane idles, and each kernel is compiled
# once. In bf16 a warp reads 8 rows of 64 contiguous bytes, 16 bytes a thread. The row counts give every thread 4 loads
# in flight within the registers that several programs on one multiprocessor leave it.
_STATISTICS: dict[str, Any] = {"BLOCK_ROWS": 128, "BLOCK_CHANNELS": 32, "num_warps": 4}
_APPLY = _STATISTICS
_GRADIENT_SUMS = _STATISTICS
_INPUT_GRADIENT: dict[str, Any] = {"BLOCK_ROWS": 64, "BLOCK_CHANNELS": 32, "num_warps": 4}
_FINISH: dict[str, Any] = {"BLOCK_PARTIALS": 256, "BLOCK_CHANNELS": 8, "num_warps": 4}

_STATISTICS_PER_SM = 8  # programs that a multiprocessor's registers hold at once: one wave, no tail
_GRADIENT_SUMS_PER_SM = 4
_STREAMED_PER_SM = 16  # element-wise programs: a few waves, which the hardware balances
_MAX_PARTIALS = 512  # rows of partial sums: two steps of the finishing kernels
_MAX_GRID = 2**15  # CUDA's limit on a grid's second dimension is 65535


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True, kw_only=True, slots=True)
class _Matrix:
    """The rows and channels of one call, and how they are shared out among programs."""

    num_rows: int
    num_channels: int
    num_sms: int

    @staticmethod
    def of(x: Tensor) -> _Matrix:
        """The matrix of a tensor whose dimension 1 is channels."""
        num_channels = x.shape[1]
        return _Matrix(
            num_rows=x.numel() // num_channels, num_channels=num_channels, num_sms=_num_multiprocessors(x.device)
        )

    def reduce_grid(self, tile: dict[str, Any], programs_per_sm: int) -> tuple[int, int]:
        """Channel blocks first: neighbouring programs read neighbouring bytes of the same rows."""
        num_blocks = -(-self.num_channels // int(tile["BLOCK_CHANNELS"]))
        num_tiles = -(-self.num_rows // int(tile["BLOCK_ROWS"]))
        return num_blocks, max(1, min(num_tiles, _MAX_PARTIALS, programs_per_sm * self.num_sms // num_blocks))

    def stream_grid(self, tile: dict[str, Any]) -> tuple[tuple[int, int], int]:
        """The grid of an element-wise kernel and the number of tiles of each program."""
        num_blocks = -(-self.num_channels // int(tile["BLOCK_CHANNELS"]))
        num_tiles = -(-self.num_rows // int(tile["BLOCK_ROWS"]))
        num_programs = max(1, min(num_tiles, _MAX_GRID, _STREAMED_PER_SM * self.num_sms // num_blocks))
        tiles_each = -(-num_tiles // num_programs)
        return (num_blocks, -(-num_tiles // tiles_each)), tiles_each

    def finish_grid(self) -> tuple[int]:
        """The grid of the finishing kernels."""
        return (-(-self.num_channels // int(_FINISH["BLOCK_CHANNELS"])),)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mask:
    """What the ReLU and dropout masks are recomputed from."""

    floor: float
    seed: int = 0
    threshold: int = 0  # a 16-bit random number below it is dropped
    keep_scale: float = 1.0

    @staticmethod
    def draw(dropout: float, activation: bool) -> _Mask:
        """Draws a seed from torch's CPU generator: part of the saved random state, and no device synchronisation."""
        floor = 0.0 if activation else float("-inf")
        if dropout == 0.0:
            return _Mask(floor=floor)
        number = int(torch.randint(2**62, (), device="cpu"))
        # dropout · 2^16 is rounded up or down at random, so that the chance to be dropped is exact over calls; the
        # scale follows the rounded value, so that the expected output is exact in every call.
        threshold = min(int(dropout * 2**16 + (number >> 38) / 2**24), 2**16 - 1)
        return _Mask(floor=floor, seed=number, threshold=threshold, keep_scale=2**16 / (2**16 - threshold))

    def arguments(self) -> dict[str, Any]:
        """The kernels' arguments."""
        return {
            "floor": self.floor,
            "seed": self.seed,
            "threshold": self.threshold,
            "keep_scale": self.keep_scale,
            "DROPOUT": self.threshold > 0,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    training: bool
    momentum: float
    eps: float
    mask: _Mask
    reduce_stats: Reduce | None
    reduce_grads: Reduce | None
    absent: bool


def _on_device(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _partial_statistics(x: Tensor, matrix: _Matrix) -> Tensor:
    grid = matrix.reduce_grid(_STATISTICS, _STATISTICS_PER_SM)
    partials = torch.empty(2, grid[1], matrix.num_channels, dtype=torch.float32, device=x.device)
    norm_kernels.statistics_kernel[grid](x, partials, matrix.num_rows, matrix.num_channels, **_STATISTICS)
    return partials


def _global_statistics(
    x: Tensor, matrix: _Matrix, running_mean: Tensor, running_var: Tensor, options: _Options, reduce: Reduce
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, inverse deviation and count over all ranks, in one collective."""
    vector = torch.zeros(1 + 2 * matrix.num_channels, dtype=torch.float64, device=x.device)
    if not options.absent:
        total, squares = _partial_statistics(x, matrix).sum(1, dtype=torch.float64)
        # Every rank has its own shift, so what is summed over ranks is taken back to zero, in float64.
        shift = (x[0] if x.dim() == 2 else x[0, :, 0, 0]).double()
        vector[0] = matrix.num_rows
        vector[1:] = torch.cat(
            (total + matrix.num_rows * shift, squares + shift * (2.0 * total + matrix.num_rows * shift))
        )
    reduce(vector)
    count, mean, variance = unpack_moments(vector)
    update_running(running_mean, running_var, vector, mean, variance, options.momentum)
    return mean.float(), (variance + options.eps).rsqrt().float(), count


class _FusedNormAct(torch.autograd.Function):
    """The kernels as one differentiable operation; nothing in it is subject to autocast."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        num_batches_tracked: Tensor | None,
        options: _Options,
    ) -> Tensor:
        matrix = _Matrix.of(x)
        count = None
        with _on_device(x):
            if not options.training:
                # A copy: a training pass before this one's backward would move the running mean in place.
                mean, invstd = running_mean.clone(), (running_var + options.eps).rsqrt()
            elif options.reduce_stats is not None:
                if num_batches_tracked is not None:
                    num_batches_tracked.add_(1)
                mean, invstd, count = _global_statistics(
                    x, matrix, running_mean, running_var, options, options.reduce_stats
                )
            else:
                mean, invstd = torch.empty_like(running_mean), torch.empty_like(running_var)
                partials = _partial_statistics(x, matrix)
                norm_kernels.finish_statistics_kernel[matrix.finish_grid()](
                    x,
                    partials,
                    mean,
                    invstd,
                    running_mean,
                    running_var,
                    num_batches_tracked,
                    matrix.num_rows,
                    partials.shape[1],
                    matrix.num_channels,
                    options.momentum,
                    options.eps,
                    **_FINISH,
                )
            y = torch.empty_like(x)
            grid, tiles_each = matrix.stream_grid(_APPLY)
            norm_kernels.apply_kernel[grid](
                x,
                x if residual is None else residual,
                y,
                weight,
                bias,
                mean,
                invstd,
                matrix.num_rows,
                matrix.num_channels,
                tiles_each,
                RESIDUAL=residual is not None,
                **options.mask.arguments(),
                **_APPLY,
            )
        ctx.save_for_backward(x, weight, bias, mean, invstd, count)
        ctx.matrix, ctx.options = matrix, options
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, invstd, count = ctx.saved_tensors
        matrix: _Matrix = ctx.matrix
        options: _Options = ctx.options
        grad_residual = grad if ctx.needs_input_grad[1] else None
        dense = grad.contiguous(memory_format=torch.channels_last) if grad.dim() == 4 else grad.contiguous()
        grad_x: Tensor | None = None
        grad_weight, grad_bias = torch.empty_like(weight), torch.empty_like(bias)
        means = torch.empty(2, matrix.num_channels, dtype=torch.float32, device=x.device)
        with _on_device(x):
            grid = matrix.reduce_grid(_GRADIENT_SUMS, _GRADIENT_SUMS_PER_SM)
            partials = torch.empty(2, grid[1], matrix.num_channels, dtype=torch.float32, device=x.device)
            mask = options.mask.arguments()
            norm_kernels.gradient_sums_kernel[grid](
                dense,
                x,
                partials,
                weight,
                bias,
                mean,
                invstd,
                matrix.num_rows,
                matrix.num_channels,
                **mask,
                **_GRADIENT_SUMS,
            )
            if options.training and options.reduce_grads is not None:
                sums = partials.sum(1, dtype=torch.float64)
                grad_bias, grad_weight = sums.float().unbind()
                vector = sums.zero_().view(-1) if options.absent else sums.view(-1)
                options.reduce_grads(vector)
                means = (vector.view(2, -1) / (matrix.num_rows if count is None else count)).float()
            else:
                norm_kernels.finish_gradients_kernel[matrix.finish_grid()](
                    partials,
                    grad_weight,
                    grad_bias,
                    means,
                    matrix.num_rows,
                    partials.shape[1],
                    matrix.num_channels,
                    **_FINISH,
                )
            if not options.training or options.absent:
                means.zero_()  # these samples moved no statistic, so no gradient comes back that way
            if ctx.needs_input_grad[0]:
                grad_x = torch.empty_like(x)
                grid, tiles_each = matrix.stream_grid(_INPUT_GRADIENT)
                norm_kernels.input_gradient_kernel[grid](
                    dense,
                    x,
                    grad_x,
                    weight,
                    bias,
                    mean,
                    invstd,
                    means,
                    matrix.num_rows,
                    matrix.num_channels,
                    tiles_each,
                    **mask,
                    **_INPUT_GRADIENT,
                )
        return grad_x, grad_residual, grad_weight, grad_bias, None, None, None, None


def norm_act(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    *,
    training: bool,
    momentum: float,
    eps: float,
    dropout: float,
    activation: bool,
    num_batches_tracked: Tensor | None = None,
    reduce_stats: Reduce | None = None,
    reduce_grads: Reduce | None = None,
    absent: bool = False,
) -> Tensor:
    """dropout(relu(batch_norm(x))) + residual for a dense 2-D or channels_last x and float32 parameters.

    With `reduce_stats` and `reduce_grads` (both or neither) the statistics are those of all ranks.
    """
    assert (reduce_stats is None) == (reduce_grads is None), "statistics and gradients are reduced together"
    assert reduce_stats is not None or not absent or not training, "an absent rank needs global or running statistics"
    # Anything but the same dtype, shape and layout is added by torch, with its rules of promotion and broadcasting.
    fits = (
        residual is not None
        and residual.dtype == x.dtype
        and residual.shape == x.shape
        and residual.device == x.device
        and residual.is_contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.contiguous_format)
    )
    options = _Options(
        training=training,
        momentum=momentum,
        eps=eps,
        mask=_Mask.draw(dropout if training else 0.0, activation),
        reduce_stats=reduce_stats,
        reduce_grads=reduce_grads,
        absent=absent,
    )
    y: Tensor = _FusedNormAct.apply(
        x, residual if fits else None, weight, bias, running_mean, running_var, num_batches_tracked, options
    )
    return y if residual is None or fits else y + residual
