"""An exponential moving average of the weights: `--ema 0.999`.

The average is kept beside the tensors that the optimizer steps, each worker's for its own shards: every element is
averaged by itself, so it does not matter how the model is sharded. It starts as a copy of the weights after the first
step, as torch's `AveragedModel` does. Floating-point buffers that are saved with the model are averaged as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from stormo.parallel.parameter_shards import ParameterShard

EMA = "|stormo_ema"  # ends the names of averages in a checkpoint, beside the state of the optimizer


class WeightAverage:
    """The averages of this worker's shards and buffers."""

    def __init__(
        self,
        decay: float,
        shards: Sequence[ParameterShard],
        buffers: Mapping[str, Tensor],
        shards_changed: Callable[[], None],
    ) -> None:
        trained = [shard for shard in shards if shard.local.requires_grad]
        # Of a constant such as -inf no average can be taken.
        floats = {name: b for name, b in buffers.items() if b.is_floating_point() and bool(b.isfinite().all())}
        self.shards = [(shard, torch.zeros_like(shard.local.detach())) for shard in trained]
        self.buffers = {name: torch.zeros_like(buffer) for name, buffer in floats.items()}
        self.has_started = False
        self._average = get_ema_multi_avg_fn(decay)
        self._shards_changed = shards_changed
        # One kernel takes tensors of one kind. A sharded parameter keeps its identity when torch moves its values.
        self._alike: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        lives: list[Tensor] = [*(shard.local for shard in trained), *floats.values()]
        averages = [*(average for _, average in self.shards), *self.buffers.values()]
        for average, live in zip(averages, lives, strict=True):
            if live.numel():
                each = self._alike.setdefault((live.device, live.dtype), ([], []))
                each[0].append(average)
                each[1].append(live)

    @torch.no_grad()
    def update(self) -> None:
        """After a step: move the averages towards the weights. The host does not wait for the device."""
        for averages, lives in self._alike.values():
            if self.has_started:
                self._average(averages, lives, None)
            else:
                torch._foreach_copy_(averages, lives)
        self.has_started = True

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside it, the model has the averages as its weights. All workers enter it."""
        if not self.has_started:
            yield
            return
        self._swap()
        yield  # after an error the run ends, and a collective would wait for workers that are not here
        self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for averages, lives in self._alike.values():
            for average, live in zip(averages, lives, strict=True):
                before = live.clone()  # one at a time, to need little memory
                live.copy_(average)
                average.copy_(before)
        self._shards_changed()
