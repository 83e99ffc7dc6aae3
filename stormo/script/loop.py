"""What the parts of a user's loop share: the current micro-batch, the active loaders, the wrapped models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from stormo.data.order import MicroBatch, split_step
from stormo.distributed.world import World
from stormo.errors import SettingError, pluralize
from stormo.layers.sync_batch_norm import absent
from stormo.script.collective_check import CollectiveCheck
from stormo.script.replica_check import ReplicaCheck
from stormo.telemetry.text import tell

if TYPE_CHECKING:
    from stormo.script.stepping import Group


@dataclass(slots=True, eq=False)
class BatchInfo:
    """A micro-batch that a loader has given to the loop, and the weight of its gradient."""

    num_samples: int  # of this worker; 0 for padding, which a worker without a sample gets so that nobody waits for it
    step_samples: int | None  # of all workers and micro-batches of the step; None if known only after the last one
    is_last: bool  # the optimizer steps after it
    micro_batch_samples: int = 0  # of all workers in this micro-batch, where `step_samples` is None
    rank_without: int | None = None  # a rank without a sample, where every worker has its own stream
    is_trained: bool = False  # backward was called for it, the last time without more=True
    num_steps: int = 0  # that optimizers took with it

    @classmethod
    def of(cls, span: MicroBatch) -> BatchInfo:
        """That of a part of a known global batch."""
        return cls(span.num_samples, span.step_samples, is_last=span.is_last)

    @property
    def is_padding(self) -> bool:
        """Whether this worker has no sample in it."""
        return self.num_samples == 0


@dataclass(kw_only=True)
class Loop:
    """Shared by the world of a script and everything it has handed out."""

    world: World
    check: CollectiveCheck
    begin: Callable[[], None]  # called when the first loader starts
    groups: list[Group] = field(default_factory=list)
    iterating: list[LoaderBase] = field(default_factory=list)  # in the middle of an epoch, the innermost last
    is_accumulating: bool = False  # between the backwards of a step
    has_micro_batch: bool = False  # of several of a step, one is complete
    is_cut_off: bool = False  # a break has ended the last step in the middle, and may have left gradients
    is_stepping: bool = False  # inside of the step of a wrapped optimizer
    awaits_more: bool = False  # the last backward said more=True
    closure_losses: list[tuple[float, Tensor]] | None = None  # in a closure: the losses so far, each with its weight
    around_step: Callable[[], AbstractContextManager[None]] = nullcontext  # what watches steps, such as a profile
    has_sync_norm: bool = False
    has_shards: bool = False
    replaced: WeakValueDictionary[int, Tensor] = field(default_factory=WeakValueDictionary)  # by shards, by id
    saw_stop: bool = False  # the script has seen that it should stop
    num_loaders: int = 0
    warned: set[str] = field(default_factory=set)  # keys of warnings that were printed
    folders: set[Path] = field(default_factory=set)  # of checkpoints that this script has loaded or saved
    loaders: WeakValueDictionary[int, LoaderBase] = field(default_factory=WeakValueDictionary)  # in use, by number

    def __post_init__(self) -> None:
        self._replicas = ReplicaCheck(self.world, self.groups)

    @property
    def runs_together(self) -> bool:
        """Whether no worker may run a model alone: the others would wait in it."""
        return self.has_sync_norm or self.has_shards

    @property
    def num_steps(self) -> int:
        """Steps that the optimizers have taken."""
        return max((group.num_steps for group in self.groups), default=0)

    def may_send(self) -> bool:
        """Whether gradients may leave without waiting for the others' posts.

        On a GPU they wait: sums inside the model and those of gradients must come in the same order on all workers.
        """
        return self.world.device.type == "cuda" or self.check.has_arrived()

    def warn_once(self, key: str, sentence: str) -> None:
        """Print a warning once, on rank 0."""
        if self.world.is_main and key not in self.warned:
            self.warned.add(key)
            tell(sentence)

    def check_replicas(self, what: str, where: str = "", *, compares: bool = True) -> None:
        """Post something that all workers must begin with the same learning rates and weights; raise where they do not.

        They are compared where all workers want that.
        """
        numbers = self.check.exchange(what, where, self._replicas.fingerprint() if compares else 0)
        if self._replicas.may_differ(numbers):
            found = self.check.exchange("learning rates and weights", number=self._replicas.first_difference())
            if (sentence := self._replicas.report(found)) is not None:
                self.warn_once(sentence, sentence)

    @contextmanager
    def without_statistics(self, is_padding: bool) -> Iterator[None]:
        """Keep a padding batch out of the models' statistics."""
        with ExitStack() as stack:
            for group in self.groups if is_padding else []:
                stack.enter_context(absent(group.model, True))
            yield


class LoaderBase:
    """A loader as `backward`, `step` and `save` see it, with what scripts read from a DataLoader.

    Args:
        loop: it takes part in.
        dataset: as the script has given it.
        accumulate: micro-batches of a step.
        seed: of the order and of what reading draws.
        start: the position at the start of an epoch.
        global_batch_size: samples of all workers in a step; None where the batches come as they are.
        own: the script's own DataLoader, if any.
    """

    num_workers: int  # processes that read
    collate_fn: Callable[[list[Any]], Any]

    def __init__(
        self,
        loop: Loop,
        dataset: Any,
        accumulate: int,
        seed: int,
        start: Any,
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
        self.number = loop.num_loaders
        loop.num_loaders += 1
        loop.loaders[self.number] = self
        self.epoch = 0
        self.batch_info: BatchInfo | None = None
        self.trains = False  # backward was called in this iteration: no worker may be left without a batch
        self._seed = seed
        self._start = self._position = self._next_position = start  # of the epoch; of what is done; of the current step
        self._num_begun = self._num_done = 0  # steps of this epoch, and those that a load would not repeat
        self._iteration: object | None = None  # the current one
        self._is_resumable = False  # that iteration was left in the middle because of a stop
        self._where = ""

    @property
    def num_samples(self) -> int:
        """This worker's samples in the current micro-batch; 0 for padding."""
        if self.batch_info is None:
            raise SettingError(
                "loader.num_samples was read outside of a loop over the loader", "there is no batch", "read it inside"
            )
        return self.batch_info.num_samples

    @property
    def batch_size(self) -> int | None:
        """The most samples that this worker gets in one micro-batch; None where the batches come as they are."""
        if self.global_batch_size is None:
            return None
        return max(span.num_samples for span in self._spans(0, self.global_batch_size))

    @property
    def num_behind(self) -> int:
        """Batches of the epoch that are done: after a load `enumerate(loader, loader.num_behind)` counts on."""
        return 0 if self._is_resumable else self._num_done * self.accumulate

    def step_taken(self) -> None:
        """An optimizer stepped: a save from here on is behind the current batch."""
        if self.batch_info is not None and self.batch_info.is_last:
            self.batch_info.num_steps += 1
            self._step_done()

    def end_batch(self) -> None:
        """Before a save: the current batch is done if backward was called for it, whichever optimizer stepped."""
        if self.batch_info is not None and self.batch_info.is_trained and self.batch_info.is_last:
            self._step_done()

    def check_first(self, info: BatchInfo) -> None:
        """Refuse, on all workers, a first training batch with fewer samples than workers × micro-batches."""
        size = self.loop.world.size
        if info.step_samples is not None and info.step_samples < size * self.accumulate:
            product = f"{pluralize(size, 'worker')} × {pluralize(self.accumulate, 'micro-batch')}"
            error = SettingError(
                f"a model in training mode was given a batch of {pluralize(info.step_samples, 'sample')}",
                f"{product} need at least {size * self.accumulate}",
                "give larger batches or start fewer workers; where nothing is trained, call model.eval(), or leave the "
                "short last batch out by drop_last=True",
            )
            self.loop.check.raise_on_all(error)

    def state(self) -> dict[str, Any]:
        """Where it is, as plain values and tensors."""
        resumes = self._iteration is None or self._resumes_inside
        num_done, position = (self._num_done, self._position) if resumes else (0, self._start)
        state = {"epoch": self.epoch, "num_done": num_done, "position": position}
        return state | {"trains": self.trains, "seed": self._seed}

    def load_state(self, state: dict[str, Any]) -> None:
        """Resume there with the next iteration."""
        self.epoch, self.trains, self._is_resumable = state["epoch"], state["trains"], False
        self._num_done = state.get("num_done", 0)
        self._position, self._seed = state["position"], state["seed"]

    @contextmanager
    def _iterating(self, where: str) -> Iterator[object]:
        if self._iteration is not None:  # a newer iteration takes over
            self._end_iteration(is_complete=False)
        if self._is_resumable:
            self._next_epoch()
        self._where = where
        self.loop.check_replicas(f"the start of {self._name()}", where)
        self.loop.begin()
        self._num_begun = self._num_done
        iteration = self._iteration = object()
        self.loop.iterating.append(self)
        is_complete = False
        try:
            yield iteration
            is_complete = True
            if self._iteration is iteration and self.loop.groups and self.loop.world.size > 1:
                # Nothing may follow that would compare them.
                may_train = torch.is_grad_enabled() and any(group.model.training for group in self.loop.groups)
                self.loop.check_replicas(f"the end of {self._name()}", where, compares=may_train)
        finally:
            if self._iteration is iteration:
                self._end_iteration(is_complete=is_complete)

    def _end_iteration(self, *, is_complete: bool) -> None:
        if self.trains and self.batch_info is not None and not self.batch_info.is_last:  # a break inside a step
            self.loop.is_accumulating = self.loop.has_micro_batch = False
            self.loop.is_cut_off = True
        self._iteration = self.batch_info = None
        self.loop.iterating.remove(self)
        # After a break the next loop is a new epoch, as with any loader; unless the script breaks off to stop.
        self._is_resumable = not is_complete and self.loop.saw_stop and self._resumes_inside
        if not self._is_resumable:
            self._next_epoch(is_broken=not is_complete)

    def _next_epoch(self, *, is_broken: bool = False) -> None:
        self._end_order(is_broken=is_broken)
        self.epoch += 1
        self._num_begun = self._num_done = 0
        self._position = self._next_position = self._start
        self.trains = self._is_resumable = False

    def _end_order(self, *, is_broken: bool) -> None:
        """An epoch has ended; `is_broken`: in the middle."""

    @property
    def _resumes_inside(self) -> bool:
        """Whether a load resumes in the middle of the epoch. Where there is training, a validation starts over."""
        return self.trains or not any(group.optimizers for group in self.loop.groups)

    def _give(self, batch: Any, info: BatchInfo, iteration: object) -> Iterator[Any]:
        self.batch_info = info
        with self.loop.without_statistics(info.is_padding):
            yield batch
        if self._iteration is not iteration:
            raise SettingError(
                f"loader {self.number + 1} was iterated in {self._where} while an earlier iteration went on",
                "a loader has one position",
                "finish one loop before the next one starts, or make a second loader",
            )

    def _spans(self, start: int, stop: int) -> list[MicroBatch]:
        """This worker's micro-batches of a global batch."""
        return split_step(start, stop, self.accumulate, self.loop.world.rank, self.loop.world.size)

    def _name(self) -> str:
        return f"epoch {self.epoch + 1} of loader {self.number + 1}"

    def _post_batch(self, what: str, number: int = 0) -> None:
        # The line is not compared: a progress bar on one worker only is another caller there.
        self.loop.check.post(f"{what} of {self._name()}", self._where, number)

    def _step_done(self) -> None:
        self._num_done, self._position = self._num_begun, self._next_position
