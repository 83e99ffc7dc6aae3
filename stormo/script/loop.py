"""What the parts of a user's loop know of one another: the loaders under way, the models, who waits for whom."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from stormo.distributed.world import World
from stormo.layers.sync_batch_norm import set_absent
from stormo.script.agreement import Agreement, call_site
from stormo.script.copies import Copies

if TYPE_CHECKING:
    from stormo.script.giving import Giver
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
    told: set[str] = field(default_factory=set)  # about what a person was told
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

    def tell(self, about: str, sentence: str) -> None:
        """Say something once, on the main worker."""
        if self.world.is_main and about not in self.told:
            self.told.add(about)
            print(f"stormo: {sentence}", file=sys.stderr, flush=True)  # noqa: T201

    def announce(self, what: str, where: str = "", *, compares: bool = True) -> None:
        """Announce something that all workers begin with the same rates and weights; refuse it where they have not.

        They are compared where all workers want that.
        """
        numbers = self.agreement.exchange(what, where, self._copies.look() if compares else 0).numbers
        if self._copies.may_differ(numbers):
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
