"""Exposed communication: the time in which a worker has nothing to compute because it waits for others.

On a CPU the host's clock measures it. On a GPU two small kernels around a wait read the device's clock and add to a
counter on the device: the host never waits, and a replayed CUDA graph counts too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stormo.layers.kernel_calls import launch
from stormo.profiling.ranges import range_of


class ExposedWait:
    """Seconds that a worker has waited so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counter: _DeviceCounter | None = None  # of a GPU, once something was waited for
        self._host_s = 0.0
        self._began_s = 0.0
        self._depth = 0
        self._range: AbstractContextManager[Any] | None = None

    @property
    def total_s(self) -> float:
        """Seconds so far; on a GPU of the finished steps."""
        return self._host_s if self._counter is None else self._counter.read_s()

    def reset(self) -> None:
        """Start again at zero."""
        self._host_s = 0.0
        if self._counter is not None:
            self._counter.reset()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What is waited for inside it counts."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """The worker, or its compute stream, starts to wait; a wait inside another one counts once."""
        self._depth += 1
        if self._depth > 1:
            return
        self._range = range_of("exchange")
        self._range.__enter__()
        if self._device.type == "cuda":
            self._counter = self._counter or _DeviceCounter(self._device)
            self._counter.mark(is_end=False)
        else:
            self._began_s = time.perf_counter()

    def end(self) -> None:
        """It continues."""
        self._depth -= 1
        if self._depth:
            return
        if self._counter is None:
            self._host_s += time.perf_counter() - self._began_s
        else:
            self._counter.mark(is_end=True)
        assert self._range is not None
        self._range.__exit__(None, None, None)

    def watch_backward(self, loss: Tensor) -> None:
        """Count the wait at the end of the next backward of this loss, from its last gradient to DDP's last sum."""
        loss.register_hook(self._queue)

    def _queue(self, gradient: Tensor) -> None:
        # Callbacks run in order after all gradients are computed; DDP adds its own later, with its last bucket.
        queue_callback(self._gradients_computed)

    def _gradients_computed(self) -> None:
        queue_callback(self.end)  # after DDP's
        self.begin()

    def watch_shards(self, model: nn.Module) -> None:
        """Count the waits of torch's sharding: for gathered weights, and for the last reduced gradients."""
        from torch.distributed.fsdp import FSDPModule  # takes a second, and most strategies have none

        waits = ["wait_for_unshard", "finalize_backward"]
        if self._device.type == "cpu":  # has no streams: its collectives end where they start
            waits += ["unshard", "post_backward"]
        for module in model.modules():
            if isinstance(module, FSDPModule):
                for group in _parameter_groups(module):
                    for name in waits:
                        setattr(group, name, self._counted(getattr(group, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            with self.waiting():
                return function(*arguments, **named)

        return call


def _parameter_groups(module: Any) -> list[Any]:
    """What gathers and reduces the parameters of a module together; torch has no public name for it."""
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)  # since torch 2.13
    return list(several) if several is not None else [group for group in [state._fsdp_param_group] if group]


def queue_callback(function: Callable[[], None]) -> None:
    """Call a function at the end of this backward. torch has no public call for it."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


class HostCopy:
    """The newest values of a tensor that have arrived on the host; on a GPU they are some steps old."""

    def __init__(self, tensor: Tensor, values: list[float]) -> None:
        """`values` are those of the tensor now."""
        self._values = values
        self._copied = torch.cuda.Event() if tensor.is_cuda else None
        self._copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self.is_copying = False

    def begin(self, tensor: Tensor) -> None:
        """Start to copy the tensor."""
        self._copy.copy_(tensor, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self.is_copying = True

    def read(self) -> list[float]:
        """The newest values that have arrived."""
        if self.is_copying and (self._copied is None or self._copied.query()):
            self._values, self.is_copying = self._copy.tolist(), False
        return self._values


class _DeviceCounter:
    """Adds up intervals of the current stream in nanoseconds of the device's clock."""

    def __init__(self, device: torch.device) -> None:
        self._began_and_total = torch.zeros(2, dtype=torch.int64, device=device)
        self._on_host = HostCopy(self._began_and_total, [0, 0])

    def mark(self, *, is_end: bool) -> None:
        """Keep the time, or add the time since then."""
        from stormo.parallel.clock_kernel import interval_kernel  # imports triton

        launch(interval_kernel, (1,), self._began_and_total, IS_END=is_end)

    def reset(self) -> None:
        """Start again at zero."""
        self._began_and_total.zero_()
        self._on_host = HostCopy(self._began_and_total, [0, 0])

    def read_s(self) -> float:
        """The newest total that has arrived; asks for the next one."""
        total_s = self._on_host.read()[1] * 1e-9
        if not self._on_host.is_copying:
            self._on_host.begin(self._began_and_total)
        return total_s
