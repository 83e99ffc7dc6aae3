"""Loaders over map-style data: every global batch is the same whatever the number of workers, who share it."""

from __future__ import annotations

import itertools
import math
import weakref
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from stormo.data.batches import move
from stormo.data.order import epoch_order
from stormo.data.processes import Requests
from stormo.data.reading import SeededDataset
from stormo.errors import SettingError, pluralize
from stormo.script.collective_check import call_site
from stormo.script.loop import BatchInfo, LoaderBase, Loop

# Settings of a user's own loader that ours takes over.
_TAKEN = ("num_workers", "collate_fn", "timeout", "worker_init_fn", "multiprocessing_context", "persistent_workers")
_Drawn = tuple[Tensor, Tensor]  # the samples of an epoch one after the other, and the length of each batch


class SeededOrder:
    """Equal batches over a permutation that is a pure function of (seed, epoch), or over the data as it is."""

    own: DataLoader[Any] | None = None

    def __init__(self, data: Any, global_batch_size: int, *, shuffle: bool, seed: int) -> None:
        self.seed = seed
        self.global_batch_size = global_batch_size
        self._data = data
        self._shuffle = shuffle

    def __len__(self) -> int:
        return math.ceil(len(self._data) / self.global_batch_size)

    def draw(self, epoch: int, position: int, num_samples: int) -> _Drawn:
        """The order of an epoch, cut into batches from the position on."""
        order = epoch_order(num_samples, self.seed, epoch) if self._shuffle else torch.arange(num_samples)
        # What is done may have been cut into batches of another size: it is one.
        full, rest = divmod(num_samples - position, self.global_batch_size)
        sizes = [position] * (position > 0) + [self.global_batch_size] * full + [rest] * (rest > 0)
        return order, torch.tensor(sizes, dtype=torch.int64)

    def begin(self, epoch: int) -> None:
        """An iteration is made: nothing is drawn."""

    def break_off(self, num_batches: int) -> None:
        """An epoch is left in the middle: nothing was drawn."""

    def end(self) -> None:
        """An epoch ends: nothing is drawn."""

    def state(self, drawn: _Drawn | None, *, is_made: bool) -> dict[str, Any]:
        """What a checkpoint needs besides the seed."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to it."""
        self.seed = state["seed"]


class SamplerOrder:
    """The batches of a user's own loader, drawn on rank 0 exactly as that loader would, and broadcast."""

    def __init__(self, loader: DataLoader[Any], loop: Loop) -> None:
        self.own = loader
        self.global_batch_size = loader.batch_size
        self._world = loop.world
        self._early: _Drawn | None = None  # drawn before the first batch is asked for
        self._source: Iterator[Any] | None = None  # has given all samples of the epoch, and was not asked for its end
        self._before_end: list[Tensor] | None = None  # states of the generators before that end, which may draw

    def __len__(self) -> int:
        return len(self.own.batch_sampler)  # type: ignore[arg-type]

    def begin(self, epoch: int) -> None:
        """Draw what a torch loader draws when an iteration over it is made: the numbers after it must be the same."""
        if not self._world.is_main:
            return
        if epoch == 0 or not self.own.persistent_workers:
            torch.empty((), dtype=torch.int64).random_(generator=self.own.generator)
        self._early = self._draw() if self.own.num_workers else None  # its processes begin to read

    def draw(self, _epoch: int, _position: int, _num_samples: int) -> _Drawn:
        """The order of an epoch, wherever the position is. All workers call it."""
        drawn = self._world.on_rank_0(lambda: self._early or self._draw())
        self._early = None
        one = None if drawn is None else torch.cat([torch.tensor([len(drawn[1])]), drawn[1], drawn[0]])
        shared = self._world.broadcast_vector(one, torch.int64)
        start = 1 + int(shared[0])
        return _narrow(shared[start:]), shared[1:start].clone()

    def break_off(self, num_batches: int) -> None:
        """After a `break`: set the generators as a torch loader would leave them."""
        if num_batches + self.own.num_workers * (self.own.prefetch_factor or 0) > len(self):
            self.end()
        elif self._before_end is not None:
            for generator, state in zip(self._generators(), self._before_end, strict=False):
                generator.set_state(state)
        self._source = self._before_end = None

    def end(self) -> None:
        """Exhaust the sampler, as a torch loader does after the last batch; it may draw."""
        if self._source is not None:
            self._before_end = self._states()
            assert next(self._source, None) is None
            self._source = None

    def state(self, drawn: _Drawn | None, *, is_made: bool) -> dict[str, Any]:
        """The order of the current epoch, which cannot be computed again, and the user's generators."""
        self.end()
        state: dict[str, Any] = {"generators": self._states(), "is_made": is_made}
        drawn = drawn or self._early
        return state if drawn is None else state | {"order": drawn[0], "sizes": drawn[1], "inside": self._before_end}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to it."""
        for generator, saved in zip(self._generators(), state.get("generators", []), strict=False):
            generator.set_state(saved)
        if self._world.is_main:  # which alone draws
            self._before_end = state.get("inside")

    def _draw(self) -> _Drawn:
        """All samples of an epoch and the lengths of its batches; millions of samples take a part of a second."""
        batch_sampler: Any = self.own.batch_sampler
        # A length may be an estimate; what goes far beyond it would fill the memory before the first batch is given.
        limit = 2 * len(self) + 1
        is_plain = type(batch_sampler) is BatchSampler  # which cuts what its sampler gives into equal batches
        length = batch_sampler.batch_size if is_plain else 1
        source = iter(batch_sampler.sampler if is_plain else (list(batch) for batch in batch_sampler))
        self._source = self._before_end = None
        if is_plain and type(batch_sampler.sampler) in (RandomSampler, SequentialSampler):  # whose len is exact
            given = list(itertools.islice(source, len(batch_sampler.sampler)))
            self._source = source
        else:
            given = list(itertools.islice(source, length))
            before = self._states()
            given += itertools.islice(source, max(len(self) - 1, 0) * length)
            # If a sampler draws between batches, the state in which a torch loader would leave it is unknown.
            if all(torch.equal(a, b) for a, b in zip(before, self._states(), strict=True)):
                self._before_end = before
            given += itertools.islice(source, (limit + 1 - len(self)) * length)
        if len(given) > limit * length:
            raise SettingError(
                f"world.loader() was given a sampler with a len of {len(self)} batches",
                f"it gave more than {limit} and did not end, and the workers agree on an epoch's order at its start",
                "let the sampler end after its len, or make it an iterable data set",
            )
        if not is_plain:
            sizes = [len(batch) for batch in given]
            return _to_tensor(itertools.chain.from_iterable(given)), torch.tensor(sizes, dtype=torch.int64)
        full, left = divmod(len(given), length)
        sizes = [length] * full + [left] * (left > 0 and not batch_sampler.drop_last)
        return _to_tensor(given)[: sum(sizes)], torch.tensor(sizes, dtype=torch.int64)

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _generators(self) -> list[torch.Generator]:
        """Those that the user gave to the loader and its sampler."""
        batch_sampler = self.own.batch_sampler
        owners = (self.own, batch_sampler, getattr(batch_sampler, "sampler", None))
        found = [getattr(owner, "generator", None) for owner in owners]
        return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def _to_tensor(samples: Iterable[Any]) -> Tensor:
    """Integers of any kind, NumPy's and torch's too, as a tensor."""
    found = array("q", samples)
    return torch.frombuffer(found, dtype=torch.int64) if found else torch.empty(0, dtype=torch.int64)


def _narrow(order: Tensor) -> Tensor:
    """The same numbers in half the memory, where they fit."""
    fits = not len(order) or max(abs(int(each)) for each in order.aminmax()) < 2**31
    return order.to(torch.int32) if fits else order.clone()


class MapLoader(LoaderBase):
    """Cuts every global batch into micro-batches, and those into the workers' shares; drops and repeats nothing."""

    def __init__(
        self, loop: Loop, data: Any, order: SeededOrder | SamplerOrder, *, accumulate: int, seed: int, **settings: Any
    ) -> None:
        super().__init__(loop, data, accumulate, seed, 0, order.global_batch_size, order.own)
        self._order = order
        self._samples, self._requests = SeededDataset(data), Requests()
        self._settings = {name: value for name, value in settings.items() if value is not None}
        self._reader = self._make_reader()
        self.num_workers, self.collate_fn = self._reader.num_workers, self._reader.collate_fn
        self._length = len(data)  # of the data set, when last counted
        self._grows = False  # or shrinks, between epochs
        self._drawn: _Drawn | None = None  # of the current epoch
        self._made: weakref.ref[Iterator[Any]] | None = None  # an iteration of which no batch was asked for yet
        self._was_made = False  # there was one when the checkpoint was saved

    def _make_reader(self) -> DataLoader[Any]:
        return DataLoader(
            self._samples,
            batch_sampler=self._requests,
            pin_memory=self.loop.world.device.type == "cuda",
            generator=torch.Generator().manual_seed(0),  # reading draws nothing from the script's own generators
            **self._settings,
        )

    @property
    def num_steps(self) -> int:
        """Steps of an epoch, for a scheduler that must know them; `len` counts micro-batches."""
        return len(self._order)

    def __len__(self) -> int:
        """Batches that a worker gets in an epoch, `accumulate` of them for each step."""
        return len(self._order) * self.accumulate

    def __iter__(self) -> Iterator[Any]:
        """The batches of the next epoch, or of the rest of the one that was saved, on the worker's device."""
        if self._iteration is not None:  # a newer iteration takes over
            self._end_iteration(is_complete=False)
        if self._made is not None and self._drawn is not None and self._position >= len(self._drawn[0]):
            self._next_epoch()  # a zip() of loaders ends with the first of them, if nothing was left after a load
        if (self._is_resumable or self._drawn is None) and not self._was_made:
            self._order.begin(self.epoch + self._is_resumable)
        self._was_made = False
        made = self._iterate(call_site())
        self._made = weakref.ref(made)
        return made

    def _iterate(self, where: str) -> Iterator[Any]:
        with self._iterating(where) as iteration:
            self._made = None
            num_samples = self._count_samples()
            if self._drawn is None:
                self._drawn = self._order.draw(self.epoch, self._position, num_samples)
            order, sizes = self._drawn
            steps = _steps(sizes.cumsum(0).tolist(), self._position)
            is_small = bool(steps) and steps[-1][1] - steps[-1][0] < self.loop.world.size * self.accumulate
            if is_small and len(steps) > 1 and self.loop.has_shards and not torch.is_grad_enabled():
                steps[-2:] = [(steps[-2][0], steps[-1][1])]  # every worker must run a sharded model
            spans = (span for step in steps for span in self._spans(*step))
            self._requests.items = (self._keys(order, span.start, span.stop) for span in spans if span.num_samples)
            reader = iter(self._reader)
            for start, stop in steps:
                self._next_position = stop
                self._num_begun += 1
                if self._must_post():
                    self._post_batch(f"the batch at sample {start}")
                for span in self._spans(start, stop):
                    if span.num_samples:
                        batch = next(reader)
                    elif self.trains:
                        batch = self.collate_fn([self._samples[self._keys(order, *span.padded)[0]]])
                    else:
                        continue  # a validation counts what there is
                    yield from self._give(move(batch, self.loop.world.device), BatchInfo.of(span), iteration)
                self._step_done()

    def _count_samples(self) -> int:
        """Of the epoch that begins: a data set may have grown since the last one, on all workers alike."""
        here = len(self.dataset)
        if self._position and self._length <= here:
            here = self._length  # the rest of an epoch that began with so many
        elif self._position:
            self.loop.check.raise_on_all(self._other_data(pluralize(self._length, "sample")))
        counts = self.loop.check.exchange(f"the samples of {self._name()}", self._where, here)
        other = next((rank for rank, count in enumerate(counts) if count != counts[0]), None)
        if other is not None:
            raise SettingError(
                f"{self._name()} was to begin with {pluralize(counts[0], 'sample')} on rank 0",
                f"the data set has {counts[other]} on rank {other}",
                "let it grow alike on all workers (world.gather brings together what each has found)",
            )
        if here != self._length:
            self._grows, self._length = True, here
            self._reader = self._make_reader()  # processes that stay have the data set as it was when they began
        return here

    def _must_post(self) -> bool:
        """Whether no backward shows the others that this worker continues; saves half of all posts."""
        is_trained = self.trains and self.batch_info is not None and self.batch_info.is_trained
        return not is_trained or self.loop.runs_together

    def _keys(self, order: Tensor, start: int, stop: int) -> list[Any]:
        return self._samples.keys(order, start, stop, self._seed, self.epoch)

    def state(self) -> dict[str, Any]:
        """Where it is, and the order if it cannot be computed again."""
        state, here = super().state(), len(self.dataset)
        length = {"num_samples": self._length if state["position"] else here}
        is_made = self._iteration is None and self._made is not None and self._made() is not None
        order = self._order.state(self._drawn, is_made=is_made)
        return state | length | {"grows": self._grows or here != self._length} | order

    def load_state(self, state: dict[str, Any]) -> None:
        """Resume there with the next iteration."""
        if "num_samples" not in state:
            raise self._other_data("a stream")
        self._grows = bool(state.get("grows"))
        # One that grows may have its length only after the script has read it from the checkpoint.
        if state["num_samples"] != len(self.dataset) and not self._grows:
            raise self._other_data(pluralize(state["num_samples"], "sample"))
        super().load_state(state)
        self._length = state["num_samples"]
        self._drawn = (state["order"], state["sizes"]) if "order" in state else None
        self._was_made = bool(state.get("is_made"))
        self._order.load_state(state)

    def _other_data(self, had: str) -> SettingError:
        return SettingError(
            f"a checkpoint was loaded whose loader {self.number + 1} had {had}",
            f"here it has {len(self.dataset)}",
            "load it with the same data, and make the loaders in the same order",
        )

    def _end_order(self, *, is_broken: bool) -> None:
        if is_broken:
            self._order.break_off(self._num_begun)
        self._order.end()
        self._drawn = None


def _steps(stops: list[int], begin: int) -> list[tuple[int, int]]:
    """Where each batch from a position on starts and stops.

    One that the position is inside of, as after a load with other batches, is cut: nothing is lost.
    """
    return [(max(start, begin), stop) for start, stop in zip([0, *stops], stops, strict=False) if stop > begin]


def taken_settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """How a user's own loader reads, for ours to read in the same way."""
    settings = {name: getattr(loader, name) for name in _TAKEN}
    if loader.num_workers:
        settings["prefetch_factor"] = loader.prefetch_factor
    return settings
