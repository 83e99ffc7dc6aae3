"""A data set held in tensors: it can live on the device, where batches are then made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from stormo.errors import SettingError


class TensorData(Dataset[tuple[Tensor, ...]]):
    """Tensors whose first dimensions agree; sample i is row i of each."""

    def __init__(self, *tensors: Tensor) -> None:
        if not tensors or any(len(tensor) != len(tensors[0]) for tensor in tensors):
            lengths = ", ".join(str(len(tensor)) for tensor in tensors)
            raise SettingError(
                f"TensorData was given tensors of {lengths} rows" if tensors else "TensorData was given no tensors",
                "a sample is one row of each of them",
                "give it tensors of one length",
            )
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def in_tensors(data: Any) -> Any:
    """torch's own TensorDataset, also a random split of one, as `TensorData`; anything else as it is."""
    if type(data) is TensorDataset:
        return TensorData(*data.tensors)
    if type(data) is Subset and type(data.dataset) is TensorDataset:
        rows = torch.as_tensor(data.indices, dtype=torch.int64)
        return TensorData(*(tensor[rows] for tensor in data.dataset.tensors))
    return data


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
