"""A data set held in tensors: it can live on the device, where batches are then made."""

from __future__ import annotations

from torch import Tensor
from torch.utils.data import Dataset


class TensorData(Dataset[tuple[Tensor, ...]]):
    """Tensors whose first dimensions agree; sample i is row i of each."""

    def __init__(self, *tensors: Tensor) -> None:
        if not tensors or any(len(tensor) != len(tensors[0]) for tensor in tensors):
            raise ValueError(f"TensorData needs tensors of one length, got {[len(tensor) for tensor in tensors]}")
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)
