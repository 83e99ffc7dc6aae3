"""Global sample order, loaders, data sets."""

from stormo.data.tensors import TensorData

__all__ = ["TensorData"]
