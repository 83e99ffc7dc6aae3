"""Batch norm, ReLU, dropout and an optional residual sum as one layer.

On CUDA with channels_last (or 2-D) inputs the whole layer runs in a few Triton kernels (`fused_norm`); everywhere else,
and under torch.compile, it is the plain torch operations. Both are the same function; the random masks differ.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stormo.errors import SettingError
from stormo.layers.sync_batch_norm import SynchronisedNorm, SyncNorm

FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_FUSED_ROWS = 2**31 - 2**10  # kernels count rows in int32 (elements in int64) and look one tile past the end


@functools.cache
def fused_obstacle(device: torch.device) -> str | None:
    """Why layers on this device run as plain torch operations, or None where they are fused."""
    if device.type != "cuda":
        return f"the fused kernels are for CUDA and the device is {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        major, minor = torch.cuda.get_device_capability(device)
        return f"the fused kernels need compute capability 8.0 and the device has {major}.{minor}"
    # Triton builds a small launcher with the host's compiler when a kernel is first called.
    if not (os.environ.get("CC") or any(map(shutil.which, ("cc", "gcc", "clang")))):
        return "triton needs a C compiler and none is on the PATH"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "triton needs Python's C headers and they are not installed"
    return None


def plain_norm_act(
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
) -> Tensor:
    """The layer in torch operations: dropout(relu(batch_norm(x))) + residual + residual_bias."""
    y = F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    return add_residual(_activate(y, dropout if training else 0.0, activation), residual, residual_bias)


def _activate(y: Tensor, dropout: float, activation: bool) -> Tensor:
    if activation:
        y = F.relu(y)
    return F.dropout(y, dropout) if dropout > 0.0 else y


def add_residual(y: Tensor, residual: Tensor | None, residual_bias: Tensor | None) -> Tensor:
    """y + residual + residual_bias, whose vector is one value a channel and does not widen the dtype."""
    if residual_bias is not None:
        like = y if residual is None else residual
        vector = residual_bias.to(like.dtype).view(1, -1, *([1] * (y.dim() - 2)))
        # First to the residual, as the convolution or linear layer would have done that the bias belongs to.
        residual = vector if residual is None else residual + vector
    return y if residual is None else y + residual


def is_row_major(x: Tensor) -> bool:
    """Whether memory holds x as a dense matrix of rows of channels: 2-D, or 4-D in channels_last."""
    if x.dim() == 2:
        return x.is_contiguous()
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)


class NormAct(nn.Module, SynchronisedNorm):
    """y = dropout(relu(batch_norm(x))) + residual + residual_bias; parameters and buffers are `nn.BatchNorm2d`'s."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_channels: int,
        *,
        eps: float = 1e-5,
        momentum: float = 0.1,
        dropout: float = 0.0,
        activation: bool = True,
    ) -> None:
        super().__init__()
        if not 0.0 <= dropout < 1.0:
            raise SettingError(
                f"dropout={dropout} was set",
                "the values that remain are scaled by 1 / (1 - dropout), which needs 0 <= dropout < 1",
                "set the fraction to drop, for example 0.1",
            )
        self.num_channels, self.eps, self.momentum = num_channels, eps, momentum
        self.dropout, self.activation = dropout, activation
        self.weight = nn.Parameter(torch.ones(num_channels))
        self.bias = nn.Parameter(torch.zeros(num_channels))
        self.register_buffer("running_mean", torch.zeros(num_channels))
        self.register_buffer("running_var", torch.ones(num_channels))
        self.register_buffer("num_batches_tracked", torch.tensor(0, dtype=torch.long))

    def extra_repr(self) -> str:
        """The settings, as in the constructor."""
        return (
            f"{self.num_channels}, eps={self.eps}, momentum={self.momentum}, "
            f"dropout={self.dropout}, activation={self.activation}"
        )

    def is_fused(self, x: Tensor) -> bool:
        """Whether this input takes the fused kernels."""
        if torch.compiler.is_compiling() or not x.is_cuda or fused_obstacle(x.device) is not None:
            return False
        if x.dtype not in FUSED_DTYPES or not is_row_major(x) or x.shape[1] != self.num_channels:
            return False
        if any(t.dtype != torch.float32 for t in (self.weight, self.bias, self.running_mean, self.running_var)):
            return False
        num_rows = x.numel() // self.num_channels
        return 2 <= num_rows < MAX_FUSED_ROWS  # torch's own operation has the error for a single row

    def forward(self, x: Tensor, residual: Tensor | None = None, residual_bias: Tensor | None = None) -> Tensor:
        """Normalise (batch statistics in training, running ones in evaluation), activate, drop, add.

        `residual_bias` has one value a channel: the bias of the layer that made the residual, added here for free.
        """
        # An absent rank without synchronisation has no statistics but the running ones.
        training = self.training and not (self.absent and self.reduce is None)
        reduce = self.reduce if training else None
        tensors = self.weight, self.bias, self.running_mean, self.running_var
        settings: dict[str, Any] = {
            "training": training,
            "momentum": self.momentum,
            "eps": self.eps,
            "dropout": self.dropout,
            "activation": self.activation,
            "residual_bias": residual_bias,
        }
        if self.is_fused(x):
            from stormo.layers import fused_norm

            settings |= {"reduce": reduce, "absent": self.absent}
            return fused_norm.norm_act(x, residual, *tensors, num_batches_tracked=self.num_batches_tracked, **settings)
        if reduce is not None:
            counted = *tensors, self.num_batches_tracked
            y = SyncNorm.apply(x, *counted, self.momentum, self.eps, reduce, self.absent)  # type: ignore[no-untyped-call]
            return add_residual(_activate(y, self.dropout, self.activation), residual, residual_bias)
        if training:
            self.num_batches_tracked.add_(1)
        return plain_norm_act(x, residual, *tensors, **settings)
