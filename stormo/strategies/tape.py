"""A tape of tensor operations, from which the value of one tensor is computed without the others.

The tensors on it have no memory: they live on torch's meta device. What an operation reads and writes is told apart by
storage, so that views, ties and `.data` need no care of their own; an operation that draws random numbers has the state
of its generator beside it. Replaying a step gives what it gave, bit for bit, on as many threads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stormo.errors import StormoError

SMALL_BYTES = 2**20  # what is asked for while recording is kept up to here, lest it be computed again and again


class CannotDeferError(StormoError):
    """A model that can only be built in memory; the text says why, as a clause about "it"."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the values of a tensor are: a storage of the tape, and the tensor's view of it."""

    slot: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    num_bytes: int  # of the storage
    is_conj: bool = False
    is_neg: bool = False


class OwnGenerator:
    """Stands where an operation was handed a generator: a replay has one of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One operation: places stand for tensors of the tape, all other arguments are as they were."""

    operation: Callable[..., Any]
    args: Any
    kwargs: Any = field(default_factory=dict)
    writes: frozenset[int]
    renews: frozenset[int]  # of those it writes, whose former values do not matter
    results: tuple[Place | None, ...] = ()  # where it leaves each tensor that it returns; None: a view of another
    default_dtype: torch.dtype = torch.float32
    random_state: Tensor | None = None

    @property
    def reads(self) -> set[int]:
        """The slots that must hold their values before."""
        return {place.slot for place in leaves((self.args, self.kwargs), Place)} - self.renews


class Tape:
    """The steps so far, and the storages that they are about."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._writes: list[list[int]] = []  # for each slot: the steps that write it, in order
        self._slots: dict[int, int] = {}  # by the address of the storage
        self._storages: list[Any] = []  # kept, so that no address is given twice; they hold no memory
        self._kept: set[int] = set()  # steps that are values, not operations

    def knows(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage is one of the tape's."""
        return tensor.untyped_storage()._cdata in self._slots

    def add(self, tensor: Tensor) -> Place:
        """A new storage."""
        storage = tensor.untyped_storage()
        self._slots[storage._cdata] = len(self._writes)
        self._storages.append(storage)
        self._writes.append([])
        return self.place(tensor)

    def place(self, tensor: Tensor) -> Place:
        """Where a tensor of the tape has its values now."""
        storage = tensor.untyped_storage()
        slot = self._slots.get(storage._cdata)
        if slot is None:
            raise CannotDeferError("it uses a tensor on the device meta that was made elsewhere")
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        view = (tensor.dtype, size, stride, int(tensor.storage_offset()))
        return Place(slot, *view, storage.nbytes(), tensor.is_conj(), tensor.is_neg())

    def record(self, step: Step) -> None:
        """Write a step at the end."""
        for slot in step.writes:
            self._writes[slot].append(len(self._steps))
        self._steps.append(step)

    def values(self, places: Sequence[Place]) -> list[Tensor]:
        """What the tensors hold after all steps, in new memory; those of one storage share it."""
        wanted = {place.slot for place in places}
        memory = _Memory()
        indices = self._needed(wanted)
        last_use = {slot: index for index in indices for slot in (self._steps[index].reads | self._steps[index].writes)}
        with _unchanged(), torch.no_grad():
            for index in indices:
                step = self._steps[index]
                memory.replay(step)
                for slot in step.reads | step.writes:
                    if last_use[slot] == index and slot not in wanted:
                        memory.forget(slot)
        return [memory.tensor(place) for place in places]

    def keep(self, place: Place, value: Tensor) -> None:
        """From now on the place's storage is known to hold what the value's does; small ones only."""
        if place.num_bytes > SMALL_BYTES or self._writes[place.slot][-1] in self._kept:
            return
        data = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage()).clone()
        whole = Place(place.slot, torch.uint8, (place.num_bytes,), (1,), 0, place.num_bytes)
        slots = frozenset({place.slot})
        self._kept.add(len(self._steps))
        self.record(Step(operation=torch.clone, args=(data,), writes=slots, renews=slots, results=(whole,)))

    def _needed(self, slots: Iterable[int]) -> list[int]:
        """The steps that the values of these slots come from, in order."""
        steps: set[int] = set()
        seen: set[tuple[int, int]] = set()
        asked = [(slot, len(self._steps)) for slot in slots]
        while asked:
            slot, before = asked.pop()
            writes = self._writes[slot]
            for index in reversed(writes[: bisect_left(writes, before)]):
                if (slot, index) in seen:
                    break
                seen.add((slot, index))
                steps.add(index)
                asked += [(read, index) for read in self._steps[index].reads]
                if slot in self._steps[index].renews:
                    break
        return sorted(steps)


class _Memory:
    """Storages that hold values, for as long as a replay needs them."""

    def __init__(self) -> None:
        self._storages: dict[int, Any] = {}
        self._doubtful: set[int] = set()  # laid out otherwise than torch has them

    def tensor(self, place: Place) -> Tensor:
        """A tensor at its place in memory."""
        storage = self._storages.get(place.slot)
        if storage is None:
            storage = self._storages[place.slot] = torch.UntypedStorage(place.num_bytes)
        elif storage.nbytes() < place.num_bytes:
            storage.resize_(place.num_bytes)
        tensor = torch.empty(0, dtype=place.dtype).set_(storage, place.offset, place.size, place.stride)
        tensor = tensor.conj() if place.is_conj else tensor
        return torch._neg_view(tensor) if place.is_neg else tensor

    def forget(self, slot: int) -> None:
        """Free a slot."""
        self._storages.pop(slot, None)

    def replay(self, step: Step) -> None:
        """Do what a step did, into memory."""
        if step.random_state is not None:
            torch.set_rng_state(step.random_state)
            if self._doubtful & step.writes:
                raise CannotDeferError(f"{step.operation} draws numbers into the result of a computation")

        def real(leaf: Any) -> Any:
            if isinstance(leaf, Place):
                return self.tensor(leaf)
            if isinstance(leaf, OwnGenerator) and step.random_state is not None:
                return torch.Generator().set_state(step.random_state)
            return leaf

        torch.set_default_dtype(step.default_dtype)
        returned = step.operation(*mapped(step.args, real), **mapped(step.kwargs, real))
        for place, value in zip(step.results, leaves(returned, Tensor), strict=True):
            if place is not None:
                self._adopt(place, value, step)

    def _adopt(self, place: Place, value: Tensor, step: Step) -> None:
        """Take over what an operation made as the memory of its place."""
        if place.dtype != value.dtype or place.size != tuple(value.shape):
            raise CannotDeferError(f"the result of {step.operation} is another than its arguments' shapes let expect")
        storage = value.untyped_storage()
        is_as_expected = place.stride == value.stride() and place.offset == value.storage_offset()
        is_own = all(storage._cdata != other._cdata for other in self._storages.values())
        if is_as_expected and is_own and storage.nbytes() >= place.num_bytes:
            self._storages[place.slot] = storage
            return
        self._doubtful.add(place.slot)
        self._storages.pop(place.slot, None)
        self.tensor(place).copy_(value)


@contextmanager
def _unchanged() -> Iterator[None]:
    """Meanwhile torch's generator and default dtype may be set at will."""
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        torch.set_default_dtype(dtype)


def leaves(tree: Any, kind: type[Any]) -> Iterator[Any]:
    """All that is of this kind in nested lists, tuples and dictionaries."""
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, list | tuple | dict):
        for branch in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(branch, kind)


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The same nesting with every leaf changed."""
    if isinstance(tree, dict):
        return {key: mapped(branch, change) for key, branch in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(mapped(branch, change) for branch in tree)
    return change(tree)
