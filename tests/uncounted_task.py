"""The tiny task for steps that are replayed."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.tiny_task import Tiny


class Uncounted(Tiny):
    """Does not count its steps, which a replayed step would not do."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return cross_entropy(model(x), y)
