"""In which order samples come, and in which batches: stormo's own, or as a script's DataLoader would draw them."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from stormo.data.order import epoch_order
from stormo.errors import SettingError
from stormo.script.loop import Loop


class PlainOrder:
    """Equal batches over a permutation that is a pure function of (seed, epoch), or over the data as it lies."""

    def __init__(self, data: Any, global_batch_size: int, *, shuffle: bool, seed: int) -> None:
        self.seed = seed
        self.global_batch_size = global_batch_size
        self.own: DataLoader[Any] | None = None
        self._data = data
        self._shuffle = shuffle

    def __call__(self, epoch: int, position: int, num_samples: int) -> tuple[Tensor, Tensor]:
        """The samples of an epoch one after the other, and the length of each batch: cut from the position on."""
        order = epoch_order(num_samples, self.seed, epoch) if self._shuffle else torch.arange(num_samples)
        # What is behind us is one stretch: it may have been cut into batches of another size.
        full, rest = divmod(num_samples - position, self.global_batch_size)
        sizes = [position] * (position > 0) + [self.global_batch_size] * full + [rest] * (rest > 0)
        return order, torch.tensor(sizes, dtype=torch.int64)

    def generators(self) -> list[torch.Generator]:
        """None of its own."""
        return []

    def begin(self, epoch: int) -> None:
        """Nothing is drawn."""

    def leave(self, num_batches: int) -> None:
        """Nothing was drawn."""

    def end(self) -> None:
        """Nothing is drawn behind the last batch."""

    def __len__(self) -> int:
        return math.ceil(len(self._data) / self.global_batch_size)


class SamplerOrder:
    """The batches of a user's own loader, drawn on the main worker exactly as that loader would, and shared."""

    def __init__(self, loader: DataLoader[Any], loop: Loop) -> None:
        self.own = loader
        self.global_batch_size = loader.batch_size
        self._loop = loop
        self.early: tuple[Tensor, Tensor] | None = None  # drawn before the first batch is asked for
        self._source: Iterator[Any] | None = None  # has given all samples of the epoch, and not been asked for its end
        # Where the generators were before that end, which may draw once more.
        self.inside: list[Tensor] | None = None

    def begin(self, epoch: int) -> None:
        """Draw what a torch loader draws when an iteration over it is made: the numbers after it must be the same."""
        if not self._loop.world.is_main:
            return
        if epoch == 0 or not self.own.persistent_workers:
            torch.empty((), dtype=torch.int64).random_(generator=self.own.generator)
        self.early = self._draw() if self.own.num_workers else None  # its processes begin to read

    def leave(self, num_batches: int) -> None:
        """An epoch is left in the middle: put the generators where a torch loader leaves them, which has not ended."""
        asked = num_batches + self.own.num_workers * (self.own.prefetch_factor or 0)
        if asked > len(self):
            self.end()
        elif self.inside is not None:
            for generator, state in zip(self.generators(), self.inside, strict=False):
                generator.set_state(state)
        self._source = self.inside = None

    def end(self) -> None:
        """Let the sampler come to its end, as a torch loader does behind the last batch; it may draw there."""
        if self._source is not None:
            self.inside = self._states()
            assert next(self._source, None) is None
            self._source = None

    def __call__(self, _epoch: int, _position: int, _num_samples: int) -> tuple[Tensor, Tensor]:
        """The samples of an epoch one after the other, and the length of each batch, wherever the position is."""
        drawn = self._loop.world.on_main(lambda: self.early or self._draw())
        self.early = None
        one = None if drawn is None else torch.cat([torch.tensor([len(drawn[1])]), drawn[1], drawn[0]])
        shared = self._loop.world.share_vector(one, torch.int64)
        start = 1 + int(shared[0])
        return _narrow(shared[start:]), shared[1:start].clone()

    def _draw(self) -> tuple[Tensor, Tensor]:
        """All samples of an epoch and the lengths of its batches; millions of samples take a part of a second."""
        batch_sampler: Any = self.own.batch_sampler
        # A length may be an estimate; what goes far beyond it would fill the memory before the first batch is given.
        limit = 2 * len(self) + 1
        is_plain = type(batch_sampler) is BatchSampler  # which cuts what its sampler gives into equal batches
        length = batch_sampler.batch_size if is_plain else 1
        source = iter(batch_sampler.sampler if is_plain else (list(batch) for batch in batch_sampler))
        self._source = self.inside = None
        if is_plain and type(batch_sampler.sampler) in (RandomSampler, SequentialSampler):  # whose len is the truth
            given = list(itertools.islice(source, len(batch_sampler.sampler)))
            self._source = source
        else:
            given = list(itertools.islice(source, length))
            before = self._states()
            given += itertools.islice(source, max(len(self) - 1, 0) * length)
            # One that draws as it goes has come to other states: where a torch loader would leave it is not kept.
            is_same = all(torch.equal(a, b) for a, b in zip(before, self._states(), strict=True))
            self.inside = before if is_same else None
            given += itertools.islice(source, (limit + 1 - len(self)) * length)
        if len(given) > limit * length:
            raise SettingError(
                f"a loader was passed to world.loader() whose sampler has len {len(self)} in batches",
                f"it gave more than {limit} and did not end, and the workers agree on an epoch's order at its start",
                "let the sampler end after its len, or make it an iterable data set",
            )
        if not is_plain:
            sizes = [len(batch) for batch in given]
            return _numbers([index for batch in given for index in batch]), torch.tensor(sizes, dtype=torch.int64)
        full, left = divmod(len(given), length)
        sizes = [length] * full + [left] * (left > 0 and not batch_sampler.drop_last)
        return _numbers(given)[: sum(sizes)], torch.tensor(sizes, dtype=torch.int64)

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self.generators()]

    def generators(self) -> list[torch.Generator]:
        """Those the user has given to the loader and its sampler."""
        batch_sampler = self.own.batch_sampler
        owners = (self.own, batch_sampler, getattr(batch_sampler, "sampler", None))
        found = [getattr(owner, "generator", None) for owner in owners]
        return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())

    def __len__(self) -> int:
        return len(self.own.batch_sampler)  # type: ignore[arg-type]


def _numbers(samples: list[Any]) -> Tensor:
    """Whole numbers of any kind, NumPy's and torch's too, as a tensor."""
    try:
        found = array("q", samples)
    except TypeError:
        wrong = next((each for each in samples if not hasattr(each, "__index__")), None)
        if wrong is None:
            raise
        raise SettingError(
            f"a loader whose sampler gives {type(wrong).__name__} was passed to world.loader()",
            "the workers agree on samples by their number",
            "let the sampler give whole numbers",
        ) from None
    return torch.frombuffer(found, dtype=torch.int64) if found else torch.empty(0, dtype=torch.int64)


def _narrow(order: Tensor) -> Tensor:
    """The same numbers in half the memory, where they fit."""
    fits = not len(order) or max(abs(int(each)) for each in order.aminmax()) < 2**31
    return order.to(torch.int32) if fits else order.clone()
