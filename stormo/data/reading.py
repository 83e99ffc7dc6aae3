"""Reads a stream forward, each sample under generators seeded for its position, and starts it anew where it is due."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from stormo.data.batches import Collate
from stormo.data.generators import generators_kept, seed_host
from stormo.data.order import derive_seed
from stormo.data.sending import Travels
from stormo.data.streaming import Answering, Refusal
from stormo.errors import SettingError, counted

_END = object()


def is_stream(data: Any) -> bool:
    """Whether a data set gives its samples only one after the other."""
    is_read_by_number = hasattr(data, "__getitem__") or hasattr(data, "__getitems__")
    return isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not is_read_by_number)


def known_length(data: Any) -> int | None:
    """The number of samples of a data set; None for a stream that does not tell."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        if is_stream(data):
            return None
        raise


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one pass wants of a stream; positions are counted from the beginning of the run."""

    step_start: int  # of the global batch
    read_to: int
    share: tuple[int, int]  # kept for this pass and the others of the same step
    rows: Sequence[int]
    is_first: bool  # pass of its step
    ends_epoch: bool


class Reading(Travels, Dataset[Any]):
    """Reads a stream forward, as far as each pass wants it, and starts it anew where that is due."""

    def __init__(self, data: Any, num_samples: int, seed: int, goes_on: bool) -> None:
        self._data = data
        self._num_samples = num_samples  # of an epoch
        self._seed = seed
        self._goes_on = goes_on  # from epoch to epoch; otherwise each epoch is one pass over the stream
        self._iterator: Iterator[Any] | None = None
        self._pass = 0
        self._position = 0  # of the next sample
        self._kept: dict[int, Any] = {}  # of the step under way

    def __getitems__(self, wanted: Wanted) -> list[Any] | Refusal:
        """The samples of a pass."""
        try:
            if wanted.is_first:
                with generators_kept():
                    self._read(wanted)
        except SettingError as error:
            return Refusal(str(error))
        return [self._kept[row] for row in wanted.rows]

    def _read(self, wanted: Wanted) -> None:
        first_pass, begins_at = 0, 0
        if not self._goes_on:
            first_pass = wanted.step_start // self._num_samples
            begins_at = first_pass * self._num_samples
        if self._iterator is None or not begins_at <= self._position <= wanted.step_start:
            self._begin(first_pass)
            self._position = begins_at
        while self._position < wanted.step_start:
            self._next()
        self._kept = {}
        start, stop = wanted.share
        while self._position < wanted.read_to:
            position, sample = self._position, self._next()
            if position == wanted.step_start or start <= position < stop:  # the first one stands in for none at all
                self._kept[position] = sample
        if wanted.ends_epoch and not self._goes_on:
            self._require_end()

    def _begin(self, number: int) -> None:
        """Start the stream anew; its passes are numbered from 0."""
        self._pass = number
        if hasattr(self._data, "set_epoch"):
            self._data.set_epoch(number)
        seed_host(derive_seed(self._seed, "pass", number))  # it may shuffle already here
        self._iterator = iter(self._data)

    def _next(self) -> Any:
        epoch, position = divmod(self._position, self._num_samples)
        seed = derive_seed(self._seed, epoch + 1, position)
        assert self._iterator is not None
        seed_host(seed)
        sample = next(self._iterator, _END)
        if sample is _END and self._goes_on:
            self._begin(self._pass + 1)
            seed_host(seed)
            sample = next(self._iterator, _END)
        if sample is _END:
            self._iterator = None
            raise self._ended(position)
        self._position += 1
        return sample

    def _require_end(self) -> None:
        assert self._iterator is not None
        surplus = next(self._iterator, _END)
        self._iterator = None
        if surplus is not _END:
            raise SettingError(
                f"train_data() gave a stream of {counted(self._num_samples, 'sample')} by its own length",
                f"it went on with sample {self._num_samples + 1}",
                "let its __len__ (interleave: num_samples) be the true number, or set --epoch-samples",
            )

    def _ended(self, position: int) -> SettingError:
        if self._goes_on:
            return SettingError(
                "train_data() gave a stream that is to start anew whenever it ends",
                f"pass {self._pass + 1} over it gave no sample",
                "let its __iter__ begin from the first sample each time",
            )
        return SettingError(
            f"train_data() gave a stream of {counted(self._num_samples, 'sample')} by its own length",
            f"it ended after {position}",
            "let its __len__ (interleave: num_samples) be the true number, or set --epoch-samples",
        )


class InTurn(Travels, IterableDataset[tuple[int, Any]]):
    """A stream cut into batches: for each its number of samples and, where it is this worker's turn, its data."""

    def __init__(self, data: Any, batch_size: int, worker: int, num_workers: int, make_batch: Collate) -> None:
        self._data = data
        self._batch_size = batch_size
        self._worker = worker
        self._num_workers = num_workers
        self._make_batch = Answering(make_batch)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        with generators_kept():
            seed_host(derive_seed("validation", "start"))
            source = iter(self._data)
        for index in itertools.count():
            samples = []
            with generators_kept():
                for position in range(index * self._batch_size, (index + 1) * self._batch_size):
                    seed_host(derive_seed("validation", position))
                    sample = next(source, _END)
                    if sample is _END:
                        break
                    samples.append(sample)
            if samples:
                # The first one goes to all: a worker that gets no other learns from it what would be measured.
                is_own = index == 0 or index % self._num_workers == self._worker
                yield len(samples), self._make_batch(samples) if is_own else None
            if len(samples) < self._batch_size:
                return
