"""Loaders over streams: batches come one after the other from something that can only be read in order.

Every worker reads the whole stream and takes its rows of each batch; or, with `sharded`, has a stream of its own, and
the workers' streams may be of any lengths: who has no batch left keeps the others company until the last one is done.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy
import torch

from stormo.data.batches import batch_length, cut, move
from stormo.data.order import derive_seed, part
from stormo.errors import SettingError
from stormo.script.agreement import call_site
from stormo.script.loop import Given, Giver, Loop

_END = object()


class _Generators:
    """Random generators of a stream's own, in place of the script's while it is read: all workers read alike."""

    def __init__(self, seed: int) -> None:
        outer = _states()
        torch.default_generator.manual_seed(seed)  # the host's only: torch.manual_seed would move the GPU's too
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        self._states = _states()
        _set_states(outer)

    def __enter__(self) -> None:
        self._outer = _states()
        _set_states(self._states)

    def __exit__(self, *error: object) -> None:
        self._states = _states()
        _set_states(self._outer)


def _states() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state()


def _set_states(states: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])


class _Reading(Giver):
    """What both kinds of streams do: read under generators of their own, and find a position again by reading."""

    def __init__(self, loop: Loop, batches: Iterable[Any], dataset: Any, *, accumulate: int, seed: int) -> None:
        super().__init__(loop, dataset, accumulate)
        self._batches = batches
        self._seed = seed
        self._num_done = 0  # batches of the epoch that are behind us
        self._num_under_way = 0

    def _read(self, own: tuple[int, ...] = ()) -> Iterator[Any]:
        generators = _Generators(derive_seed(self._seed, "stream", self.epoch, *own))
        with generators:
            source = iter(self._batches)
            for number in range(self._num_done):
                if next(source, _END) is _END and not own:
                    raise SettingError(
                        f"a checkpoint was loaded that is {self._num_done} batches into a stream",
                        f"the stream gives only {number}",
                        "give it the same data as before",
                    )
        while True:
            try:
                with generators:
                    batch = next(source)
            except StopIteration:
                return
            yield batch

    def _step_done(self) -> None:
        self._num_done = self._num_under_way

    def _position_state(self, *, goes_on: bool) -> dict[str, Any]:
        return {"num_done": self._num_done if goes_on else 0, "seed": self._seed}

    def _load_position(self, state: dict[str, Any]) -> None:
        if "num_done" not in state:
            raise SettingError(
                f"a checkpoint was loaded whose loader {self.number + 1} read a data set by number",
                "here it reads a stream",
                "load it with the same data, and make the loaders in the same order",
            )
        self._num_done, self._seed = state["num_done"], state["seed"]

    def _rewind(self) -> None:
        self._num_done = self._num_under_way = 0


class StreamLoader(_Reading):
    """One stream for all workers: each takes its rows of every batch."""

    def __iter__(self) -> Iterator[Any]:
        """The batches of the next pass over the stream, on the worker's device."""
        world = self.loop.world
        with self._under_way(call_site()) as turn:
            source = self._read()
            for number in itertools.count(self._num_done):
                batch = next(source, None)
                length = 0 if batch is None else batch_length(batch)
                self._cast_batch(f"batch {number + 1}", -1 if batch is None else length)
                self._require_same(self.loop.agreement.settle().numbers)
                if batch is None:
                    return
                self._require_some(length)
                self._num_under_way = number + 1
                share = part(0, length, world.rank, world.size)
                for index in range(self.accumulate):
                    a, b = part(*share, index, self.accumulate)
                    if a == b and not self.trains:
                        continue
                    rows = cut(batch, a, b) if b > a else cut(batch, 0, 1)
                    given = Given(b - a, length, is_last=index == self.accumulate - 1)
                    yield from self._give(move(rows, world.device), given, turn)
                self._num_done = number + 1

    def _require_same(self, lengths: Sequence[int]) -> None:
        other = next((rank for rank, length in enumerate(lengths) if length != lengths[0]), None)
        if other is not None:
            first, second = (
                "no batch" if length < 0 else f"a batch of {length}" for length in (lengths[0], lengths[other])
            )
            raise SettingError(
                f"a stream was passed to world.loader() that gives rank 0 {first}",
                f"rank {other} gets {second} at the same place, and each should see the same stream",
                "let it not depend on the worker, or say sharded=True if every worker has a part of its own",
            )

    def _require_some(self, length: int) -> None:
        if length == 0:
            raise SettingError(
                "a stream was passed to world.loader() that gives an empty batch",
                "there is no sample in it",
                "leave such batches out of the stream",
            )


class ShardedLoader(_Reading):
    """A stream for each worker: every batch counts, however unequally long the streams are."""

    def __iter__(self) -> Iterator[Any]:
        """The batches of the next pass over this worker's stream, on its device."""
        world = self.loop.world
        with self._under_way(call_site()) as turn:
            source = self._read((world.rank,))
            number = self._num_done
            last: Any = None
            batch, total = self._next(source, number)
            while total:
                # One ahead: the last batch of a step must be known as such, also where the streams end before it.
                ahead, total_ahead = self._next(source, number + 1)
                self._num_under_way = number + 1
                is_last = (number + 1) % self.accumulate == 0 or not total_ahead
                last = batch if batch is not None else last
                if batch is not None or self.trains:
                    self._require_some(last)
                    length = 0 if batch is None else batch_length(batch)
                    step_samples = total if self.accumulate == 1 else None
                    given = Given(length, step_samples, is_last=is_last, pass_samples=total)
                    yield from self._give(move(last, world.device), given, turn)
                if is_last:
                    self._num_done = number + 1
                batch, total, number = ahead, total_ahead, number + 1

    def _next(self, source: Iterator[Any], number: int) -> tuple[Any, int]:
        batch = next(source, None)
        self._cast_batch(f"batch {number + 1}", 0 if batch is None else batch_length(batch))
        return batch, sum(self.loop.agreement.settle().numbers)

    def _require_some(self, last: Any) -> None:
        if last is None:
            raise SettingError(
                f"a stream was passed to world.loader(sharded=True) that gives rank {self.loop.world.rank} no batch",
                "it has nothing to stand in with while the others train",
                "give every worker at least one batch, or start fewer workers",
            )
