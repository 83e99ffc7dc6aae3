"""How the fused layers call a Triton kernel: launched at little cost, or recorded to be compiled ahead of time.

This file does not import triton, so it can be read on machines without it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCall:
    """One call of a kernel: its arguments by position, and by name those known when it is compiled."""

    kernel: Any
    grid: tuple[int, ...]
    operands: tuple[Any, ...]
    settings: dict[str, Any]


_RECORDED: ContextVar[list[KernelCall] | None] = ContextVar("recorded_kernel_calls", default=None)
# By call key: the compiled kernel, and its compile-time arguments in order.
_READY: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
_IS_HIP = torch.version.hip is not None


def launch(kernel: Any, grid: tuple[int, ...], *operands: Any, **settings: Any) -> None:
    """Launch a kernel on the current device, or records the call inside `recorded_calls`.

    `settings` are what the kernel is compiled for: its constexpr arguments and triton's options, in a fixed order.
    """
    recorded = _RECORDED.get()
    if recorded is not None:
        recorded.append(KernelCall(kernel=kernel, grid=grid, operands=operands, settings=settings))
        return
    key = call_key(kernel, operands, settings)
    ready = _READY.get(key)
    if ready is not None:
        compiled, constants = ready
        # Positional arguments skip triton's binder, which takes most of the time of a call.
        compiled[grid if len(grid) == 3 else (*grid, 1, 1)[:3]](*operands, *constants)
        return
    compiled = kernel[grid](*operands, **settings)
    # The interpreter returns nothing, and on HIP kernels also depend on the size of their tensors.
    if compiled is not None and not _IS_HIP:
        _READY[key] = compiled, tuple(settings[name] for name in kernel.arg_names[len(operands) :])


def call_key(kernel: Any, operands: Sequence[Any], settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a compiled kernel depends on; at least as fine as triton's own key."""
    key: list[Any] = [id(kernel), operands[0].get_device(), *settings.values()]  # a kernel's own hash is slow
    for operand in operands:
        kind = type(operand)
        if kind is int:
            key += (operand == 1, operand % 16 == 0, operand.bit_length() > 31)
        elif kind is float or operand is None:
            key.append(kind)
        elif isinstance(operand, Tensor):
            key += (operand.dtype, operand.data_ptr() % 16)
        else:
            key += (kind, operand)
    return tuple(key)


@contextlib.contextmanager
def recorded_calls() -> Iterator[list[KernelCall]]:
    """Record the kernel calls of this thread instead of launching them."""
    recorded: list[KernelCall] = []
    token = _RECORDED.set(recorded)
    try:
        yield recorded
    finally:
        _RECORDED.reset(token)


def on_device(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors that a grid is spread over."""
    if device.type != "cuda":  # Triton's interpreter, or calls that are only recorded
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
