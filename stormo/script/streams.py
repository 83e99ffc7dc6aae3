"""Loaders over streams: data that can only be read in order.

Every worker reads the whole stream and takes its rows of each batch. With `sharded` each has its own stream, of any
length: a worker whose stream has ended gets padding until the last one is done.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from stormo.data.batches import batch_length, cut, move, samples_first
from stormo.data.bookmarks import NOT_THE_SAME, Bookmark, digest, is_stateful
from stormo.data.generators import generators_kept, host_states, seed_host, set_host_states
from stormo.data.order import derive_seed
from stormo.data.reading import SECONDS_BETWEEN_BOOKMARKS
from stormo.data.sample_check import require_same_start
from stormo.errors import SettingError, pluralize
from stormo.script.collective_check import call_site
from stormo.script.loop import BatchInfo, LoaderBase, Loop

_END = object()


class _Generators:
    """Separate random generators for a stream: all workers draw the same while they read it."""

    def __init__(self, seed: int) -> None:
        with generators_kept():
            seed_host(seed)
            self.states = host_states()

    def __enter__(self) -> None:
        self._outer = host_states()
        set_host_states(self.states)

    def __exit__(self, *error: object) -> None:
        self.states = host_states()
        set_host_states(self._outer)


class _StreamBase(LoaderBase):
    """Reads a stream under its own random generators, and finds a position again by reading up to it."""

    _is_sharded = False

    def __init__(
        self, loop: Loop, batches: DataLoader[Any], dataset: Any, *, accumulate: int, seed: int, batch_dim: int
    ) -> None:
        start = [0] * (loop.world.size if self._is_sharded else 1)  # samples of each stream
        total = None if self._is_sharded else batches.batch_size
        super().__init__(loop, dataset, accumulate, seed, start, total, batches)
        self._batch_dim = batch_dim
        self.num_workers, self.collate_fn = batches.num_workers, batches.collate_fn
        self._batches = batches
        self._skipped: Any = _END  # the last batch before the position
        self._place: tuple[Bookmark, Any, Any] | None = None  # a recent one, the random state there, the next batch
        self._bookmark: dict[str, Any] | None = None  # of a checkpoint

    def _read(self, stream: int, own: tuple[int, ...] = ()) -> Iterator[Any]:
        position = self._position[stream]
        self._skipped, self._place, marked_s = _END, None, -math.inf
        generators, source, reader, num_read = self._open(position, own)
        while True:
            mark, random = None, generators.states
            if num_read and time.monotonic() - marked_s >= SECONDS_BETWEEN_BOOKMARKS:
                mark, marked_s = Bookmark.make(_owner(reader), num_read, self.epoch), time.monotonic()
            with generators:
                batch = next(source, _END)
            if batch is _END and num_read < position:
                raise SettingError(
                    f"a checkpoint was loaded that is {pluralize(position, 'sample')} into a stream",
                    f"the stream gives only {num_read}",
                    "give it the same data as before",
                )
            if batch is _END:
                return
            if mark is not None:
                self._place = mark, random, batch
            batch = samples_first(batch, self._batch_dim)
            first, num_read = num_read, num_read + batch_length(batch)
            if num_read <= position:
                self._skipped = batch
                continue
            if first < position:
                batch = cut(batch, position - first, batch_length(batch))  # saved with batches of another size
            yield batch

    def _open(self, position: int, own: tuple[int, ...]) -> tuple[_Generators, Iterator[Any], DataLoader[Any], int]:
        """Begin a pass, or continue from the bookmark of a checkpoint if the same batch follows."""
        mark, self._bookmark = self._bookmark, None
        if mark is not None and mark["position"] < position:
            generators = _Generators(0)
            generators.states = mark["random"]
            with contextlib.suppress(Exception):  # the library's own, for a state that it does not take
                reader = copy.deepcopy(self._batches)  # a later pass begins without that state
                _owner(reader).load_state_dict(mark["state"])
                with generators:
                    source = iter(reader)
                    batch = next(source, _END)
                if digest(batch) == mark["digest"]:
                    return generators, itertools.chain([batch], source), reader, mark["position"]
            self.loop.warn_once("bookmark", f"{NOT_THE_SAME}.")
        generators = _Generators(derive_seed(self._seed, "stream", self.epoch, *own))
        with generators:
            return generators, iter(self._batches), self._batches, 0

    def _to_device(self, rows: Any) -> Any:
        return move(samples_first(rows, self._batch_dim, undo=True), self.loop.world.device)

    def load_state(self, state: dict[str, Any]) -> None:
        """Resume there with the next iteration."""
        position = state["position"]
        if not isinstance(position, list):
            raise SettingError(
                f"a checkpoint was loaded whose loader {self.number + 1} read a map-style data set",
                "here it reads a stream",
                "load it with the same data, and make the loaders in the same order",
            )
        if any(position) and len(position) != len(self._start):
            raise SettingError(
                f"a checkpoint was loaded whose loader {self.number + 1} was in {pluralize(len(position), 'stream')}",
                f"here it reads {len(self._start)}",
                f"start {pluralize(len(position), 'worker')}, or save between two epochs",
            )
        super().load_state(state if any(position) else state | {"position": self._start})


class StreamLoader(_StreamBase):
    """One stream for all workers: each takes its rows of every batch."""

    def state(self) -> dict[str, Any]:
        """Where it is, how it is read, and the stream's own state, if it has one."""
        state = super().state() | {"reading": self._reading()}
        if self._place is not None and self._place[0].position < state["position"][0]:
            mark, random, batch = self._place
            place = {"position": mark.position, "state": mark.state, "random": random, "digest": digest(batch)}
            state["bookmark"] = place
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Resume there with the next iteration."""
        super().load_state(state)
        self._bookmark = state.get("bookmark")
        then, here = state.get("reading"), self._reading()
        if any(self._position) and then != here:
            raise SettingError(
                f"a checkpoint was loaded that is inside a stream read by {then or 'at most one process'}",
                f"here it is read by {here or 'at most one process'}, which gives another order",
                "load it with the same num_workers and batch size, or save between two epochs",
            )

    def _reading(self) -> str:
        """What the order of the samples depends on: several processes take turns by batches."""
        reader = self._batches
        return f"{reader.num_workers} processes in batches of {reader.batch_size}" if reader.num_workers > 1 else ""

    def __iter__(self) -> Iterator[Any]:
        """The batches of the next pass over the stream, on the worker's device."""
        with self._iterating(call_site()) as iteration:
            source = self._read(0)
            while True:
                batch = next(source, _END)
                length = -1 if batch is _END else batch_length(batch)
                self._post_batch(f"the batch at sample {self._position[0]}", length)
                self._check_lengths(self.loop.check.wait())
                if batch is _END:
                    return
                if not any(self._position):
                    require_same_start(self.loop.world, batch, self._read_again)
                self._next_position = [self._position[0] + length]
                self._num_begun += 1
                for span in self._spans(0, length):
                    if span.num_samples or self.trains:
                        rows = self._to_device(cut(batch, *span.padded))
                        yield from self._give(rows, BatchInfo.of(span), iteration)
                self._step_done()

    @property
    def _read_again(self) -> Callable[[], Any] | None:
        """Reads the first batch a second time; None where that would take it from the current reading."""
        is_bound = hasattr(self.dataset, "__next__") or self._batches.persistent_workers
        return None if is_bound else lambda: next(self._read(0))

    def _check_lengths(self, lengths: list[int]) -> None:
        other = next((rank for rank, length in enumerate(lengths) if length != lengths[0]), None)
        if other is not None:
            first, second = (
                "no batch" if length < 0 else f"a batch of {length}" for length in (lengths[0], lengths[other])
            )
            raise SettingError(
                f"world.loader() was given a stream that gives rank 0 {first}",
                f"it gives rank {other} {second} at the same place",
                "let it not depend on the worker, or set sharded=True if every worker has its own part",
            )
        if lengths[0] == 0:
            raise SettingError("world.loader() was given a stream", "it gave an empty batch", "leave such batches out")


class ShardedLoader(_StreamBase):
    """A stream for each worker: every batch counts, however unequal the streams are."""

    _is_sharded = True

    @property
    def batch_size(self) -> int | None:
        """The most samples that this worker gets in one micro-batch; None where the batches come as they are."""
        return self._batches.batch_size

    def check_first(self, info: BatchInfo) -> None:
        """Refuse, on all workers, to begin a training with a batch that one of them has no sample of."""
        if info.rank_without is not None:
            self.loop.check.raise_on_all(_no_batch_for(info.rank_without))

    def __iter__(self) -> Iterator[Any]:
        """The batches of the next pass over this worker's stream, on its device."""
        world = self.loop.world
        with self._iterating(call_site()) as iteration:
            source = self._read(world.rank, (world.rank,))
            batch, lengths = self._next(source, 0)
            last = self._skipped
            done = self._position
            for number in itertools.count(1):
                if not any(lengths):
                    return
                # One ahead: the last batch of a step must be known as such, also where the streams end before it.
                ahead, lengths_ahead = self._next(source, number)
                total = sum(lengths)
                self._next_position = done = [n + length for n, length in zip(done, lengths, strict=True)]
                is_last = number % self.accumulate == 0 or not any(lengths_ahead)
                self._num_begun += is_last
                last = last if batch is _END else batch
                if batch is not _END or self.trains:
                    if last is _END:
                        raise _no_batch_for(world.rank)
                    info = BatchInfo(
                        lengths[world.rank],
                        total if self.accumulate == 1 else None,
                        is_last=is_last,
                        micro_batch_samples=total,
                        rank_without=lengths.index(0) if 0 in lengths else None,
                    )
                    yield from self._give(self._to_device(last), info, iteration)
                if is_last:
                    self._step_done()
                batch, lengths = ahead, lengths_ahead

    def _next(self, source: Iterator[Any], number: int) -> tuple[Any, list[int]]:
        batch = next(source, _END)
        self._post_batch(f"batch {number + 1}", 0 if batch is _END else batch_length(batch))
        return batch, list(self.loop.check.wait())


def _owner(reader: DataLoader[Any]) -> Any:
    """What knows the place in a stream: a loader of torchdata, or the data set that is read in this process."""
    return reader if is_stateful(reader) or reader.num_workers else reader.dataset


def _no_batch_for(rank: int) -> SettingError:
    return SettingError(
        f"world.loader(sharded=True) was given a stream that gives rank {rank} no batch",
        "every worker needs one to train with the others",
        "give every worker at least one batch, or start fewer workers",
    )
