"""A loader as the rest of a user's loop sees it: which batch it has given, and where a load would go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from stormo.data.order import part
from stormo.errors import SettingError, counted
from stormo.script.loop import Given, Loop


class Giver:
    """A loader as `backward`, `step` and `save` see it, and with what scripts read from a DataLoader.

    Args:
        loop: it takes part in.
        dataset: as the script has given it.
        accumulate: passes of a step.
        global_batch_size: samples of all workers in a step; None where the batches come as they are.
        own: the script's own DataLoader, where it has one.
    """

    num_workers: int  # processes that read
    collate_fn: Callable[[list[Any]], Any]

    def __init__(
        self,
        loop: Loop,
        dataset: Any,
        accumulate: int,
        *,
        global_batch_size: int | None,
        own: DataLoader[Any] | None,
    ) -> None:
        self.loop = loop
        self.dataset = dataset
        self.accumulate = accumulate
        self.global_batch_size = global_batch_size
        self.sampler: Any = None if own is None else own.sampler
        self.batch_sampler: Any = None if own is None else own.batch_sampler
        self.drop_last = own is not None and own.drop_last
        self.number = loop.add_loader(self)
        self.epoch = 0
        self.given: Given | None = None
        self.stepped: Given | None = None  # the batch that the last step was taken with
        self.is_held = False  # more than one step was taken with it
        self.trains = False  # backward was called in this iteration: no worker may be left without a batch
        self._num_begun = 0  # steps of this epoch,
        self._num_done = 0  # and those that a load would not go through again
        self._turn: object | None = None  # the iteration under way
        self._is_left = False  # that iteration was left in the middle, to be gone on with after a load
        self._where = ""

    @property
    def num_samples(self) -> int:
        """This worker's samples in the batch under way; 0 for a stand-in, which is there so that nobody waits."""
        if self.given is None:
            raise SettingError(
                "loader.num_samples was asked for outside of a loop over the loader",
                "no batch is under way",
                "ask inside the loop",
            )
        return self.given.num_samples

    @property
    def batch_size(self) -> int | None:
        """The most samples that this worker gets in one pass; None where the batches come as they are."""
        if self.global_batch_size is None:
            return None
        world = self.loop.world
        start, stop = part(0, self.global_batch_size, world.rank, world.size)
        return -(-(stop - start) // self.accumulate)

    @property
    def num_behind(self) -> int:
        """Batches of the epoch that are behind: after a load `enumerate(loader, loader.num_behind)` counts on."""
        return 0 if self._is_left else self._num_done * self.accumulate

    @contextmanager
    def _under_way(self, where: str) -> Iterator[object]:
        if self._turn is not None:  # a newer iteration takes over
            self._end_turn(is_whole=False)
        if self._is_left:
            self._next_epoch()
        self._where = where
        self.loop.announce(f"the start of {self._name()}", where)
        self.loop.begin()
        self._num_begun = self._num_done
        turn = self._turn = object()
        self.loop.iterating.append(self)
        is_whole = False
        try:
            yield turn
            is_whole = True
            self._compare_weights(turn)
        finally:
            if self._turn is turn:
                self._end_turn(is_whole=is_whole)

    def _compare_weights(self, turn: object) -> None:
        """At the end of what may have been training, also by hand: nothing may follow that would compare them."""
        if self._turn is turn and self.loop.groups and self.loop.world.size > 1:
            may_train = torch.is_grad_enabled() and any(group.model.training for group in self.loop.groups)
            self.loop.announce(f"the end of {self._name()}", self._where, compares=may_train)

    def _end_turn(self, *, is_whole: bool) -> None:
        self._turn = self.given = self.stepped = None
        self.is_held = False
        self.loop.iterating.remove(self)
        # After a break the next loop is a new epoch, as with any loader; unless the script breaks off to stop.
        self._is_left = not is_whole and self.loop.told_to_stop and self._goes_on
        if not self._is_left:
            if not is_whole:
                self._break_off()
            self._next_epoch()

    def _next_epoch(self) -> None:
        self.epoch += 1
        self._num_begun = self._num_done = 0
        self.trains = self._is_left = False
        self._rewind()

    @property
    def _goes_on(self) -> bool:
        """Whether a resume goes on in the middle of the epoch; where there is training, a validation starts anew."""
        return self.trains or not any(group.optimizers for group in self.loop.groups)

    def _give(self, batch: Any, given: Given, turn: object) -> Iterator[Any]:
        self.given = given
        with self.loop.absent(given.is_ghost):
            yield batch
        if self._turn is not turn:
            raise SettingError(
                f"loader {self.number + 1} was iterated in {self._where} and asked for more by an earlier iteration",
                "a loader has one position",
                "finish one loop before the next one starts, or make a second loader",
            )

    def take(self) -> None:
        """A step was taken with the batch under way: a save from here on goes on behind it."""
        if self.given is not None and self.given.is_last:
            self.is_held = self.given is self.stepped
            self.stepped = self.given
            self._step_done()

    def end_batch(self) -> None:
        """A save comes behind all that is done with the batch under way, if it was trained, whoever took the step."""
        if self.given is not None and self.given.is_trained and self.given.is_last:
            self._step_done()

    def check_first(self, given: Given) -> None:
        """Refuse, on all workers, a first batch of a training that is too small for each to have a part of it."""
        size = self.loop.world.size
        parts = size * self.accumulate
        if given.step_samples is not None and given.step_samples < parts:
            product = f"{counted(size, 'worker')} × {counted(self.accumulate, 'pass')}"
            self.loop.agreement.refuse(
                SettingError(
                    f"a training loop began with a batch of {given.step_samples}",
                    f"{product} need at least {parts} in the first",
                    "give larger batches, start fewer workers, or, where nothing is trained, call model.eval()",
                )
            )

    def place(self) -> str:
        """Where a load would go on, in words."""
        state = self.state()
        behind = state["position"] if isinstance(state["position"], list) else [state["position"]]
        return f"epoch {state['epoch'] + 1} behind {counted(' + '.join(str(count) for count in behind), 'sample')}"

    def state(self) -> dict[str, Any]:
        """Where it is, as plain values and tensors."""
        goes_on = self._turn is None or self._goes_on
        num_done = self._num_done if goes_on else 0
        place = self._position_state(goes_on=goes_on)
        return {"epoch": self.epoch, "trains": self.trains, "num_done": num_done, **place}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from there with the next iteration."""
        self.epoch, self.trains, self._is_left = state["epoch"], state["trains"], False
        self._num_done = state.get("num_done", 0)
        self._load_position(state)

    def _name(self) -> str:
        return f"epoch {self.epoch + 1} of loader {self.number + 1}"

    def _cast_batch(self, what: str, number: int = 0) -> None:
        # Not compared by the line: a progress bar on one worker only is another caller there.
        self.loop.agreement.cast(f"{what} of {self._name()}", self._where, number)

    def _step_done(self) -> None:
        self._num_done = self._num_begun
        self._advance()

    def _advance(self) -> None:
        """Put the position behind the step under way."""
        raise NotImplementedError

    def _position_state(self, *, goes_on: bool) -> dict[str, Any]:
        raise NotImplementedError

    def _load_position(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def _rewind(self) -> None:
        raise NotImplementedError

    def _break_off(self) -> None:
        """An epoch ends before its end."""
