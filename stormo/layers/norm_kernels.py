# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
# ruff: noqa: D103, N803, N806, SIM102
"""Triton kernels of `fused_norm`, over a row-major matrix [rows, channels] in bf16, fp16 or fp32.

The reductions have two stages and no atomics, so results are bitwise repeatable. Masks are never stored: the backward
kernels recompute them from x and a seed. Philox: Salmon et al., SC 2011. No layout is checked here.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile_offsets(num_channels: tl.tensor, channels: tl.tensor, BLOCK_ROWS: tl.constexpr) -> tl.tensor:
    # Inside a tile int32 is enough; the tile's own start is added in int64.
    return tl.arange(0, BLOCK_ROWS)[:, None] * num_channels + channels[None, :]


@triton.jit
def _fold(
    values: tl.tensor, ROWS_KEPT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr
) -> tl.tensor:
    # Rows ROWS_KEPT apart belong to one thread: this sum stays in registers and keeps the accumulators small.
    return tl.sum(tl.reshape(values, (BLOCK_ROWS // ROWS_KEPT, ROWS_KEPT, BLOCK_CHANNELS)), axis=0)


@triton.jit
def _keep_mask(
    first_row: tl.tensor,
    channel_block: tl.tensor,
    seed: tl.tensor,
    threshold: tl.tensor,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
) -> tl.tensor:
    # One Philox call (7 rounds, the fewest its authors found to pass BigCrush) serves 8 neighbouring channels of a row
    # with 16 bits each, so that arithmetic does not outweigh memory traffic. The counter is (channel group, row).
    NUM_GROUPS: tl.constexpr = BLOCK_CHANNELS // 8
    groups = channel_block * NUM_GROUPS + tl.arange(0, NUM_GROUPS)
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    c0 = tl.broadcast_to(groups[None, :], (BLOCK_ROWS, NUM_GROUPS)).to(tl.uint32)
    c1 = tl.broadcast_to(rows[:, None], (BLOCK_ROWS, NUM_GROUPS)).to(tl.uint32)
    zero = tl.zeros((BLOCK_ROWS, NUM_GROUPS), tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, zero, zero, n_rounds=7)
    words = tl.join(tl.join(w0, w1), tl.join(w2, w3))
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, (BLOCK_ROWS, BLOCK_CHANNELS)).to(tl.int32) >= threshold


@triton.jit(do_not_specialize=["num_rows"])
def statistics_kernel(
    x_ptr: tl.tensor,
    partial_ptr: tl.tensor,  # [2, programs, channels]: sums of (x - shift) and of its square
    num_rows: tl.tensor,
    num_channels: tl.tensor,
    ROWS_KEPT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    channels = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    valid = channels < num_channels
    offsets = _tile_offsets(num_channels, channels, BLOCK_ROWS)
    # Around the first row rather than zero: a mean far from zero would cancel the variance away in float32.
    shift = tl.load(x_ptr + channels, mask=valid, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS_KEPT, BLOCK_CHANNELS), tl.float32)
    squares = tl.zeros((ROWS_KEPT, BLOCK_CHANNELS), tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(num_rows, BLOCK_ROWS), tl.num_programs(1), num_stages=STAGES):
        first_row = tile * BLOCK_ROWS
        mask = ((first_row + tl.arange(0, BLOCK_ROWS)) < num_rows)[:, None] & valid[None, :]
        x = tl.load(x_ptr + tl.cast(first_row, tl.int64) * num_channels + offsets, mask=mask, other=0.0).to(tl.float32)
        moved = tl.where(mask, x - shift[None, :], 0.0)
        total += _fold(moved, ROWS_KEPT, BLOCK_ROWS, BLOCK_CHANNELS)
        squares += _fold(moved * moved, ROWS_KEPT, BLOCK_ROWS, BLOCK_CHANNELS)
    out_ptr = partial_ptr + tl.program_id(1) * num_channels + channels
    tl.store(out_ptr, tl.sum(total, axis=0), mask=valid)
    tl.store(out_ptr + tl.num_programs(1) * num_channels, tl.sum(squares, axis=0), mask=valid)


@triton.jit
def _sum_partials(
    partial_ptr: tl.tensor,
    num_partials: tl.tensor,
    num_channels: tl.tensor,
    channels: tl.tensor,
    BLOCK_PARTIALS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
) -> tl.tensor:
    total = tl.zeros((BLOCK_PARTIALS, BLOCK_CHANNELS), tl.float64)
    for first in range(0, num_partials, BLOCK_PARTIALS):
        partials = first + tl.arange(0, BLOCK_PARTIALS)
        mask = (partials < num_partials)[:, None] & (channels < num_channels)[None, :]
        total += tl.load(partial_ptr + partials[:, None] * num_channels + channels[None, :], mask=mask, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["num_rows", "num_partials"])
def finish_statistics_kernel(
    x_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    mean_ptr: tl.tensor,
    invstd_ptr: tl.tensor,
    running_mean_ptr: tl.tensor,
    running_var_ptr: tl.tensor,
    num_batches_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_partials: tl.tensor,
    num_channels: tl.tensor,
    momentum: tl.tensor,
    eps: tl.tensor,
    BLOCK_PARTIALS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
) -> None:
    channels = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    valid = channels < num_channels
    total = _sum_partials(partial_ptr, num_partials, num_channels, channels, BLOCK_PARTIALS, BLOCK_CHANNELS)
    squares_ptr = partial_ptr + num_partials * num_channels
    squares = _sum_partials(squares_ptr, num_partials, num_channels, channels, BLOCK_PARTIALS, BLOCK_CHANNELS)
    count = num_rows.to(tl.float64)
    moved = total / count
    square_mean = squares / count
    shift = tl.load(x_ptr + channels, mask=valid, other=0.0).to(tl.float64)
    mean = (shift + moved).to(tl.float32)
    difference = square_mean - moved * moved
    variance = tl.where(difference < 0.0, 0.0, difference)  # not a maximum, which would turn NaN into 0
    tl.store(mean_ptr + channels, mean, mask=valid)
    tl.store(invstd_ptr + channels, 1.0 / tl.sqrt(variance.to(tl.float32) + eps), mask=valid)

    unbiased = (variance * (count / (count - 1.0))).to(tl.float32)
    old_mean = tl.load(running_mean_ptr + channels, mask=valid)
    old_var = tl.load(running_var_ptr + channels, mask=valid)
    tl.store(running_mean_ptr + channels, (1.0 - momentum) * old_mean + momentum * mean, mask=valid)
    tl.store(running_var_ptr + channels, (1.0 - momentum) * old_var + momentum * unbiased, mask=valid)
    if num_batches_ptr is not None:  # known when the kernel is compiled
        if tl.program_id(0) == 0:
            tl.store(num_batches_ptr, tl.load(num_batches_ptr) + 1)


@triton.jit(do_not_specialize=["num_rows", "tiles_each", "threshold"])
def apply_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    residual_bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    mean_ptr: tl.tensor,
    invstd_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_channels: tl.tensor,
    tiles_each: tl.tensor,
    floor: tl.tensor,  # 0 for ReLU, minus infinity for none
    seed_ptr: tl.tensor,  # one int64, which a replayed CUDA graph draws anew; None without dropout
    threshold: tl.tensor,
    keep_scale: tl.tensor,
    DROPOUT: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    channels = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    valid = channels < num_channels
    offsets = _tile_offsets(num_channels, channels, BLOCK_ROWS)
    mean = tl.load(mean_ptr + channels, mask=valid, other=0.0)[None, :]
    scale = (tl.load(weight_ptr + channels, mask=valid, other=0.0) * tl.load(invstd_ptr + channels, mask=valid))[
        None, :
    ]
    bias = tl.load(bias_ptr + channels, mask=valid, other=0.0)[None, :]
    if residual_bias_ptr is not None:  # known when the kernel is compiled
        residual_bias = tl.load(residual_bias_ptr + channels, mask=valid, other=0.0)[None, :]
    if DROPOUT:
        seed = tl.load(seed_ptr)
    num_tiles = tl.cdiv(num_rows, BLOCK_ROWS)
    begin = tl.program_id(1) * tiles_each
    for tile in tl.range(begin, tl.minimum(begin + tiles_each, num_tiles), num_stages=STAGES):
        # From the last row to the first: the reduction before this ended there, so those rows are still in the cache.
        first_row = (num_tiles - 1 - tile) * BLOCK_ROWS
        start = tl.cast(first_row, tl.int64) * num_channels
        mask = ((first_row + tl.arange(0, BLOCK_ROWS)) < num_rows)[:, None] & valid[None, :]
        x = tl.load(x_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32)
        if RESIDUAL:
            residual = tl.load(residual_ptr + start + offsets, mask=mask, other=0.0)
        y = (x - mean) * scale + bias
        y = tl.where(y <= floor, floor, y)  # NaN passes, as through torch's ReLU
        if DROPOUT:
            keep = _keep_mask(first_row, tl.program_id(0), seed, threshold, BLOCK_ROWS, BLOCK_CHANNELS)
            y = tl.where(keep, y * keep_scale, 0.0)
        if RESIDUAL:
            y += residual.to(tl.float32)
        if residual_bias_ptr is not None:
            y += residual_bias
        tl.store(y_ptr + start + offsets, y, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "threshold"])
def gradient_sums_kernel(
    grad_ptr: tl.tensor,
    x_ptr: tl.tensor,
    partial_ptr: tl.tensor,  # [2 or 3, programs, channels]: sums of the norm's output gradient, of it times the normal
    # x and, for a residual's bias, of the gradient as it came
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    mean_ptr: tl.tensor,
    invstd_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_channels: tl.tensor,
    floor: tl.tensor,
    seed_ptr: tl.tensor,
    threshold: tl.tensor,
    keep_scale: tl.tensor,
    DROPOUT: tl.constexpr,
    RESIDUAL_BIAS: tl.constexpr,
    ROWS_KEPT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    channels = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    valid = channels < num_channels
    offsets = _tile_offsets(num_channels, channels, BLOCK_ROWS)
    mean = tl.load(mean_ptr + channels, mask=valid, other=0.0)[None, :]
    invstd = tl.load(invstd_ptr + channels, mask=valid, other=0.0)
    scale = (tl.load(weight_ptr + channels, mask=valid, other=0.0) * invstd)[None, :]
    bias = tl.load(bias_ptr + channels, mask=valid, other=0.0)[None, :]
    total = tl.zeros((ROWS_KEPT, BLOCK_CHANNELS), tl.float32)
    products = tl.zeros((ROWS_KEPT, BLOCK_CHANNELS), tl.float32)
    if DROPOUT:
        seed = tl.load(seed_ptr)
    if RESIDUAL_BIAS:
        plain = tl.zeros((ROWS_KEPT, BLOCK_CHANNELS), tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(num_rows, BLOCK_ROWS), tl.num_programs(1), num_stages=STAGES):
        first_row = tile * BLOCK_ROWS
        start = tl.cast(first_row, tl.int64) * num_channels
        mask = ((first_row + tl.arange(0, BLOCK_ROWS)) < num_rows)[:, None] & valid[None, :]
        grad = tl.load(grad_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32)
        if RESIDUAL_BIAS:
            plain += _fold(grad, ROWS_KEPT, BLOCK_ROWS, BLOCK_CHANNELS)
        centred = x - mean
        grad = tl.where(centred * scale + bias <= floor, 0.0, grad)
        if DROPOUT:
            keep = _keep_mask(first_row, tl.program_id(0), seed, threshold, BLOCK_ROWS, BLOCK_CHANNELS)
            grad = tl.where(keep, grad, 0.0)
        total += _fold(grad, ROWS_KEPT, BLOCK_ROWS, BLOCK_CHANNELS)
        products += _fold(grad * centred, ROWS_KEPT, BLOCK_ROWS, BLOCK_CHANNELS)
    out_ptr = partial_ptr + tl.program_id(1) * num_channels + channels
    # Constant factors come once a channel, not once an element.
    tl.store(out_ptr, tl.sum(total, axis=0) * keep_scale, mask=valid)
    product = tl.sum(products, axis=0) * keep_scale * invstd
    tl.store(out_ptr + tl.num_programs(1) * num_channels, product, mask=valid)
    if RESIDUAL_BIAS:
        tl.store(out_ptr + 2 * tl.num_programs(1) * num_channels, tl.sum(plain, axis=0), mask=valid)


@triton.jit(do_not_specialize=["num_rows", "num_partials"])
def finish_gradients_kernel(
    partial_ptr: tl.tensor,
    grad_weight_ptr: tl.tensor,
    grad_bias_ptr: tl.tensor,
    grad_residual_bias_ptr: tl.tensor,
    means_ptr: tl.tensor,  # [2, channels]: the same sums over the number of rows
    num_rows: tl.tensor,
    num_partials: tl.tensor,
    num_channels: tl.tensor,
    BLOCK_PARTIALS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
) -> None:
    channels = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    valid = channels < num_channels
    total = _sum_partials(partial_ptr, num_partials, num_channels, channels, BLOCK_PARTIALS, BLOCK_CHANNELS)
    products_ptr = partial_ptr + num_partials * num_channels
    products = _sum_partials(products_ptr, num_partials, num_channels, channels, BLOCK_PARTIALS, BLOCK_CHANNELS)
    count = num_rows.to(tl.float64)
    tl.store(grad_bias_ptr + channels, total.to(tl.float32), mask=valid)
    tl.store(grad_weight_ptr + channels, products.to(tl.float32), mask=valid)
    tl.store(means_ptr + channels, (total / count).to(tl.float32), mask=valid)
    tl.store(means_ptr + num_channels + channels, (products / count).to(tl.float32), mask=valid)
    if grad_residual_bias_ptr is not None:
        plain_ptr = products_ptr + num_partials * num_channels
        plain = _sum_partials(plain_ptr, num_partials, num_channels, channels, BLOCK_PARTIALS, BLOCK_CHANNELS)
        tl.store(grad_residual_bias_ptr + channels, plain.to(tl.float32), mask=valid)


@triton.jit(do_not_specialize=["num_rows", "tiles_each", "threshold"])
def input_gradient_kernel(
    grad_ptr: tl.tensor,
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    mean_ptr: tl.tensor,
    invstd_ptr: tl.tensor,
    means_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_channels: tl.tensor,
    tiles_each: tl.tensor,
    floor: tl.tensor,
    seed_ptr: tl.tensor,
    threshold: tl.tensor,
    keep_scale: tl.tensor,
    DROPOUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    channels = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    valid = channels < num_channels
    offsets = _tile_offsets(num_channels, channels, BLOCK_ROWS)
    mean = tl.load(mean_ptr + channels, mask=valid, other=0.0)[None, :]
    invstd = tl.load(invstd_ptr + channels, mask=valid, other=0.0)
    scale = tl.load(weight_ptr + channels, mask=valid, other=0.0) * invstd
    bias = tl.load(bias_ptr + channels, mask=valid, other=0.0)[None, :]
    constant = (scale * tl.load(means_ptr + channels, mask=valid, other=0.0))[None, :]
    slope = (scale * invstd * tl.load(means_ptr + num_channels + channels, mask=valid, other=0.0))[None, :]
    grad_scale = (scale * keep_scale)[None, :]
    scale = scale[None, :]
    if DROPOUT:
        seed = tl.load(seed_ptr)
    num_tiles = tl.cdiv(num_rows, BLOCK_ROWS)
    begin = tl.program_id(1) * tiles_each
    for tile in tl.range(begin, tl.minimum(begin + tiles_each, num_tiles), num_stages=STAGES):
        first_row = (num_tiles - 1 - tile) * BLOCK_ROWS  # last to first, as in apply_kernel
        start = tl.cast(first_row, tl.int64) * num_channels
        mask = ((first_row + tl.arange(0, BLOCK_ROWS)) < num_rows)[:, None] & valid[None, :]
        grad = tl.load(grad_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32)
        centred = x - mean
        grad = tl.where(centred * scale + bias <= floor, 0.0, grad)
        if DROPOUT:
            keep = _keep_mask(first_row, tl.program_id(0), seed, threshold, BLOCK_ROWS, BLOCK_CHANNELS)
            grad = tl.where(keep, grad, 0.0)
        value = grad * grad_scale - constant - centred * slope
        tl.store(out_ptr + start + offsets, value, mask=mask)
