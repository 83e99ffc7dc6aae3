"""The arguments of a call of the model, and which of them are cut into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from stormo.errors import SettingError
from stormo.parallel.pipeline.handover import Slot


class Batch:
    """A call: its number of samples, the tensors that are cut, and its arguments with slots for these."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        call = (tuple(args), dict(kwargs))
        leaves = [leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor) and leaf.ndim]
        if not leaves or not len(leaves[0]):
            raise SettingError(
                "the model was called in a pipeline",
                "none of its arguments is a tensor with samples in it",
                "call it with a tensor that has one row for each sample",
            )
        self.size = len(leaves[0])
        self.tensors = [leaf for leaf in leaves if len(leaf) == self.size]

        def of(leaf: Any) -> Any:
            is_cut = isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == self.size
            return Slot(tuple(leaf.shape), leaf.dtype, ()) if is_cut else leaf

        self.described = tree_map(of, call)
        # Whatever a shape between stages may depend on.
        described = tree_map(
            lambda leaf: (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf, self.described
        )
        self.key = repr((described, [tensor.stride() for tensor in self.tensors]))
