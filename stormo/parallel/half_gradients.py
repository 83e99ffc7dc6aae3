"""FSDP's reduce-scatter of 16-bit gradients with half the bytes, and sums of 32 bits.

torch makes such gradients 32 bits wide and sends them so, as NCCL would round every partial sum to 16 bits. Here each
worker gets the 16-bit gradients of its shard from all others, and sums them in 32 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class HalfReduceScatter:
    """What `FSDPModule.set_custom_reduce_scatter` takes, for gradients that autograd has made in a 16-bit dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory that torch fills, or gets the result in."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Sum or average the rows of all workers, each of which gets one; on the current stream."""
        assert not async_op
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), op
        sent = input_tensor.to(self._dtype)  # as they were: nothing is rounded
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        torch.sum(received.view(group.size(), -1), dim=0, dtype=output_tensor.dtype, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
