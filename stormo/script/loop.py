"""What the parts of a user's loop know of one another: the loaders under way, the models, who waits for whom."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from stormo.data.order import part
from stormo.errors import SettingError, counted
from stormo.layers.sync_batch_norm import set_absent
from stormo.script.agreement import Agreement, call_site
from stormo.script.copies import Copies
from stormo.world.world import World

if TYPE_CHECKING:
    from stormo.script.stepping import Group


@dataclass(slots=True, eq=False)
class Given:
    """A batch that a loader has given to the loop, and what its gradient weighs."""

    num_samples: int  # of this worker; 0 for a stand-in
    step_samples: int | None  # of all workers and passes of the step; None where it is only known after the last pass
    is_last: bool  # the optimizer steps after it
    pass_samples: int = 0  # of all workers in this pass, where the step's are not known
    lacking: int | None = None  # a rank that has no sample in this pass, where the workers have streams of their own
    is_trained: bool = False  # backward has been called for it, the last time without more=True

    @property
    def is_ghost(self) -> bool:
        """Whether it is a stand-in: no sample was left for this worker, and the others must not wait for it."""
        return self.num_samples == 0


@dataclass(kw_only=True)
class Loop:
    """Shared by the world of a script and everything it has handed out."""

    world: World
    agreement: Agreement
    begin: Callable[[], None]  # called when the first loader starts
    groups: list[Group] = field(default_factory=list)
    iterating: list[Giver] = field(default_factory=list)  # in the middle of an epoch, the innermost last
    is_partial: bool = False  # between the passes of a step that is not complete
    is_stepping: bool = False  # inside of the step of a wrapped optimizer
    awaits_more: bool = False  # the last backward said that another one follows before the step
    weighed: list[tuple[float, Tensor]] | None = None  # in a closure: the losses so far, and what each weighs among all
    sums_in_models: bool = False  # such as those of synchronised batch norm: nobody may come to them alone
    told_to_stop: bool = False  # the script has seen that it should
    num_loaders: int = 0
    folders: set[Path] = field(default_factory=set)  # of checkpoints that this script has loaded from or saved to
    _loaders: dict[int, weakref.ref[Giver]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._copies = Copies(self.world, self.groups)

    def add_loader(self, loader: Giver) -> int:
        """Its number. A script may make loaders again and again, so they are not kept."""
        self.num_loaders += 1
        self._loaders[self.num_loaders - 1] = weakref.ref(loader)
        return self.num_loaders - 1

    @property
    def loaders(self) -> dict[int, Giver]:
        """Those that are still in use, by number."""
        found = {number: reference() for number, reference in self._loaders.items()}
        self._loaders = {number: self._loaders[number] for number, loader in found.items() if loader is not None}
        return {number: loader for number, loader in found.items() if loader is not None}

    @property
    def num_steps(self) -> int:
        """Steps that the optimizers have taken."""
        return max((group.num_steps for group in self.groups), default=0)

    def may_send(self) -> bool:
        """Whether gradients may leave without waiting for what was announced.

        On a GPU they wait: sums inside the model and those of gradients must come in the same order on all workers.
        """
        return self.world.device.type == "cuda" or self.agreement.is_settled()

    def announce(self, what: str, where: str = "") -> None:
        """Announce something that all workers begin with the same rates and weights; refuse it where they have not."""
        numbers = self.agreement.exchange(what, where, self._copies.look()).numbers
        # Copies of another make are found by the next backward, which says more of them.
        if numbers[0] and all(number == numbers[0] for number in numbers):
            first = self.agreement.exchange("rates and weights", number=self._copies.first_difference())
            self._copies.answer(list(first.numbers))

    @contextmanager
    def absent(self, is_ghost: bool) -> Iterator[None]:
        """While a stand-in is under way, keep it out of the models' statistics."""
        models: list[nn.Module] = [group.model for group in self.groups] if is_ghost else []
        for model in models:
            set_absent(model, True)
        try:
            yield
        finally:
            for model in models:
                set_absent(model, False)


class SumInModel:
    """Sums a vector inside a model; what was announced comes first, so that no worker is in another collective."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def __call__(self, vector: Tensor) -> object:
        """Sum in place over all workers."""
        for loader in self._loop.iterating:
            if loader.given is not None and not loader.trains:
                loader.check_first(loader.given)  # a worker without a sample has passed this batch over
        self._loop.agreement.settle()
        together = self._loop.agreement.together
        return together("a batch norm over all workers", lambda: self._loop.world.sum(vector), _line_and_way_out)

    def __deepcopy__(self, memo: dict[int, Any]) -> SumInModel:
        return self  # a copy of the model has the same workers

    def __reduce__(self) -> Any:
        return _sum_of_one, ()  # a model that is read from a file is one process's


def _line_and_way_out() -> str:
    # The backward on a GPU has a thread of its own, in which no line of the script is.
    line = f" in {call_site(of_model=True)}" if threading.current_thread() is threading.main_thread() else ""
    return f"{line} (after model.eval() it waits for nobody)"


def _sum_of_one() -> Callable[[Tensor], object]:
    return _keep


def _keep(vector: Tensor) -> object:
    return vector


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

    @contextmanager
    def _under_way(self, where: str) -> Iterator[object]:
        if self._turn is not None:  # a newer iteration takes over
            self._end_turn(is_whole=False)
        if self._is_left:
            self._next_epoch()
        self._where = where
        self.loop.announce(f"the start of {self._name()}", where)
        self.loop.begin()
        turn = self._turn = object()
        self.loop.iterating.append(self)
        is_whole = False
        try:
            yield turn
            is_whole = True
        finally:
            if self._turn is turn:
                self._end_turn(is_whole=is_whole)

    def _end_turn(self, *, is_whole: bool) -> None:
        self._turn = self.given = self.stepped = None
        self.is_held = False
        self.loop.iterating.remove(self)
        # After a break the next loop is a new epoch, as with any loader; unless the script breaks off to stop.
        self._is_left = not is_whole and self.loop.told_to_stop and self._goes_on
        if not self._is_left:
            self._next_epoch()

    def _next_epoch(self) -> None:
        self.epoch += 1
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
        return {"epoch": self.epoch, "trains": self.trains, **self._position_state(goes_on=goes_on)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from there with the next iteration."""
        self.epoch, self.trains, self._is_left = state["epoch"], state["trains"], False
        self._load_position(state)

    def _name(self) -> str:
        return f"epoch {self.epoch + 1} of loader {self.number + 1}"

    def _cast_batch(self, what: str, number: int = 0) -> None:
        # Not compared by the line: a progress bar on one worker only is another caller there.
        self.loop.agreement.cast(f"{what} of {self._name()}", self._where, number)

    def _step_done(self) -> None:
        raise NotImplementedError

    def _position_state(self, *, goes_on: bool) -> dict[str, Any]:
        raise NotImplementedError

    def _load_position(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def _rewind(self) -> None:
        raise NotImplementedError
