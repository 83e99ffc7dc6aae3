"""Reads data sets so that a sample depends on its position alone, whichever process of whichever worker reads it.

`SeededDataset` reads by index, `SeekableStream` and `RoundRobin` read in order.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from stormo.data.batches import Collate, collate
from stormo.data.bookmarks import NOT_THE_SAME, NUM_CHECKED, Bookmark, digest
from stormo.data.generators import generators_kept, host_states, same_states, seed_host, set_host_states
from stormo.data.order import derive_seed
from stormo.data.processes import PickleByValue, batch_or_error, open_loader
from stormo.data.tensors import TensorData
from stormo.errors import SettingError, pluralize

StreamBatch = tuple[Any, dict[str, Any] | None, str | None]  # samples, a bookmark, a note for the user
Key = tuple[int, int]  # a sample and the seed of its randomness
SECONDS_BETWEEN_BOOKMARKS = 1.0  # a state can be large, and a resume reads up to a second again
_END = object()


def is_stream(data: Any) -> bool:
    """Whether a data set can only be read in order."""
    has_index = hasattr(data, "__getitem__") or hasattr(data, "__getitems__")
    return isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not has_index)


def known_length(data: Any) -> int | None:
    """The number of samples of a data set; None for a stream without a length."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        if is_stream(data):
            return None
        raise


def read(data: Any, indices: list[int]) -> list[Any]:
    """Samples by index, at once where a data set has a way to, as torch's loaders read them."""
    if callable(getattr(data, "__getitems__", None)):
        return list(data.__getitems__(indices))
    return [data[index] for index in indices]


def read_one(data: Any, index: int) -> Any:
    """One sample, by `__getitems__` only where there is no `__getitem__`."""
    inner = data
    while isinstance(inner, Subset):
        inner = inner.dataset
    has_one = getattr(type(inner), "__getitem__", Dataset.__getitem__) is not Dataset.__getitem__
    return data[index] if has_one else read(data, [index])[0]


class SeededDataset(PickleByValue, Dataset[Any]):
    """Reads every sample as if all generators were seeded for it: its random numbers depend on its position alone.

    Seeding takes longer than many a sample. It is skipped while reading draws nothing. Two checks find that out: the
    first sample is the same under two seeds, and a batch leaves the generators unchanged. A batch that moved them is
    read again with seeds, as is every batch from then on.
    """

    def __init__(self, data: Any) -> None:
        self.data = data
        inner = data
        while type(inner) is Subset:
            inner = inner.dataset
        self._may_draw = type(inner) not in (TensorData, TensorDataset)
        self._needs_seeds: bool | None = None  # where it may draw: unknown before the first batch

    def keys(self, order: Tensor, start: int, stop: int, seed: int, epoch: int) -> list[Key]:
        """What to ask for to read the positions [start, stop) of an epoch's order."""
        samples = order[start:stop].tolist()
        if not self._may_draw:
            return [(sample, 0) for sample in samples]
        return [(sample, derive_seed(seed, epoch, start + n)) for n, sample in enumerate(samples)]

    def __getitem__(self, key: Key) -> Any:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[Key]) -> list[Any]:
        """The samples of a batch."""
        if self._may_draw and self._needs_seeds is None:
            samples = self.read_seeded(keys)
            index, seed = keys[0]
            (again,) = self.read_seeded([(index, seed ^ 1)])
            self._needs_seeds = digest(samples[0]) != digest(again)
            return samples
        if self._needs_seeds:
            return self.read_seeded(keys)
        before = host_states() if self._may_draw else None
        samples = read(self.data, [index for index, _ in keys])
        if before is None or same_states(before, host_states()):
            return samples
        set_host_states(before)
        self._needs_seeds = True
        return self.read_seeded(keys)

    def read_seeded(self, keys: list[Key]) -> list[Any]:
        """The samples, each with generators seeded for it."""
        samples = []
        with generators_kept():  # once: putting them back takes longer than a seed
            for index, seed in keys:
                seed_host(seed)
                samples.append(read_one(self.data, index))
        return samples


def key_loader(
    data: Any, batches: Iterable[list[Key]], device: torch.device, num_workers: int, make_batch: Collate = collate
) -> DataLoader[Any]:
    """A loader of the batches with these keys."""
    return open_loader(SeededDataset(data), device, num_workers, make_batch, batch_sampler=batches)


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """What one micro-batch needs of a stream; positions are counted from the beginning of the run."""

    step_start: int  # of the global batch
    read_to: int
    share: tuple[range, ...]  # kept for all micro-batches of the step
    rows: Sequence[int]
    is_first: bool  # of its step
    ends_epoch: bool
    bookmark: Bookmark | None = None  # before it, from which the stream may continue


def collate_stream(make_batch: Collate, found: StreamBatch) -> StreamBatch:
    """The same with a batch of its samples."""
    samples, mark, note = found
    return make_batch(samples), mark, note


class SeekableStream(PickleByValue, Dataset[Any]):
    """Reads a stream forward, as far as each micro-batch needs it, and restarts it where that is due."""

    def __init__(self, data: Any, num_samples: int, seed: int, repeat: bool) -> None:
        self._data = data
        self._num_samples = num_samples  # of an epoch
        self._seed = seed
        self._repeat = repeat  # the stream restarts whenever it ends; otherwise each epoch reads it once
        self._iterator: Iterator[Any] | None = None
        self._round = 0  # how often it was restarted
        self._position = 0  # of the next sample
        self._kept: dict[int, Any] = {}  # of the current step
        self._current = data  # what is iterated
        self._checked_to = 0  # a position: where a bookmark was checked, the stream's state is ahead up to here
        self._marked_s = -math.inf
        self._bookmark: Bookmark | None = None  # of the current step
        self._note: str | None = None

    def __getitems__(self, request: StreamRequest) -> StreamBatch | SettingError:
        """The samples of a micro-batch."""
        self._bookmark = self._note = None
        try:
            if request.is_first:
                with generators_kept():
                    self._read(request)
        except SettingError as error:
            return error
        mark = None if self._bookmark is None else asdict(self._bookmark)
        return [self._kept[row] for row in request.rows], mark, self._note

    def _read(self, request: StreamRequest) -> None:
        first_round, start = 0, 0
        if not self._repeat:
            first_round = request.step_start // self._num_samples
            start = first_round * self._num_samples
        is_elsewhere = self._iterator is None or not start <= self._position <= request.step_start
        if is_elsewhere and not self._seek(request.bookmark, start, request.step_start):
            self._begin(first_round)
            self._position = start
        while self._position < request.step_start:
            self._next()
        if self._position >= self._checked_to and time.monotonic() - self._marked_s >= SECONDS_BETWEEN_BOOKMARKS:
            self._bookmark, self._marked_s = Bookmark.make(self._current, self._position, self._round), time.monotonic()
        self._kept = {}
        while self._position < request.read_to:
            position, sample = self._position, self._next()
            if self._bookmark is not None and len(self._bookmark.digests) < NUM_CHECKED:
                self._bookmark.digests.append(digest(sample))
            # The first one serves as padding.
            if position == request.step_start or any(position in own for own in request.share):
                self._kept[position] = sample
        if request.ends_epoch and not self._repeat:
            self._require_end()

    def _seek(self, mark: Bookmark | None, start: int, stop: int) -> bool:
        """Continue from a bookmark in this range; False if other samples would follow than did when it was made."""
        if mark is None or not start <= mark.position <= stop:
            return False
        try:
            self._begin(mark.round, mark.state)
            self._position = mark.position
            samples = [self._next() for _ in mark.digests]
        except Exception:  # the library's own, for a state that it does not take
            samples = []
        if not samples or [digest(sample) for sample in samples] != mark.digests:
            self._note = NOT_THE_SAME
            return False
        assert self._iterator is not None
        self._iterator = itertools.chain(samples, self._iterator)
        self._checked_to, self._position = self._position, mark.position
        return True

    def _begin(self, number: int, state: dict[str, Any] | None = None) -> None:
        self._round = number
        self._checked_to = 0
        if hasattr(self._data, "set_epoch"):
            self._data.set_epoch(number)
        seed_host(derive_seed(self._seed, "pass", number))  # it may shuffle already here
        self._current = self._data
        if state is not None:
            self._current = copy.deepcopy(self._data)  # a later pass begins without that state
            self._current.load_state_dict(state)
        self._iterator = iter(self._current)

    def _next(self) -> Any:
        epoch, position = divmod(self._position, self._num_samples)
        seed = derive_seed(self._seed, epoch + 1, position)
        assert self._iterator is not None
        seed_host(seed)
        sample = next(self._iterator, _END)
        if sample is _END and self._repeat:
            self._begin(self._round + 1)
            seed_host(seed)
            sample = next(self._iterator, _END)
        if sample is _END:
            self._iterator = None
            if self._repeat:
                raise SettingError(
                    "train_data() gave a stream that restarts whenever it ends",
                    f"round {self._round + 1} over it gave no sample",
                    "let its __iter__ begin from the first sample each time",
                )
            raise self._wrong_length(f"it ended after {position}")
        self._position += 1
        return sample

    def _require_end(self) -> None:
        assert self._iterator is not None
        surplus = next(self._iterator, _END)
        self._iterator = None
        if surplus is not _END:
            raise self._wrong_length(f"it went on with sample {self._num_samples + 1}")

    def _wrong_length(self, why: str) -> SettingError:
        return SettingError(
            f"train_data() gave a stream of {pluralize(self._num_samples, 'sample')} by its __len__",
            why,
            "let its __len__ (interleave: num_samples) be the true number, or set --epoch-samples",
        )


class RoundRobin(PickleByValue, IterableDataset[tuple[int, Any]]):
    """A stream in batches: for each its number of samples and, where it is this worker's turn, its data."""

    def __init__(self, data: Any, batch_size: int, worker: int, num_workers: int, make_batch: Collate) -> None:
        self._data = data
        self._batch_size = batch_size
        self._worker = worker
        self._num_workers = num_workers
        self._make_batch = make_batch

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
                yield len(samples), batch_or_error(self._make_batch, samples) if is_own else None
            if len(samples) < self._batch_size:
                return


def unchanged(batch: Any) -> Any:
    """A batch that is one already."""
    return batch
