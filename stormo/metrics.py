"""Validation, exact: every sample counts once, and the result does not depend on the number of workers.

The validation set is cut into batches once and for all; the workers take them in turn, and each batch's sums go into
a slot of their own. Adding the workers' tables then only fills slots, and the final sum is exact (`math.fsum`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from stormo.data.loaders import move
from stormo.data.order import derive_seed
from stormo.data.streaming import shut_down, stream
from stormo.data.tensors import TensorData
from stormo.tasks.task import Task
from stormo.world.world import World


class Validation:
    """The validation set as fixed batches, of which this worker computes every world-size-th."""

    def __init__(
        self,
        task: Task,
        data: Dataset[Any],
        batch_size: int,
        world: World,
        *,
        resident: bool = True,
        num_loader_workers: int = 0,
    ) -> None:
        self._task = task
        self._world = world
        self.num_samples = len(data)  # type: ignore[arg-type]
        self.num_batches = math.ceil(self.num_samples / batch_size)
        mine = range(world.rank, self.num_batches, world.size)
        spans = [range(i * batch_size, min((i + 1) * batch_size, self.num_samples)) for i in mine]
        if resident and isinstance(data, TensorData):
            tensors = [tensor.to(world.device) for tensor in data.tensors]
            self._batches: Iterable[Any] = [tuple(t[span.start : span.stop] for t in tensors) for span in spans]
        else:
            keys = [[(i, derive_seed("validation", i)) for i in span] for span in spans]
            self._batches = stream(data, keys, world.device, num_loader_workers)

    @property
    def num_rounds(self) -> int:
        """Batches of the busiest worker: all workers go through as many rounds."""
        return math.ceil(self.num_batches / self._world.size)

    def run(self, model: nn.Module, autocast: Callable[[], Any]) -> Iterator[dict[str, float] | None]:
        """Yield None after every round but the last, and the metrics of all samples after the last.

        The caller may give up between rounds; every worker yields equally often.
        """
        table: Tensor | None = None
        names: list[str] = []
        was_training = model.training
        model.eval()
        batches = iter(self._batches)
        try:
            for turn in range(self.num_rounds):
                index = turn * self._world.size + self._world.rank
                if index < self.num_batches:
                    batch = move(next(batches), self._world.device)
                    with torch.no_grad(), autocast():
                        sums = self._task.metrics(model, batch)
                    names = sorted(sums)
                    if table is None:
                        table = torch.zeros(
                            self.num_batches, len(names), dtype=torch.float64, device=self._world.device
                        )
                    table[index] = torch.stack([sums[name].detach().double() for name in names])
                if turn < self.num_rounds - 1:
                    yield None
        finally:
            model.train(was_training)
        yield self._total(names, table)

    def close(self) -> None:
        """End worker processes, where there are any."""
        if isinstance(self._batches, DataLoader):
            shut_down(self._batches)

    def _empty(self, names: list[str]) -> Tensor:
        return torch.zeros(self.num_batches, len(names), dtype=torch.float64, device=self._world.device)

    def _total(self, names: list[str], table: Tensor | None) -> dict[str, float]:
        names = self._world.share_json(names)  # a worker may have had no batch at all
        columns = self._world.sum(self._empty(names) if table is None else table).T.tolist()
        return {name: math.fsum(column) / self.num_samples for name, column in zip(names, columns, strict=True)}
