"""Exact validation: every sample counts once, and the result does not depend on the number of workers.

The validation set has fixed batches, which the ranks take in turn. The sums of each batch are a row of a table, so that
adding the ranks' tables only fills rows; the final sum is exact (`math.fsum`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stormo.config.plan import no_validation_samples
from stormo.data.batches import Collate, collate, move
from stormo.data.order import derive_seed
from stormo.data.processes import open_loader, raise_forwarded, shut_down
from stormo.data.reading import RoundRobin, is_stream, key_loader, known_length, unchanged
from stormo.data.tensors import TensorData
from stormo.distributed.world import AsyncAllReduce, World
from stormo.errors import SettingError
from stormo.system.signals import StopFlag
from stormo.tasks.metrics import COUNT_OF, compute, held_metrics, read_metrics
from stormo.tasks.task import Task

# The number of a batch and its data. A rank without any batch gets one without a number, to learn the metrics' names.
_Turn = tuple[int | None, Any]
_Names = tuple[list[str], list[str]]  # of sums, of metric objects
Sums = dict[str, Tensor]


class Validation:
    """The validation set as fixed batches, of which this rank computes every n-th on n ranks."""

    def __init__(
        self,
        task: Task,
        data: Any,
        batch_size: int,
        world: World,
        *,
        resident: bool = True,
        num_loader_workers: int = 0,
        make_batch: Collate = collate,
        is_sharded: bool = False,
    ) -> None:
        self._task = task
        self._is_sharded = is_sharded  # then all ranks call the model at once, or none
        self._world = world
        self.is_stream = is_stream(data)  # a set without an index
        self._objects: dict[str, Any] = {}  # metrics with a state, as last returned
        self.num_samples = known_length(data) or 0  # a stream is counted whenever it is read
        self.num_batches = math.ceil(self.num_samples / batch_size)
        self._batches: Iterable[Any]
        if self.is_stream:
            stream = RoundRobin(data, batch_size, world.data.rank, world.data.size, make_batch)
            self._batches = open_loader(stream, world.device, min(1, num_loader_workers), unchanged, batch_size=None)
            return
        mine = range(world.data.rank, self.num_batches, world.data.size) or range(1)
        spans = [range(i * batch_size, min((i + 1) * batch_size, self.num_samples)) for i in mine]
        if resident and isinstance(data, TensorData):
            tensors = [tensor.to(world.device) for tensor in data.tensors]
            self._batches = [tuple(t[span.start : span.stop] for t in tensors) for span in spans]
        else:
            keys = [[(i, derive_seed("validation", i)) for i in span] for span in spans]
            self._batches = key_loader(data, keys, world.device, num_loader_workers, make_batch)

    @property
    def num_rounds(self) -> int:
        """Batches of the busiest rank, as far as known; all ranks take part in as many rounds."""
        return math.ceil(self.num_batches / self._world.data.size)

    def run(
        self, model: nn.Module, autocast: Callable[[], Any], on_batch: Callable[[Any, Sums], None] | None = None
    ) -> Iterator[dict[str, float] | None]:
        """Yield None after every round but the last, and the metrics of all samples after the last.

        The caller may stop between rounds; all ranks yield equally often. `on_batch` gets every batch and its sums,
        while the model is in eval mode.
        """
        rows: dict[int, Tensor] = {}  # by the number of the batch
        last: Any = None
        names: _Names | None = None
        was_training = model.training
        model.eval()
        self._reset()
        try:
            for number, turn in enumerate(self._turns()):
                if number:
                    yield None
                if turn is None:
                    if self._is_sharded:
                        self._call_again(model, autocast, last)
                    continue
                index, data = turn
                with torch.no_grad(), autocast():
                    batch = last = move(raise_forwarded(data), self._world.device)
                    sums, objects = read_metrics(self._task, self._task.metrics(model, batch), self._world.device)
                    if on_batch is not None:
                        on_batch(batch, sums)
                names = self._same_names(names, (sorted(sums), sorted(objects)))
                self._same_objects(objects, is_first=not rows)
                if index is None:
                    self._reset()
                else:
                    rows[index] = torch.stack([sums[name] for name in names[0]]) if sums else torch.empty(0)
        finally:
            model.train(was_training)
        assert names is not None
        yield self._total(names, rows)

    def _call_again(self, model: nn.Module, autocast: Callable[[], Any], batch: Any) -> None:
        """Compute a batch again, without effect, with the ranks that have one left."""
        metrics = [*held_metrics(self._task), *self._objects.values()]
        before = [copy.deepcopy(metric.__dict__) for metric in metrics]
        with torch.no_grad(), autocast():
            self._task.metrics(model, batch)
        for metric, state in zip(metrics, before, strict=True):
            metric.__dict__.update(state)

    def close(self) -> None:
        """End loading processes."""
        if isinstance(self._batches, DataLoader):
            shut_down(self._batches)

    def start(self) -> Any:
        """The first batch of a stream, on every rank; None if it is empty."""
        _, data = next(iter(self._batches), (0, None))
        return raise_forwarded(data)

    def _turns(self) -> Iterator[_Turn | None]:
        """This rank's batch of every round, None where the round has none for it."""
        if self.is_stream:
            yield from self._turns_of_stream()
            return
        rank, size = self._world.data.rank, self._world.data.size
        batches = iter(self._batches)
        for index in range(rank, self.num_rounds * size, size):
            if index < self.num_batches:
                yield index, next(batches)
            else:
                yield (None, next(batches)) if rank >= self.num_batches else None

    def _turns_of_stream(self) -> Iterator[_Turn | None]:
        rank, size = self._world.data.rank, self._world.data.size
        num_samples, first, own = 0, None, None
        index = -1
        for index, (length, data) in enumerate(self._batches):
            if index and index % size == 0:  # so the round before was not the last
                self.num_batches = max(self.num_batches, index + 1)
                yield own
                own = None
            if index == 0:
                first = data
            if index % size == rank:
                own = (index, data)
            num_samples += length
        if not num_samples:
            raise no_validation_samples()
        self.num_samples, self.num_batches = num_samples, index + 1
        yield (None, first) if rank > index else own

    def _reset(self) -> None:
        """Reset every metric with a state; before the first batch they are found among the task's attributes."""
        for metric in [*held_metrics(self._task), *self._objects.values()]:
            metric.to(self._world.device)
            metric.reset()

    def _same_names(self, before: _Names | None, now: _Names) -> _Names:
        if before is not None and before != now:
            raise SettingError(
                f"{type(self._task).__name__}.metrics() returned {_listed(before)} for one batch",
                f"it returned {_listed(now)} for another, and each is a mean over all samples",
                "return the same names for every batch, with 0 where there is nothing to add",
            )
        return now

    def _same_objects(self, objects: dict[str, Any], *, is_first: bool) -> None:
        for name, metric in objects.items():
            if not is_first and metric is not self._objects.get(name):
                raise SettingError(
                    f"{type(self._task).__name__}.metrics() returned a new {type(metric).__name__} as {name!r}",
                    "it knows nothing of the batches before",
                    "make it once, in __init__ of the task, and call its update() in metrics()",
                )
        self._objects = dict(objects)

    def _total(self, names: _Names, rows: dict[int, Tensor]) -> dict[str, float]:
        world = self._world
        gathered = world.gather_objects(names)
        for main, other in world.broadcast_object([[gathered[0], theirs] for theirs in gathered] if gathered else None):
            self._same_names((main[0], main[1]), (other[0], other[1]))
        table = torch.zeros(self.num_batches, len(names[0]), dtype=torch.float64, device=world.device)
        for index, row in rows.items():
            table[index] = row
        columns = world.data.sum(table).T.tolist() if names[0] else []
        sums = {name: math.fsum(column) for name, column in zip(names[0], columns, strict=True)}
        counts = {name: sums.pop(COUNT_OF + name) for name in names[0] if COUNT_OF + name in sums}
        found = {
            name: total / count if (count := counts.get(name, self.num_samples)) else math.nan
            for name, total in sums.items()
        }
        for name in names[1]:
            found |= compute(name, self._objects[name], world)
        # Ranks that share a model may round differently, and all must decide alike when to stop.
        return dict(world.broadcast_object(found)) if self._is_sharded else found


def metrics_or_signal(
    rounds: Iterator[dict[str, float] | None], world: World, stop_flag: StopFlag, on_round: Callable[[int], None]
) -> dict[str, float] | int:
    """The metrics after the last round of `Validation.run`, or the signal that the ranks agreed on meanwhile."""
    vote = AsyncAllReduce(world)
    for number, metrics in enumerate(rounds, start=1):
        if metrics is not None:
            return metrics
        vote.start(stop_flag.signal_number)
        on_round(number)
        stop = vote.outcome()
        if stop:
            return stop
    raise AssertionError("validation ended without metrics")


def _listed(names: _Names) -> str:
    shown = [f"{name} with its count" if COUNT_OF + name in names[0] else name for name in names[0]]
    return ", ".join([*(name for name in shown if not name.startswith(COUNT_OF)), *names[1]]) or "nothing"
