"""How long a worker stood still for the gradients of others: from its own last gradient to the last sum that it awaits.

Seen from inside backward, by callbacks before and after the one in which DDP waits. That leaves the exchange as it is,
with its bits, and costs three calls a step however many buckets there are.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from stormo.profiling.ranges import range_of

_Pair = tuple[torch.cuda.Event, torch.cuda.Event]


class ExposedWait:
    """Adds up that time: by the host's clock, or on a GPU by events on the stream that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._total_s = 0.0
        self._began_s = 0.0
        self._range: AbstractContextManager[Any] | None = None
        self._pair: _Pair | None = None  # of the step under way
        self._pending: deque[_Pair] = deque()  # of steps that the device has not finished: as many as the host is ahead
        self._free: list[_Pair] = []

    @property
    def total_s(self) -> float:
        """Seconds so far; on a GPU of the steps that it has finished, and nobody waits for the others."""
        self._collect()
        return self._total_s

    def forget(self) -> None:
        """Start again at zero."""
        self._pending.clear()
        self._total_s = 0.0

    def watch(self, loss: Tensor) -> None:
        """The next backward is of this loss, and gradients travel in it."""
        loss.register_hook(self._begin)

    def _begin(self, gradient: Tensor) -> None:
        # Called in order when all gradients are computed; DDP adds its own when its last bucket has left, after this.
        _call_back(self._own_part_done)

    def _own_part_done(self) -> None:
        _call_back(self._all_received)  # after DDP's
        self._range = range_of("exchange")
        self._range.__enter__()
        if self._device.type == "cuda":
            self._collect()
            self._pair = self._free.pop() if self._free else (_event(), _event())
            self._pair[0].record(torch.cuda.current_stream(self._device))
        else:
            self._began_s = time.perf_counter()

    def _all_received(self) -> None:
        if self._pair is not None:
            # By now the stream has been told to wait for the sums: the host may be far ahead of it.
            self._pair[1].record(torch.cuda.current_stream(self._device))
            self._pending.append(self._pair)
            self._pair = None
        else:
            self._total_s += time.perf_counter() - self._began_s
        assert self._range is not None
        self._range.__exit__(None, None, None)

    def _collect(self) -> None:
        while self._pending and self._pending[0][1].query():
            first, last = self._pending.popleft()
            self._total_s += first.elapsed_time(last) / 1e3  # of milliseconds
            self._free.append((first, last))


def _call_back(function: Callable[[], None]) -> None:
    """Call this when the backward under way has computed everything."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
