"""Copies of tensors that stay as they are while training goes on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from stormo.checkpoint.tensors import require_plain


class HostCopies:
    """Copies in host memory, which is kept and filled again by the next call."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of all values; the copies of the call before are gone then."""
        for name, tensor in tensors.items():
            require_plain(name, tensor)
        # Tensors of the CPU too: theirs would change with the next step.
        copies = {name: self._room(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            copies[name].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        self._kept = copies
        return copies

    def _room(self, name: str, tensor: Tensor) -> Tensor:
        kept = self._kept.get(name)
        if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
            return kept
        # From a GPU, pinned memory is filled several times faster.
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
