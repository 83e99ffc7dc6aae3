"""How the fused layers call a Triton kernel: launched, or only noted for a compilation ahead of time.

This file does not import triton, so it can be read on machines without it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
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


_NOTED: ContextVar[list[KernelCall] | None] = ContextVar("noted_kernel_calls", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *operands: Any, **settings: Any) -> None:
    """Launches a kernel on the current device, or notes the call inside `noting`."""
    noted = _NOTED.get()
    if noted is None:
        kernel[grid](*operands, **settings)
    else:
        noted.append(KernelCall(kernel=kernel, grid=grid, operands=operands, settings=settings))


@contextlib.contextmanager
def noting() -> Iterator[list[KernelCall]]:
    """Kernel calls of this thread are listed instead of launched; what they would have written stays as it was."""
    noted: list[KernelCall] = []
    token = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(token)


def on_device(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors that a grid is spread over."""
    if device.type != "cuda":  # Triton's interpreter, or calls that are only noted
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
