"""Every byte that a pass holds, operation by operation, on tensors that have shapes and no memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_CONVERSION = torch.ops.aten._to_copy.default
_QUESTION = torch.ops.prim.device.default  # which fake tensors ask of each other all the time
OTHER, CAST, GRADIENT = range(3)  # activations and all that comes and goes; copies of weights in another format


class Watch(TorchDispatchMode):
    """While it is entered: after every operation the bytes that are alive, but for weights and buffers.

    A storage counts once, however many tensors share it, from the operation that makes it until nobody refers to it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.rows: list[tuple[int, int, int]] = []  # bytes of each kind, after each operation
        self._weights = {_key(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._alive: dict[int, tuple[int, int, Any]] = {}  # by storage: kind, bytes, and what tells of its end
        self._sums = [0, 0, 0]
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._is_gradient)
            for parameter in model.parameters()
            if parameter.requires_grad
        ]

    def __exit__(self, *error: Any) -> None:
        """Stop watching."""
        super().__exit__(*error)  # type: ignore[no-untyped-call, unused-ignore]
        for hook in self._hooks:
            hook.remove()

    def hold(self, tensors: Iterable[Any]) -> None:
        """Count tensors that were there before."""
        for tensor in tensors:
            self._note(tensor, OTHER)
        self._mark()

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Leave out tensors that are counted elsewhere."""
        self._weights |= {_key(tensor) for tensor in tensors}

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        """Do as asked, and look."""
        result = function(*arguments, **(named or {}))
        if function is _QUESTION:
            return result
        is_cast = function is _CONVERSION and _key(arguments[0]) in self._weights
        for tensor in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            self._note(tensor, CAST if is_cast else OTHER)
        self._mark()
        return result

    @property
    def now(self) -> tuple[int, int, int]:
        """The bytes of each kind that are alive."""
        return self._sums[OTHER], self._sums[CAST], self._sums[GRADIENT]

    def _mark(self) -> None:
        self.rows.append(self.now)

    def _note(self, tensor: Any, kind: int) -> None:
        if not isinstance(tensor, Tensor):
            return
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key in self._weights or key in self._alive:
            return
        num_bytes = storage.nbytes()
        self._alive[key] = kind, num_bytes, weakref.ref(storage, lambda _: self._gone(key))
        self._sums[kind] += num_bytes

    def _gone(self, key: int) -> None:
        kind, num_bytes, _ = self._alive.pop(key)
        self._sums[kind] -= num_bytes

    def _is_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        key = _key(parameter.grad)
        if key in self._alive:
            kind, num_bytes, end = self._alive[key]
            self._alive[key] = GRADIENT, num_bytes, end
            self._sums[kind] -= num_bytes
            self._sums[GRADIENT] += num_bytes
        self._mark()


def _key(tensor: Tensor) -> int:
    return int(storage_of(tensor)._cdata)


def storage_of(tensor: Tensor) -> UntypedStorage:
    """The memory of a tensor, or what stands for it."""
    return tensor.untyped_storage()
