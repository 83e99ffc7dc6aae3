"""Random changes of image batches, made on the device from given random numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def flip_and_shift(images: Tensor, draws: Tensor, max_shift: int) -> Tensor:
    """Mirror images left to right where draws[:, 0] < 0.5, and shift them by -max_shift..max_shift pixels.

    Pixels shifted in are zero. One gather makes the whole batch.

    Args:
        images: [n, height, width].
        draws: [n, 3] in [0, 1): flip, vertical shift, horizontal shift.
        max_shift: in pixels.
    """
    num, height, width = images.shape
    device = images.device
    span = 2 * max_shift + 1
    shift = (draws[:, 1:3] * span).long() - max_shift
    rows = torch.arange(height, device=device) + shift[:, :1]
    columns = torch.arange(width, device=device).expand(num, width)
    columns = torch.where(draws[:, :1] < 0.5, width - 1 - columns, columns) + shift[:, 1:]
    inside = ((rows >= 0) & (rows < height)).unsqueeze(2) & ((columns >= 0) & (columns < width)).unsqueeze(1)
    index = rows.clamp(0, height - 1).unsqueeze(2) * width + columns.clamp(0, width - 1).unsqueeze(1)
    return (images.reshape(num, -1).gather(1, index.reshape(num, -1)).reshape(images.shape)) * inside
