"""Global sample order, loaders, data sets."""

from stormo.data.interleaving import interleave
from stormo.data.tensors import TensorData

__all__ = ["TensorData", "interleave"]
