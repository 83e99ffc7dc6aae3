"""Batches that hold fewer samples than were read for them, as their collate_fn has left some out.

A loss is weighed by the samples that were read, and its mean is over those that are left. That is told and not refused:
fewer rows than samples may as well be pairs or groups, and a file that cannot be read must not end a training of days.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import default_collate

from stormo.data.batches import is_opaque, tensors_in
from stormo.errors import counted
from stormo.script.loop import Given, Loop


class Watched:
    """A script's collate_fn, whose batches come with the rows that are left of them, 0 where none are missing."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> tuple[Any, int]:
        """A batch of the samples, and the rows that are left where there are too few."""
        num_samples, num_present = len(samples), sum(sample is not None for sample in samples)
        batch = self._collate(samples)
        if num_present == num_samples:
            return batch, _fewer_rows(batch, num_samples)
        return batch, num_present if num_present and _is_of(batch, num_present, num_samples) else 0


def watched(collate: Callable[[list[Any]], Any] | None) -> Callable[[list[Any]], Any] | None:
    """A `Watched` one where it is the script's own; torch's leaves nothing out."""
    return collate if collate is None or collate is default_collate else Watched(collate)


@dataclass(slots=True, eq=False, kw_only=True)
class Thinned(Given):
    """A batch with fewer rows than samples that were read for it."""

    num_rows: int
    tells: Callable[[], bool]  # whether it has not been told yet

    def tell(self, loop: Loop) -> None:
        """Say once that its loss is weighed by the samples that were read."""
        # Where it is the only one its weight is 1, whatever is in it.
        if self.num_samples != self.step_samples and self.tells():
            print(  # noqa: T201
                f"stormo: rank {loop.world.rank}: a collate_fn made a batch with {counted(self.num_rows, 'row')} of "
                f"{counted(self.num_samples, 'sample')}, and its loss is weighed by the samples; if that is wrong, "
                "call world.backward(loss, count=...) with what the loss is a mean over.",
                file=sys.stderr,
                flush=True,
            )


def _is_of(batch: Any, num_present: int, num_samples: int) -> bool:
    """Whether everything in a batch is as long as the samples are many that are not None."""
    if isinstance(batch, list | tuple) and batch and all(type(column) in (list, tuple) for column in batch):
        return all(len(column) == num_present for column in batch)  # what zip(*samples) gives
    rows = [tensor.shape for tensor in tensors_in(batch) if tensor.ndim]
    return {shape[0] for shape in rows} == {num_present} and all(num_samples not in shape[1:2] for shape in rows)


def _fewer_rows(batch: Any, num_samples: int) -> int:
    """The first dimension that all tensors share, if it is smaller and nothing in the batch is one for each sample."""
    if is_opaque(batch) or num_samples in _extents(batch):
        return 0
    rows = {tensor.shape[0] for tensor in tensors_in(batch) if tensor.ndim}
    fewest = min(rows, default=0)
    return fewest if len(rows) == 1 and fewest < num_samples else 0


def _extents(value: Any) -> Iterator[int]:
    """All dimensions of the tensors in a batch, and the lengths of lists and of packed sequences."""
    if isinstance(value, Tensor):
        yield from value.shape
    elif isinstance(value, PackedSequence):
        yield int(value.batch_sizes[0])
    elif isinstance(value, list | tuple):
        yield len(value)
        for part in value:
            yield from _extents(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _extents(part)
    else:
        yield from (size for tensor in tensors_in(value) for size in tensor.shape)
