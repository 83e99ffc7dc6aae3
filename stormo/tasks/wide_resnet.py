"""A WideResNet for 28×28 images (Zagoruyko & Komodakis, arXiv 1605.07146, in the variant of RT-ICAR-NA-24-04)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stormo.layers.max_pool import MaxPool2x2
from stormo.layers.norm_act import NormAct


class Block(nn.Module):
    """Two conv + batch norm + ReLU with dropout between them, plus the input."""

    def __init__(self, in_channels: int, out_channels: int, dropout: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False)
        self.norm1 = NormAct(out_channels, dropout=dropout)
        self.conv2 = nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False)
        self.norm2 = NormAct(out_channels)
        self.shortcut = nn.Conv2d(in_channels, out_channels, kernel_size=1) if in_channels != out_channels else None

    def forward(self, x: Tensor) -> Tensor:
        """[n, in_channels, h, w] -> [n, out_channels, h, w]."""
        hidden = self.conv2(self.norm1(self.conv1(x)))
        if self.shortcut is None:
            return self.norm2(hidden, residual=x)  # type: ignore[no-any-return]
        # The shortcut's bias is added by the norm, which saves it a pass over the activations in each direction.
        shortcut = F.conv2d(x, self.shortcut.weight)
        return self.norm2(hidden, residual=shortcut, residual_bias=self.shortcut.bias)  # type: ignore[no-any-return]


class Stem(nn.Conv2d):
    """A 3×3 convolution of one channel; on GPUs a product of matrices, as the weight gradient of cuDNN takes longer."""

    def __init__(self) -> None:
        super().__init__(1, 16, kernel_size=3, padding=1, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """[n, 1, h, w] -> [n, 16, h, w]."""
        # With one channel both layouts are the same memory, and the strides tell which is meant.
        if images.is_cuda and 1 in (images.stride(1), self.weight.stride(1)):
            return convolve_windows(images, self.weight)
        return super().forward(images)


def convolve_windows(images: Tensor, weight: Tensor) -> Tensor:
    """The same convolution as a product of matrices; its result is in channels_last."""
    if images.dtype == torch.float32 and torch.is_autocast_enabled(images.device.type):
        images = images.to(torch.get_autocast_dtype(images.device.type))  # before each pixel is copied 16 times
    # Of 4×4 pixels, with weights of zero: rows of 16 numbers are aligned, rows of 9 are not.
    windows = F.pad(images, (1, 2, 1, 2)).unfold(2, 4, 1).unfold(3, 4, 1).squeeze(1)  # [n, h, w, 4, 4]
    return F.linear(windows.flatten(3), F.pad(weight, (0, 1, 0, 1)).flatten(1)).permute(0, 3, 1, 2)


class WideResNet(nn.Module):
    """Six residual blocks, `width` times as wide as 16, 32, 64 channels; the documents' network has width 10."""

    def __init__(self, width: float = 10, dropout: float = 0.01, num_classes: int = 10) -> None:
        super().__init__()
        narrow, middle, wide = round(16 * width), round(32 * width), round(64 * width)
        self.stem = Stem()
        self.stem_norm = NormAct(16)
        self.blocks = nn.Sequential(
            Block(16, narrow, dropout),
            Block(narrow, narrow, dropout),
            MaxPool2x2(),
            Block(narrow, middle, dropout),
            Block(middle, middle, dropout),
            MaxPool2x2(),
            Block(middle, wide, dropout),
            Block(wide, wide, dropout),
        )
        self.head = nn.Linear(wide, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """[n, 1, 28, 28] in [0, 1] -> logits [n, num_classes]."""
        return score(self.head, self.blocks(self.stem_norm(self.stem(images))))


def score(head: nn.Module, features: Tensor) -> Tensor:
    """What the last block gives, [n, channels, h, w] -> logits [n, num_classes]."""
    if not (features.is_cuda and features.is_contiguous(memory_format=torch.channels_last)):
        return head(features.mean((2, 3)))  # type: ignore[no-any-return]
    # The same mean, whose gradient is in channels_last too; that of the other would be copied by layer after layer.
    return head(features.permute(0, 2, 3, 1).flatten(1, 2).mean(1))  # type: ignore[no-any-return]
