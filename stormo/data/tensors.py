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
