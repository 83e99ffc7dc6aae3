"""Global sample order, loaders, data sets."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stormo.data.interleaving import interleave
    from stormo.data.tensors import TensorData

__all__ = ["TensorData", "interleave"]


def __getattr__(name: str) -> Any:
    """Imports torch only for those who ask for data: staging does without."""
    if name == "interleave":
        from stormo.data.interleaving import interleave

        return interleave
    if name == "TensorData":
        from stormo.data.tensors import TensorData

        return TensorData
    raise AttributeError(f"module 'stormo.data' has no attribute {name!r}")
