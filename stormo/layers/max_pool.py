"""Max-pooling of 2×2 windows without overlap.

On CUDA with channels_last inputs of even sides it is one Triton kernel each way (`fused_pool`), with an index of one
byte where torch keeps eight; everywhere else, and under torch.compile, it is `F.max_pool2d`. Both give the same bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stormo.layers.norm_act import FUSED_DTYPES, MAX_FUSED_ROWS, fused_obstacle


class MaxPool2x2(nn.Module):
    """The largest value of each 2×2 window, stride 2; an odd last row or column is left out."""

    def is_fused(self, x: Tensor) -> bool:
        """Whether this input takes the fused kernels."""
        if torch.compiler.is_compiling() or not x.is_cuda or fused_obstacle(x.device) is not None:
            return False
        if x.dtype not in FUSED_DTYPES or x.dim() != 4 or not x.is_contiguous(memory_format=torch.channels_last):
            return False
        height, width = x.shape[2:]
        if x.numel() == 0 or height % 2 or width % 2:
            return False
        return x.shape[0] * height * width < MAX_FUSED_ROWS

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, h, w] -> [n, channels, h // 2, w // 2]."""
        if self.is_fused(x):
            from stormo.layers import fused_pool

            return fused_pool.max_pool(x)
        return F.max_pool2d(x, 2)
