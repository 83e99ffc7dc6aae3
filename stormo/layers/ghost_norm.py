"""The arithmetic of ghost batch norm: to a kernel that knows one batch, the ghosts of a pass are further channels.

So there is no loop over ghosts, and outputs and gradients are those of the kernel, bit for bit. The price is a copy of
the pass each way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stormo.config.plan import num_ghosts

# (x, running mean, running variance, weight, bias) -> y, with the statistics of x, which it leaves in the running ones.
Norm = Callable[[Tensor, Any, Any, Any, Any], Tensor]


def ghost_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    *,
    momentum: float | None,
    size: int,
    norm: Norm,
) -> Tensor:
    """Batch norm of every ghost of `size` samples of x [samples, channels, ...], by a `norm` that knows one batch.

    The last three tensors are moved, as if the ghosts had come one after another; `momentum` None is the cumulative
    average. `norm` is called with a momentum of 1, which makes running statistics those of the batch.
    """
    for tensor in (weight, running_mean):
        if tensor is not None and tensor.shape[0] != x.shape[1]:
            raise ValueError(f"a batch norm of {tensor.shape[0]} channels got an input of {x.shape[1]} channels")
    num_samples = pass_samples(x)
    count = num_ghosts(num_samples, size)
    low, num_larger = divmod(num_samples, count)
    # At most two views, of ghosts of one size each; those with one sample more come first.
    border = num_larger * (low + 1)
    cuts = [(x[:border], num_larger), (x[border:], count - num_larger)] if num_larger else [(x, count)]
    is_tracked = running_mean is not None and running_var is not None
    parts, moments = zip(*(_normalised(part, num, weight, bias, norm, is_tracked) for part, num in cuts), strict=True)
    if num_batches_tracked is not None:
        # Each ghost is a batch: the count is that of the updates, which a cumulative average divides by.
        num_batches_tracked.add_(count)
    if running_mean is not None and running_var is not None:
        keep, gains = _gains(torch.cat(moments, dim=1), momentum, num_batches_tracked)
        for running, gain in zip((running_mean, running_var), gains, strict=True):
            running.copy_(running * keep + gain)
    return torch.cat(parts) if num_larger else parts[0]


def pass_samples(x: Tensor) -> int:
    """The samples of x, of which torch.compile makes a number and not a symbol."""
    # Compiled for any number of samples, the cut into ghosts is an expression that a compiler takes minutes over.
    return len(range(x.shape[0]))


def _normalised(
    x: Tensor, count: int, weight: Tensor | None, bias: Tensor | None, norm: Norm, is_tracked: bool
) -> tuple[Tensor, Tensor]:
    """`count` ghosts of equal size, and, where asked for, the moments of each [mean and variance, ghosts, channels]."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32  # of statistics, as torch's
    num_channels = x.shape[1]
    # The channels are innermost in memory (channels_last) or follow the samples: either order stays what it is, and
    # the copy that brings a ghost's channels beside the next one's moves whole runs of memory.
    rows = x.movedim(1, -1)
    has_rows = rows.is_contiguous()
    if has_rows:
        side_by_side = rows.unflatten(0, (count, -1)).movedim(0, -2).flatten(-2).movedim(-1, 1)
    else:
        side_by_side = x.unflatten(0, (count, -1)).movedim(0, 1).flatten(1, 2)
    moments = torch.zeros(2, count * num_channels, dtype=wide, device=x.device)
    mean, variance = moments if is_tracked else (None, None)
    factors, offsets = (None if vector is None else vector.to(wide).repeat(count) for vector in (weight, bias))
    y = norm(side_by_side, mean, variance, factors, offsets)
    if has_rows:
        y = y.movedim(1, -1).unflatten(-1, (count, num_channels)).movedim(-2, 0).flatten(0, 1).movedim(-1, 1)
    else:
        y = y.unflatten(1, (count, num_channels)).movedim(1, 0).flatten(0, 1)
    return y, moments.view(2, count, num_channels)


def _gains(moments: Tensor, momentum: float | None, num_batches_tracked: Tensor | None) -> tuple[Any, Tensor]:
    """What all ghosts together keep of the running statistics, and what they add to each of the two."""
    count = moments.shape[1]
    if momentum is None:  # on the device: asking the host for the count would make it wait
        assert num_batches_tracked is not None, "an average over all batches counts them"
        share = 1.0 / num_batches_tracked.to(moments.dtype)
        return 1.0 - count * share, moments.sum(1) * share
    # Ghost i is followed by count - 1 - i others, each of which keeps 1 - momentum of what is there.
    followers = torch.arange(count - 1, -1, -1, dtype=moments.dtype, device=moments.device)
    shares = momentum * torch.pow(1.0 - momentum, followers)
    return (1.0 - momentum) ** count, (moments * shares.unsqueeze(1)).sum(1)
