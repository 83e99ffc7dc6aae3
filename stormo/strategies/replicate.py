"""Data parallelism: a replica on every worker, gradients averaged during backward (Li et al., arXiv 2006.15704)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stormo.strategies.strategy import Strategy


class Replicate(Strategy):
    """torch's DistributedDataParallel."""

    name = "ddp"

    def _wrap(self, model: nn.Module) -> nn.Module:
        if self.world.size == 1:
            return model
        self._replica = DistributedDataParallel(
            model,
            device_ids=[self.world.device] if self.world.device.type == "cuda" else None,
            broadcast_buffers=False,  # they are averaged before validation instead of overwritten every step
            gradient_as_bucket_view=True,
        )
        return self._replica

    def _gradient_sync(self, is_last: bool) -> AbstractContextManager[Any]:
        if is_last or self.world.size == 1:
            return nullcontext()
        return self._replica.no_sync()
