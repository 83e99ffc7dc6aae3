"""What a process holds in tensors, counted by their memory: everything alive now, and the most over a stretch of work.

Nothing is estimated: every living tensor is asked for its storage, and storages are counted once, however many tensors
share them. Fake tensors count as what they stand for.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from stormo.parallel.base import Strategy
from stormo.parallel.pytree import tree_leaves

Storages = dict[int, UntypedStorage]  # by their address, which no two living ones share


def storages_of(tensors: Iterable[Any]) -> Storages:
    """The memory of some tensors and of their gradients; meta tensors have none."""
    found: Storages = {}
    for tensor in tensors:
        for one in _plain(tensor):
            storage = one.untyped_storage()
            found[storage._cdata] = storage
    return found


def _plain(tensor: Any) -> Iterator[Tensor]:
    """The local tensors of a DTensor, or the tensor itself; nothing for anything else."""
    if not issubclass(type(tensor), Tensor):  # asked of the type: some objects answer for what they stand for
        return
    if is_lazy(tensor):  # of a lazy layer that has seen no input
        return
    if isinstance(tensor, DTensor):
        yield from _plain(tensor._local_tensor)
    elif tensor.device.type != "meta":
        yield tensor
    if tensor.is_leaf and tensor.requires_grad and tensor.grad is not None:
        yield from _plain(tensor.grad)


def living() -> Storages:
    """The memory of all tensors of this process."""
    gc.collect()
    return storages_of(gc.get_objects())


def num_bytes(storages: Storages, without: Storages | None = None) -> int:
    """Bytes of all, or of those that are not among others."""
    return sum(storage.nbytes() for address, storage in storages.items() if address not in (without or {}))


def weights(strategy: Strategy) -> Storages:
    """The memory of the weights that this worker holds."""
    every = [*strategy.module.parameters(), *(part.local for part in strategy.shards())]
    return storages_of(parameter.detach() for parameter in every)


def gradients(strategy: Strategy) -> Storages:
    """The memory of the gradients, where the optimizer or the model has them."""
    every = [*strategy.module.parameters(), *(part.local for part in strategy.shards())]
    return storages_of(parameter.grad for parameter in every)


def optimizer_state(optimizer: Optimizer) -> Storages:
    """The memory of the optimizer's state."""
    return storages_of(value for state in optimizer.state.values() for value in state.values())


class Peak(TorchDispatchMode):
    """While it is entered: the most bytes alive after any operation; what the process holds at first is counted."""

    def __init__(self, without: Storages) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._without = set(without)
        self._seen: dict[int, weakref.ref[UntypedStorage]] = {}
        self.num_bytes = 0
        self._note(living())

    def _note(self, storages: Storages) -> None:
        for address, storage in storages.items():
            if address not in self._without:
                self._seen[address] = weakref.ref(storage)
        alive = [(address, reference()) for address, reference in self._seen.items()]
        self._seen = {address: self._seen[address] for address, storage in alive if storage is not None}
        self.num_bytes = max(self.num_bytes, sum(storage.nbytes() for _, storage in alive if storage is not None))

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        """Do as asked, and look."""
        result = function(*arguments, **(named or {}))
        self._note(storages_of(tree_leaves(result)))
        return result
