"""Batch normalisation over parts of a pass ("ghosts") of a given size, each with statistics of its own.

Hoffer et al., "Train longer, generalize better", arXiv 1705.08741, Algorithm 1: a large batch is normalised as the
small ones it consists of would be, without a word to other ranks. Evaluation is plain batch norm's.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from stormo.config.plan import num_ghosts
from stormo.errors import SettingError
from stormo.layers.ghost_norm import Norm, ghost_norm, pass_samples
from stormo.layers.norm_act import NormAct, add_residual, plain_norm_act
from stormo.layers.sync_batch_norm import LocalNorm, SynchronisedNorm, check_forward, variant

_Module = TypeVar("_Module", bound=nn.Module)


class GhostNorm(LocalNorm):
    """What a layer has whose statistics are those of ghosts; see `convert_ghost_batch_norm`."""

    ghost_batch_size: int
    training: bool
    plain: type[nn.Module]  # the layer's own class, which this stands before

    def cuts(self, x: Tensor) -> bool:
        """Whether this pass is normalised in several ghosts; of one, it is what the plain layer does."""
        return self.training and x.numel() > 0 and num_ghosts(pass_samples(x), self.ghost_batch_size) > 1

    def extra_repr(self) -> str:
        """The layer's settings, and the size."""
        return f"{super().extra_repr()}, ghost_batch_size={self.ghost_batch_size}"  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as a ghost layer of its own class: the class made here has no name to be found by."""
        parts: Any = super().__reduce_ex__(2)
        _, arguments, *rest = parts
        return _made_again, (self.plain, arguments[1:]), *rest


class GhostBatchNorm(GhostNorm, nn.modules.batchnorm._BatchNorm):
    """A batch norm with the statistics of ghosts in training."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalises every ghost for itself in training, with the running statistics in evaluation."""
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
    """A `NormAct` with the statistics of ghosts in training."""

    def forward(self, x: Tensor, residual: Tensor | None = None, residual_bias: Tensor | None = None) -> Tensor:
        """As the layer it was but for the statistics, and fused where it was; a residual is added after that."""
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
        """Batch norm with this layer's ReLU and dropout, which do not care where in a batch a value is."""
        norm_act = plain_norm_act
        if is_fused:
            from stormo.layers import fused_norm

            norm_act = fused_norm.norm_act
        settings: dict[str, Any] = {"eps": self.eps, "dropout": self.dropout, "activation": self.activation}

        def norm(x: Tensor, mean: Any, variance: Any, weight: Any, bias: Any) -> Tensor:
            return norm_act(x, None, weight, bias, mean, variance, training=True, momentum=1.0, **settings)

        return norm


# The layers that can be converted, and what stands before their class then.
_GHOSTS: dict[type[Any], type[GhostNorm]] = {
    nn.BatchNorm1d: GhostBatchNorm,
    nn.BatchNorm2d: GhostBatchNorm,
    nn.BatchNorm3d: GhostBatchNorm,
    NormAct: GhostNormAct,
}


@functools.cache
def ghostly(plain: type[nn.Module]) -> type[GhostNorm]:
    """The variant of a layer's class that a layer of it becomes, and stays an instance of its own class."""
    ghost = next(ghost for base, ghost in _GHOSTS.items() if issubclass(plain, base))
    return variant("Ghost", ghost, plain)


def _made_again(plain: Any, arguments: tuple[Any, ...]) -> Any:
    kind: Any = ghostly(plain)
    return kind.__new__(kind, *arguments)


def convert_ghost_batch_norm(module: _Module, ghost_batch_size: int) -> _Module:
    """Makes every batch norm and `NormAct` take its statistics over ghosts of this size, in place; returns the module.

    A pass is cut into as few ghosts of at most this many samples as there can be, whose sizes differ by at most one.
    Asked again, the newer size holds.
    """
    _check_size(ghost_batch_size)
    # The very layers, so that hooks, references and `isinstance` hold on. All are checked before any is changed.
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
            f"ghosts of {ghost_batch_size} samples were asked for a {type(module).__name__}",
            "it has no batch norm (nn.BatchNorm1d, 2d, 3d or stormo's NormAct), whose statistics they are",
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
            f"ghosts of {size!r} samples were asked for",
            "a ghost is a whole number of samples, and one alone has no variance",
            "set 2 or more; 32 is usual",
        )


def _check_not_synchronised(layer: nn.Module) -> None:
    is_synchronised = isinstance(layer, SynchronisedNorm) and layer.reduce is not None
    if is_synchronised or isinstance(layer, nn.SyncBatchNorm):
        raise SettingError(
            f"ghost batch norm was asked for a model with a synchronised {type(layer).__name__}",
            "that takes statistics over the samples of all workers and ghosts over a few of one worker's",
            "convert the model to one of them",
        )
    lazy = nn.LazyBatchNorm1d | nn.LazyBatchNorm2d | nn.LazyBatchNorm3d
    if isinstance(layer, lazy):
        raise SettingError(
            f"ghost batch norm was asked for a model with a {type(layer).__name__}",
            "its first pass would turn it into a plain batch norm",
            "give the layer its number of channels, or convert the model after a first pass",
        )
