"""Nested containers of tensors. torch has no public module for them, so its private one is used here alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree

SUPPORTED_NODES = _pytree.SUPPORTED_NODES
TreeSpec = _pytree.TreeSpec
keystr = _pytree.keystr
tree_flatten = _pytree.tree_flatten
tree_flatten_with_path = _pytree.tree_flatten_with_path
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
tree_map_only = _pytree.tree_map_only
tree_unflatten = _pytree.tree_unflatten


def tree_tensors(value: Any) -> list[Tensor]:
    """All tensors of a nested value, in their order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
