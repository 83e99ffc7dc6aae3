"""Ghost batch norm: batch statistics over ghost batches, parts of a micro-batch of a given size.

Hoffer et al., "Train longer, generalize better", arXiv 1705.08741, Algorithm 1. Ranks exchange nothing; evaluation is
that of plain batch norm. To a kernel for one batch, the ghost batches are further channels: there is no loop, and
outputs and gradients are those of the kernel, bit for bit, at the price of a copy of the micro-batch each way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stormo.config.plan import num_ghost_batches
from stormo.errors import SettingError
from stormo.layers.norm_act import NormAct, add_residual, plain_norm_act
from stormo.layers.sync_batch_norm import BatchNormBase, LocalNorm, SynchronisedNorm, check_forward, variant

# (x, running mean, running variance, weight, bias) -> y; updates the running statistics.
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
    """Batch norm of every ghost batch of `size` samples of x [samples, channels, ...], by a `norm` for one batch.

    The last three tensors are updated as by one ghost batch after another; `momentum` None is the cumulative average.
    `norm` is called with a momentum of 1, which makes the running statistics those of the batch.
    """
    for tensor in (weight, running_mean):
        if tensor is not None and tensor.shape[0] != x.shape[1]:
            raise ValueError(f"a batch norm of {tensor.shape[0]} channels got an input of {x.shape[1]} channels")
    num_samples = static_num_samples(x)
    count = num_ghost_batches(num_samples, size)
    low, num_larger = divmod(num_samples, count)
    # At most two views, each of ghost batches of one size; the larger ones come first.
    border = num_larger * (low + 1)
    cuts = [(x[:border], num_larger), (x[border:], count - num_larger)] if num_larger else [(x, count)]
    is_tracked = running_mean is not None and running_var is not None
    parts, moments = zip(*(_normalised(part, num, weight, bias, norm, is_tracked) for part, num in cuts), strict=True)
    if num_batches_tracked is not None:
        # Each ghost batch is an update, and a cumulative average divides by the number of updates.
        num_batches_tracked.add_(count)
    if running_mean is not None and running_var is not None:
        keep, gains = _gains(torch.cat(moments, dim=1), momentum, num_batches_tracked)
        for running, gain in zip((running_mean, running_var), gains, strict=True):
            running.copy_(running * keep + gain)
    return torch.cat(parts) if num_larger else parts[0]


def static_num_samples(x: Tensor) -> int:
    """The samples of x, as a number that torch.compile specialises on."""
    # Compiled for any number of samples, the split takes the compiler minutes.
    return len(range(x.shape[0]))


def _normalised(
    x: Tensor, count: int, weight: Tensor | None, bias: Tensor | None, norm: Norm, is_tracked: bool
) -> tuple[Tensor, Tensor]:
    """`count` ghost batches of equal size, and their moments [mean and variance, ghost batches, channels]."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32  # of statistics, as torch's
    num_channels = x.shape[1]
    # Keeps the memory layout (channels last or not), so that the copy moves contiguous blocks.
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
    """The factor that all ghost batches leave of the running statistics, and what they add to each of the two."""
    count = moments.shape[1]
    if momentum is None:  # computed on the device, so that the host does not wait
        assert num_batches_tracked is not None, "a cumulative average needs the number of batches"
        share = 1.0 / num_batches_tracked.to(moments.dtype)
        return 1.0 - count * share, moments.sum(1) * share
    # Ghost batch i is followed by count - 1 - i others, each of which multiplies by 1 - momentum.
    followers = torch.arange(count - 1, -1, -1, dtype=moments.dtype, device=moments.device)
    shares = momentum * torch.pow(1.0 - momentum, followers)
    return (1.0 - momentum) ** count, (moments * shares.unsqueeze(1)).sum(1)


_Module = TypeVar("_Module", bound=nn.Module)


class GhostNorm(LocalNorm):
    """A layer with the statistics of ghost batches; see `convert_ghost_batch_norm`."""

    ghost_batch_size: int
    training: bool
    plain: type[nn.Module]  # the layer's class, a base of this one

    def cuts(self, x: Tensor) -> bool:
        """Whether this micro-batch has several ghost batches; with one, the plain layer is used."""
        return self.training and x.numel() > 0 and num_ghost_batches(static_num_samples(x), self.ghost_batch_size) > 1

    def extra_repr(self) -> str:
        """The layer's settings, and the size."""
        return f"{super().extra_repr()}, ghost_batch_size={self.ghost_batch_size}"  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the layer's plain class, as the class made here cannot be imported."""
        parts: Any = super().__reduce_ex__(2)
        _, arguments, *rest = parts
        return _unpickle, (self.plain, arguments[1:]), *rest


class GhostBatchNorm(GhostNorm, BatchNormBase):
    """A batch norm with the statistics of ghost batches in training."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise every ghost batch in training, with the running statistics in evaluation."""
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        if not self.cuts(input):
            return super().forward(input)
        is_tracked = self.track_running_stats
        return ghost_norm(
            input,
            self.weight,
            self.bias,
            self.running_mean if is_tracked else None,
            self.running_var if is_tracked else None,
            self.num_batches_tracked if is_tracked else None,
            momentum=self.momentum,
            size=self.ghost_batch_size,
            norm=functools.partial(F.batch_norm, training=True, momentum=1.0, eps=self.eps),
        )


class GhostNormAct(GhostNorm, NormAct):
    """A `NormAct` with the statistics of ghost batches in training."""

    def forward(self, x: Tensor, residual: Tensor | None = None, residual_bias: Tensor | None = None) -> Tensor:
        """As `NormAct` except for the statistics, fused where it is; the residual is added afterwards."""
        if self.absent or not self.cuts(x):
            return super().forward(x, residual, residual_bias)
        y = ghost_norm(
            x,
            self.weight,
            self.bias,
            self.running_mean,
            self.running_var,
            self.num_batches_tracked,
            momentum=self.momentum,
            size=self.ghost_batch_size,
            norm=self._one_batch(self.is_fused(x)),
        )
        return add_residual(y, residual, residual_bias)

    def _one_batch(self, is_fused: bool) -> Norm:
        """Batch norm of one batch with this layer's ReLU and dropout."""
        norm_act = plain_norm_act
        if is_fused:
            from stormo.layers import fused_norm

            norm_act = fused_norm.norm_act
        settings: dict[str, Any] = {"eps": self.eps, "dropout": self.dropout, "activation": self.activation}

        def norm(x: Tensor, mean: Any, variance: Any, weight: Any, bias: Any) -> Tensor:
            return norm_act(x, None, weight, bias, mean, variance, training=True, momentum=1.0, **settings)

        return norm


# The layers that can be converted, and the class that is put before theirs.
_GHOSTS: dict[type[Any], type[GhostNorm]] = {
    nn.BatchNorm1d: GhostBatchNorm,
    nn.BatchNorm2d: GhostBatchNorm,
    nn.BatchNorm3d: GhostBatchNorm,
    NormAct: GhostNormAct,
}


@functools.cache
def ghostly(plain: type[nn.Module]) -> type[GhostNorm]:
    """The class of a converted layer, a subclass of its own."""
    ghost = next(ghost for base, ghost in _GHOSTS.items() if issubclass(plain, base))
    return variant("Ghost", ghost, plain)


def _unpickle(plain: Any, arguments: tuple[Any, ...]) -> Any:
    kind: Any = ghostly(plain)
    return kind.__new__(kind, *arguments)


def convert_ghost_batch_norm(module: _Module, ghost_batch_size: int) -> _Module:
    """Make every batch norm and `NormAct` take its statistics over ghost batches, in place; return the module.

    A micro-batch is split into as few ghost batches of at most this many samples as possible, whose sizes differ by at
    most one. A second call changes the size.
    """
    _check_size(ghost_batch_size)
    # In place, so that hooks, references and `isinstance` stay valid. All are checked before any is changed.
    norms: list[Any] = []
    for layer in module.modules():
        _check_not_synchronised(layer)
        if isinstance(layer, GhostNorm):
            norms.append(layer)
        elif isinstance(layer, tuple(_GHOSTS)):
            check_forward(layer, _GHOSTS, "ghost batch norm")
            norms.append(layer)
    if not norms:
        raise SettingError(
            f"ghost batches of {ghost_batch_size} samples were asked for a {type(module).__name__}",
            "it has no batch norm (nn.BatchNorm1d, 2d, 3d or stormo's NormAct)",
            "leave the size out for this model",
        )
    for layer in norms:
        if not isinstance(layer, GhostNorm):
            kind: Any = type(layer)
            layer.__class__ = ghostly(kind)
        layer.ghost_batch_size = ghost_batch_size
    return module


def _check_size(size: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 2:
        raise SettingError(
            f"ghost batches of {size!r} samples were asked for",
            "the size is a whole number, and one sample has no variance",
            "set 2 or more; 32 is usual",
        )


def _check_not_synchronised(layer: nn.Module) -> None:
    is_synchronised = isinstance(layer, SynchronisedNorm) and layer.reduce is not None
    if is_synchronised or isinstance(layer, nn.SyncBatchNorm):
        raise SettingError(
            f"ghost batch norm was asked for a model with a synchronised {type(layer).__name__}",
            "that takes statistics over all workers and ghost batches over a part of one worker's samples",
            "convert the model to one of them",
        )
    lazy = nn.LazyBatchNorm1d | nn.LazyBatchNorm2d | nn.LazyBatchNorm3d
    if isinstance(layer, lazy):
        raise SettingError(
            f"ghost batch norm was asked for a model with a {type(layer).__name__}",
            "its first pass would turn it into a plain batch norm",
            "give the layer its number of channels, or convert the model after a first pass",
        )
