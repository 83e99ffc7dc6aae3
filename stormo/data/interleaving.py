"""Many files read as one stream: a few of them are open at a time, and give a sample each in turn.

The order is a function of the seed and the round over the files alone, so that a stream of files is shared between
workers and resumed as any other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import IterableDataset

from stormo.errors import SettingError

_File = TypeVar("_File")
_END = object()


class Interleaved(IterableDataset[Any], Generic[_File]):
    """A stream over the samples of many files, which are read when they are needed.

    Args:
        files: in an order that is the same in every process, such as a sorted one.
        read: gives the samples of one file, one after the other; a function at the top level of a file.
        cycle: how many files are open at a time; each gives one sample before its turn comes again.
        shuffle: take the files in another order in every round.
        num_samples: of all files together, where it is known; otherwise --epoch-samples says what makes an epoch.
    """

    def __init__(
        self,
        files: Sequence[_File],
        read: Callable[[_File], Iterable[Any]],
        *,
        cycle: int = 4,
        shuffle: bool = True,
        num_samples: int | None = None,
    ) -> None:
        if isinstance(files, str | Iterator | Set):
            raise SettingError(
                f"interleave() was given a {type(files).__name__}",
                "it takes a list of files, whose order is the same in every process",
                'give it something like sorted(Path("data").glob("*.npy"))',
            )
        if not files:
            raise SettingError("interleave() was given no files", "there is nothing to read", "check where they lie")
        if cycle < 1:
            raise SettingError(f"interleave(cycle={cycle}) was called", "one file is open at least", "set 1 or more")
        if num_samples is not None and num_samples < 1:
            raise SettingError(
                f"interleave(num_samples={num_samples}) was called", "it is the samples of all files", "set 1 or more"
            )
        self._files = list(files)
        self._read = read
        self._cycle = cycle
        self._shuffle = shuffle
        self._num_samples = num_samples

    def __len__(self) -> int:
        if self._num_samples is None:
            raise TypeError("it is not known how many samples the files hold")
        return self._num_samples

    def __iter__(self) -> Iterator[Any]:
        # The reader of the stream has seeded the generator for this round, in every process alike.
        order = torch.randperm(len(self._files)).tolist() if self._shuffle else range(len(self._files))
        return self._samples([self._files[index] for index in order])

    def _samples(self, files: list[_File]) -> Iterator[Any]:
        waiting = iter(files)
        places = [self._place(iter(self._read(file)), waiting) for file in itertools.islice(waiting, self._cycle)]
        while places:
            for place in list(places):
                sample = next(place, _END)
                if sample is _END:
                    places.remove(place)
                else:
                    yield sample

    def _place(self, first: Iterator[Any], waiting: Iterator[_File]) -> Iterator[Any]:
        """The samples of a place among the open files: a file that has ended gives way to one that waits."""
        yield from first
        for file in waiting:
            yield from self._read(file)


interleave = Interleaved
