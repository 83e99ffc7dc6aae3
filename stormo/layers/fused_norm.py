# mypy: disable-error-code="no-untyped-call, unused-ignore"
"""Batch norm + ReLU + dropout + residual sum as one differentiable operation on the Triton kernels of `norm_kernels`.

Of the activations only x is kept for the backward pass; the residual's gradient is the incoming one, not a second.
Importing this file imports triton: `NormAct` does so on CUDA only, after checking dtypes and layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stormo.layers import norm_kernels
from stormo.layers.kernel_calls import launch, on_device
from stormo.layers.norm_act import add_residual
from stormo.layers.norm_tiles import FINISH, TILES, Matrix
from stormo.layers.sync_batch_norm import Reduce, unpack_moments, update_running


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mask:
    """What the ReLU and dropout masks are recomputed from, but for the seed."""

    floor: float
    threshold: int = 0  # a 16-bit random number below it is dropped
    keep_scale: float = 1.0

    @staticmethod
    def of(dropout: float, activation: bool) -> _Mask:
        """The mask of a layer; the scale follows the rounded threshold, so that the expected output is exact."""
        floor = 0.0 if activation else float("-inf")
        if dropout == 0.0:
            return _Mask(floor=floor)
        threshold = min(max(round(dropout * 2**16), 1), 2**16 - 1)
        return _Mask(floor=floor, threshold=threshold, keep_scale=2**16 / (2**16 - threshold))

    def draw_seed(self, device: torch.device) -> Tensor | None:
        """A seed by the device's own generator: no wait for the host, and a replayed CUDA graph draws another."""
        return torch.randint(2**62, (1,), device=device) if self.threshold else None

    def operands(self, seed: Tensor | None) -> tuple[Any, ...]:
        """The kernels' arguments."""
        return self.floor, seed, self.threshold, self.keep_scale


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    training: bool
    momentum: float
    eps: float
    mask: _Mask
    reduce: Reduce | None
    absent: bool


def _partial_statistics(x: Tensor, matrix: Matrix) -> Tensor:
    tile = TILES["statistics"]
    grid = matrix.reduce_grid(tile)
    partials = torch.empty(2, grid[1], matrix.num_channels, dtype=torch.float32, device=x.device)
    launch(norm_kernels.statistics_kernel, grid, x, partials, matrix.num_rows, matrix.num_channels, **tile.reduction)
    return partials


def _global_statistics(
    x: Tensor,
    matrix: Matrix,
    running_mean: Tensor,
    running_var: Tensor,
    num_batches: Tensor | None,
    options: _Options,
    reduce: Reduce,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, inverse deviation and count over all ranks, in one collective."""
    vector = torch.zeros(1 + 2 * matrix.num_channels, dtype=torch.float64, device=x.device)
    if not options.absent:
        total, squares = _partial_statistics(x, matrix).sum(1, dtype=torch.float64)
        # Every rank has its own shift, so what is summed over ranks is taken back to zero, in float64.
        shift = (x[0] if x.dim() == 2 else x[0, :, 0, 0]).double()
        vector[:1].fill_(matrix.num_rows)  # an assignment would wait for the device
        vector[1:] = torch.cat(
            (total + matrix.num_rows * shift, squares + shift * (2.0 * total + matrix.num_rows * shift))
        )
    reduce(vector)
    count, mean, variance = unpack_moments(vector)
    update_running(running_mean, running_var, num_batches, vector, mean, variance, options.momentum)
    return mean.float(), (variance + options.eps).rsqrt().float(), count


class _FusedNormAct(torch.autograd.Function):
    """The kernels as one differentiable operation; nothing in it is subject to autocast."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        residual_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        num_batches_tracked: Tensor | None,
        options: _Options,
    ) -> Tensor:
        matrix = Matrix.of(x)
        seed = options.mask.draw_seed(x.device)
        count = None
        with on_device(x):
            if not options.training:
                # A copy: a training pass before this one's backward would move the running mean in place.
                mean, invstd = running_mean.clone(), (running_var + options.eps).rsqrt()
            elif options.reduce is not None:
                statistics = running_mean, running_var, num_batches_tracked
                mean, invstd, count = _global_statistics(x, matrix, *statistics, options, options.reduce)
            else:
                mean, invstd = torch.empty_like(running_mean), torch.empty_like(running_var)
                partials = _partial_statistics(x, matrix)
                launch(
                    norm_kernels.finish_statistics_kernel,
                    matrix.finish_grid(),
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
                    **FINISH,
                )
            y = torch.empty_like(x)
            tile = TILES["apply"]
            grid, tiles_each = matrix.stream_grid(tile)
            launch(
                norm_kernels.apply_kernel,
                grid,
                x,
                x if residual is None else residual,
                residual_bias,
                y,
                weight,
                bias,
                mean,
                invstd,
                matrix.num_rows,
                matrix.num_channels,
                tiles_each,
                *options.mask.operands(seed),
                DROPOUT=seed is not None,
                RESIDUAL=residual is not None,
                **tile.stream,
            )
        ctx.save_for_backward(x, weight, bias, mean, invstd, count, seed)
        ctx.matrix, ctx.options = matrix, options
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, invstd, count, seed = ctx.saved_tensors
        matrix: Matrix = ctx.matrix
        options: _Options = ctx.options
        dense = grad.contiguous(memory_format=torch.channels_last) if grad.dim() == 4 else grad.contiguous()
        grad_residual = dense if ctx.needs_input_grad[1] else None  # so that the layers before it need not copy again
        grad_x: Tensor | None = None
        grad_weight, grad_bias = torch.empty_like(weight), torch.empty_like(bias)
        has_bias_grad = ctx.needs_input_grad[2]
        grad_residual_bias = torch.empty_like(bias) if has_bias_grad else None
        means = torch.empty(2, matrix.num_channels, dtype=torch.float32, device=x.device)
        with on_device(x):
            tile = TILES["gradient_sums"]
            grid = matrix.reduce_grid(tile)
            partials = torch.empty(
                2 + has_bias_grad, grid[1], matrix.num_channels, dtype=torch.float32, device=x.device
            )
            mask = options.mask.operands(seed)
            launch(
                norm_kernels.gradient_sums_kernel,
                grid,
                dense,
                x,
                partials,
                weight,
                bias,
                mean,
                invstd,
                matrix.num_rows,
                matrix.num_channels,
                *mask,
                DROPOUT=seed is not None,
                RESIDUAL_BIAS=has_bias_grad,
                **tile.reduction,
            )
            if options.training and options.reduce is not None:
                sums = partials.sum(1, dtype=torch.float64)
                grad_bias, grad_weight, *others = sums.float().unbind()
                grad_residual_bias = others[0] if others else None  # a parameter's gradient: local, as the other two
                vector = sums[:2].zero_().view(-1) if options.absent else sums[:2].view(-1)
                options.reduce(vector)
                means = (vector.view(2, -1) / (matrix.num_rows if count is None else count)).float()
            else:
                launch(
                    norm_kernels.finish_gradients_kernel,
                    matrix.finish_grid(),
                    partials,
                    grad_weight,
                    grad_bias,
                    grad_residual_bias,
                    means,
                    matrix.num_rows,
                    partials.shape[1],
                    matrix.num_channels,
                    **FINISH,
                )
            if not options.training or options.absent:
                means.zero_()  # these samples moved no statistic, so no gradient comes back that way
            if ctx.needs_input_grad[0]:
                grad_x = torch.empty_like(x)
                tile = TILES["input_gradient"]
                grid, tiles_each = matrix.stream_grid(tile)
                launch(
                    norm_kernels.input_gradient_kernel,
                    grid,
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
                    *mask,
                    DROPOUT=seed is not None,
                    **tile.stream,
                )
        return grad_x, grad_residual, grad_residual_bias, grad_weight, grad_bias, None, None, None, None


def _fits(residual: Tensor, x: Tensor) -> bool:
    layout = torch.channels_last if x.dim() == 4 else torch.contiguous_format
    return (
        residual.dtype == x.dtype
        and residual.shape == x.shape
        and residual.device == x.device
        and residual.is_contiguous(memory_format=layout)
    )


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
    residual_bias: Tensor | None = None,
    num_batches_tracked: Tensor | None = None,
    reduce: Reduce | None = None,
    absent: bool = False,
) -> Tensor:
    """dropout(relu(batch_norm(x))) + residual + residual_bias for a dense 2-D or channels_last x, float32 parameters.

    With `reduce` the statistics are those of all ranks.
    """
    assert reduce is not None or not absent or not training, "an absent rank needs global or running statistics"
    # Anything but the same dtype, shape and layout is added by torch, with its rules of promotion and broadcasting.
    fits = (residual is None or _fits(residual, x)) and (
        residual_bias is None or _fits(residual_bias, bias)  # a float32 vector, as every parameter here
    )
    options = _Options(
        training=training,
        momentum=momentum,
        eps=eps,
        mask=_Mask.of(dropout if training else 0.0, activation),
        reduce=reduce,
        absent=absent,
    )
    y: Tensor = _FusedNormAct.apply(
        x,
        residual if fits else None,
        residual_bias if fits else None,
        weight,
        bias,
        running_mean,
        running_var,
        num_batches_tracked,
        options,
    )
    return y if fits else add_residual(y, residual, residual_bias)
