"""In which order samples come, and in which batches: stormo's own, or as a script's DataLoader would draw them."""

from __future__ import annotations

import itertools
import math
import operator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from stormo.data.order import epoch_order
from stormo.errors import SettingError
from stormo.script.loop import Loop

_MOST_STATES = 200  # a sampler that draws for every batch of a long epoch would fill memory and checkpoints


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

    def __len__(self) -> int:
        return math.ceil(len(self._data) / self.global_batch_size)


class SamplerOrder:
    """The batches of a user's own loader, drawn on the main worker exactly as that loader would, and shared."""

    def __init__(self, loader: DataLoader[Any], loop: Loop) -> None:
        self.own = loader
        self.global_batch_size = loader.batch_size
        self._loop = loop
        self.early: tuple[Tensor, Tensor] | None = None  # drawn before the first batch is asked for
        # Of the generators: from which number of batches on they were so. It ends with the end of the epoch.
        self.states: list[tuple[int, list[Tensor]]] = []
        self.num_notes = 0

    def begin(self, epoch: int) -> None:
        """Draw what a torch loader draws when an iteration over it is made: the numbers after it must be the same."""
        if not self._loop.world.is_main:
            return
        if epoch == 0 or not self.own.persistent_workers:
            torch.empty((), dtype=torch.int64).random_(generator=self.own.generator)
        self.early = self._draw() if self.own.num_workers else None  # its processes begin to read

    def leave(self, num_batches: int) -> None:
        """Take back what was drawn for batches that a torch loader would not have asked its sampler for."""
        asked = num_batches + self.own.num_workers * (self.own.prefetch_factor or 0)
        before = [states for since, states in self.states if since <= min(asked, self.num_notes - 1)]
        for generator, state in zip(self.generators(), before[-1] if before else [], strict=False):
            generator.set_state(state)
        self.states = []

    def __call__(self, _epoch: int, _position: int, _num_samples: int) -> tuple[Tensor, Tensor]:
        """The samples of an epoch one after the other, and the length of each batch, wherever the position is."""
        drawn = (self.early or self._draw()) if self._loop.world.is_main else None
        self.early = None
        one = None if drawn is None else torch.cat([torch.tensor([len(drawn[1])]), drawn[1], drawn[0]])
        shared = self._loop.world.share_vector(one, torch.int64)
        start = 1 + int(shared[0])
        return shared[start:], shared[1:start]

    def _note(self) -> None:
        here = [generator.get_state() for generator in self.generators()]
        last = self.states[-1][1] if self.states else []
        is_same = len(last) == len(here) and all(torch.equal(a, b) for a, b in zip(last, here, strict=True))
        if not is_same and len(self.states) <= _MOST_STATES:
            self.states.append((self.num_notes, here))
        self.num_notes += 1

    def _draw(self) -> tuple[Tensor, Tensor]:
        assert self.own.batch_sampler is not None
        # A length may be an estimate; what goes far beyond it would fill the memory before the first batch is given.
        limit = 2 * len(self) + 1
        batches: list[list[Any]] = []
        self.states, self.num_notes = [], 0
        self._note()
        for batch in itertools.islice(self.own.batch_sampler, limit + 1):
            batches.append(list(batch))
            self._note()
        self._note()
        if len(self.states) > _MOST_STATES:
            self.states = []
        if len(batches) > limit:
            raise SettingError(
                f"a loader was passed to world.loader() whose sampler has len {len(self)} in batches",
                f"it gave more than {limit} and did not end, and the workers agree on an epoch's order at its start",
                "let the sampler end after its len, or make it an iterable data set",
            )
        flat = [index for batch in batches for index in batch]
        wrong = next((index for index in flat if not hasattr(index, "__index__")), None)
        if wrong is not None:
            raise SettingError(
                f"a loader whose sampler gives {type(wrong).__name__} was passed to world.loader()",
                "the workers agree on samples by their number",
                "let the sampler give whole numbers",
            )
        sizes = torch.tensor([len(batch) for batch in batches], dtype=torch.int64)
        numbers = [operator.index(index) for index in flat]  # NumPy's and torch's whole numbers, too
        return torch.tensor(numbers, dtype=torch.int64), sizes

    def generators(self) -> list[torch.Generator]:
        """Those the user has given to the loader and its sampler."""
        batch_sampler = self.own.batch_sampler
        owners = (self.own, batch_sampler, getattr(batch_sampler, "sampler", None))
        found = [getattr(owner, "generator", None) for owner in owners]
        return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())

    def __len__(self) -> int:
        return len(self.own.batch_sampler)  # type: ignore[arg-type]
