"""Whether all workers sum the statistics of the same batch norm: sums are matched by order, not by name."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.layers.sync_batch_norm import Reduce, synchronised_norms


class NormOrder:
    """Refuses workers that are at different batch norms."""

    def __init__(self, world: World, model: nn.Module) -> None:
        """All workers call it."""
        norms = synchronised_norms(model)
        self._names = [*(f"the batch norm {name}" for name, _ in norms), "the end of its micro-batch"]
        self._table = world.status_table()
        for number, (_, layer) in enumerate(norms):
            layer.reduce = partial(self._sum, number, layer.reduce)

    def _sum(self, number: int, reduce: Reduce, vector: Tensor) -> None:
        self._compare(number, vector.numel())  # more values in forward than in backward
        reduce(vector)

    def end_micro_batch(self) -> None:
        """Wait for the others to come here too. All workers call it."""
        self._compare(len(self._names) - 1, 0)

    def _compare(self, number: int, size: int) -> None:
        self._table.post((number, size, 0))
        places = self._table.read().tolist()
        other = next((rank for rank, place in enumerate(places) if place != places[0]), None)
        if other is not None:
            first, second = self._names[places[0][0]], self._names[places[other][0]]
            direction = " in the other direction" * (first == second)
            raise SettingError(
                "--sync-batch-norm was set",
                f"rank 0 is at {first} and rank {other} at {second}{direction}",
                "let every batch use the same batch norms, or set --no-sync-batch-norm",
            )
