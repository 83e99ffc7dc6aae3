"""Loaders over map-style data: every global batch is the same whatever the number of workers, who share it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from stormo.data.batches import move
from stormo.data.order import derive_seed, part
from stormo.data.streaming import Key, Seeded
from stormo.errors import SettingError, counted
from stormo.script.agreement import call_site
from stormo.script.giving import Giver
from stormo.script.loop import Given, Loop
from stormo.script.orders import PlainOrder, SamplerOrder

# Settings of a user's own loader that ours takes over.
_TAKEN = ("num_workers", "collate_fn", "timeout", "worker_init_fn", "multiprocessing_context", "persistent_workers")


class _Shares(Sampler[list[Key]]):
    """This worker's samples of each pass of an epoch, where there are any."""

    def __init__(self) -> None:
        self.passes: Iterable[list[Key]] = []

    def __iter__(self) -> Iterator[list[Key]]:
        return iter(self.passes)


class IndexedLoader(Giver):
    """Cuts every global batch into the workers' shares and those into passes; nothing is dropped or repeated."""

    def __init__(
        self, loop: Loop, data: Any, order: PlainOrder | SamplerOrder, *, accumulate: int, seed: int, **settings: Any
    ) -> None:
        super().__init__(loop, data, accumulate, global_batch_size=order.global_batch_size, own=order.own)
        self._draw_order = order
        self._seed = seed
        self._samples = Seeded(data)
        self._shares = _Shares()
        self._settings = {name: value for name, value in settings.items() if value is not None}
        self._reader = self._make_reader()
        self.num_workers, self.collate_fn = self._reader.num_workers, self._reader.collate_fn
        self._had = len(data)  # samples, when last counted
        self._grows = False  # or shrinks, between epochs
        self._drawn: tuple[Tensor, Tensor] | None = None  # of the epoch under way
        self._position = 0
        self._step_stop = 0
        self._made: weakref.ref[Iterator[Any]] | None = None  # an iteration of which no batch was asked for yet
        self._was_made = False  # there was one when the checkpoint was saved

    def _make_reader(self) -> DataLoader[Any]:
        return DataLoader(
            self._samples,
            batch_sampler=self._shares,
            pin_memory=self.loop.world.device.type == "cuda",
            generator=torch.Generator().manual_seed(0),  # reading draws nothing from the script's own generators
            **self._settings,
        )

    @property
    def num_steps(self) -> int:
        """Steps of an epoch, for a scheduler that must know them; `len` counts passes."""
        return len(self._draw_order)

    def __len__(self) -> int:
        """Batches that a worker gets in an epoch, `accumulate` of them for each step."""
        return len(self._draw_order) * self.accumulate

    def __iter__(self) -> Iterator[Any]:
        """The batches of the next epoch, or of the rest of the one that was saved, on the worker's device."""
        if self._turn is not None:  # a newer iteration takes over
            self._end_turn(is_whole=False)
        if self._made is not None and self._drawn is not None and self._position >= len(self._drawn[0]):
            self._next_epoch()  # a zip() of loaders ends with the first of them, when nothing was left after a load
        if (self._is_left or self._drawn is None) and not self._was_made:
            self._draw_order.begin(self.epoch + self._is_left)
        self._was_made = False
        made = self._iterate(call_site())
        self._made = weakref.ref(made)
        return made

    def _iterate(self, where: str) -> Iterator[Any]:
        with self._under_way(where) as turn:
            self._made = None
            num_samples = self._count_samples()
            if self._drawn is None:
                self._drawn = self._draw_order(self.epoch, self._position, num_samples)
            order, sizes = self._drawn
            stops = sizes.cumsum(0).tolist()
            begin = self._position
            self._shares.passes = (
                self._keys(order, a, b)
                for start, stop in _steps(stops, begin)
                for a, b in self._parts(start, stop)
                if b > a
            )
            reader = iter(self._reader)
            for start, stop in _steps(stops, begin):
                step = self._parts(start, stop)
                self._step_stop = stop
                self._num_begun += 1
                if self._is_unannounced():
                    self._cast_batch(f"the batch at sample {start}")
                for index, (a, b) in enumerate(step):
                    if a == b and not self.trains:
                        continue  # a validation counts what there is
                    is_last = index == self.accumulate - 1
                    batch = next(reader) if b > a else self._stand_in(order, start)
                    given = Given(b - a, stop - start, is_last=is_last)
                    yield from self._give(move(batch, self.loop.world.device), given, turn)
                self._step_done()

    def _count_samples(self) -> int:
        """Of the epoch that begins: a data set may have grown since the last one, on all workers alike."""
        here = len(self.dataset)
        if self._position and self._had <= here:
            here = self._had  # the rest of an epoch that began with so many
        elif self._position:
            self.loop.agreement.refuse(self._other_data(counted(self._had, "sample")))
        counts = self.loop.agreement.exchange(f"the samples of {self._name()}", self._where, here).numbers
        other = next((rank for rank, count in enumerate(counts) if count != counts[0]), None)
        if other is not None:
            raise SettingError(
                f"{self._name()} was to begin with {counted(counts[0], 'sample')} on rank 0",
                f"the data set has {counts[other]} on rank {other}, and each worker takes its share of the same ones",
                "let it grow alike on all workers (world.gather brings together what each has found)",
            )
        if here != self._had:
            self._grows, self._had = True, here
            self._reader = self._make_reader()  # processes that stay have the data set as it was when they began
        return here

    def _is_unannounced(self) -> bool:
        """Whether no worker could tell from a backward that this one goes on; saves half of all announcements."""
        is_trained = self.trains and self.given is not None and self.given.is_trained
        return not is_trained or self.loop.sums_in_models

    def _parts(self, start: int, stop: int) -> list[tuple[int, int]]:
        world = self.loop.world
        share = part(start, stop, world.rank, world.size)
        return [part(*share, index, self.accumulate) for index in range(self.accumulate)]

    def _keys(self, order: Tensor, start: int, stop: int) -> list[Key]:
        samples = order[start:stop].tolist()
        if not self._samples.draws:
            return [(sample, 0) for sample in samples]
        return [(sample, derive_seed(self._seed, self.epoch, start + n)) for n, sample in enumerate(samples)]

    def _stand_in(self, order: Tensor, start: int) -> Any:
        return self.collate_fn([self._samples[self._keys(order, start, start + 1)[0]]])

    def _advance(self) -> None:
        self._position = self._step_stop

    def _position_state(self, *, goes_on: bool) -> dict[str, Any]:
        """Where it is, and the order where it cannot be computed again."""
        position, here = self._position if goes_on else 0, len(self.dataset)
        state: dict[str, Any] = {
            "position": position,
            "seed": self._seed,
            "num_samples": self._had if position else here,
            "grows": self._grows or here != self._had,
        }
        if isinstance(self._draw_order, SamplerOrder):
            self._draw_order.end()
            state["generators"] = [generator.get_state() for generator in self._draw_order.generators()]
            state["is_made"] = self._turn is None and self._made is not None and self._made() is not None
            drawn = self._drawn or self._draw_order.early
            if drawn is not None:
                state["order"], state["sizes"] = drawn
                state["inside"] = self._draw_order.inside
        return state

    def _load_position(self, state: dict[str, Any]) -> None:
        if "num_samples" not in state:
            raise self._other_data("a stream")
        self._grows = bool(state.get("grows"))
        # One that grows may be as long as it was only when the script has read from the checkpoint how long that is.
        if state["num_samples"] != len(self.dataset) and not self._grows:
            raise self._other_data(counted(state["num_samples"], "sample"))
        self._position, self._seed, self._had = state["position"], state["seed"], state["num_samples"]
        self._drawn = (state["order"], state["sizes"]) if "order" in state else None
        self._was_made = bool(state.get("is_made"))
        if isinstance(self._draw_order, PlainOrder):
            self._draw_order.seed = self._seed
            return
        for generator, saved in zip(self._draw_order.generators(), state.get("generators", []), strict=False):
            generator.set_state(saved)
        if self.loop.world.is_main:  # which alone draws
            self._draw_order.inside = state.get("inside")

    def _other_data(self, had: str) -> SettingError:
        return SettingError(
            f"a checkpoint was loaded whose loader {self.number + 1} had {had}",
            f"here it has {len(self.dataset)}, so that its place in the epoch means nothing",
            "load it with the same data, and make the loaders in the same order",
        )

    def _rewind(self) -> None:
        self._draw_order.end()
        self._drawn, self._position = None, 0

    def _break_off(self) -> None:
        self._draw_order.leave(self._num_begun)


def _steps(stops: list[int], begin: int) -> Iterator[tuple[int, int]]:
    """Where each batch from a position on starts and stops.

    One that the position is inside of, as after a load with other batches, is cut: nothing is lost.
    """
    return ((max(start, begin), stop) for start, stop in zip([0, *stops], stops, strict=False) if stop > begin)


def taken_settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """How a user's own loader reads, for ours to read in the same way."""
    settings = {name: getattr(loader, name) for name in _TAKEN}
    if loader.num_workers:
        settings["prefetch_factor"] = loader.prefetch_factor
    return settings
