"""Sums small vectors over GPUs of one host that have no direct path, through host memory that all of them map.

A kernel on the compute stream writes its vector, waits for those of the others and adds them up, in the order of ranks:
some microseconds, where a message of NCCL over sockets takes hundreds. A CUDA graph captures it like any kernel.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from stormo.distributed.world import World
from stormo.layers.kernel_calls import launch

_MEMORY = Path("/dev/shm")
_CAPACITY = 4096  # float64 values of one vector
_LINE = 8  # int64 values between two counters, which then share no cache line
_PORTABLE_AND_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped
_TRIAL_S = 30.0  # for others to compile the kernel
_Made = TypeVar("_Made")


class HostSum:
    """The sum over some ranks of this host, in place. All of them call it equally often."""

    def __init__(self, world: World, ranks: Sequence[int], path: str) -> None:
        """Map a file of `_num_bytes`, which is zero."""
        self._rank, self._num_ranks, self._size = world.rank, world.size, len(ranks)
        self._limit_ns = int(_TRIAL_S * 1e9)
        num_bytes = _num_bytes(world.size)
        self._memory = torch.from_file(path, shared=True, size=num_bytes // 8, dtype=torch.int64)
        self._numbers = self._memory[: world.size * _LINE]
        self._values = self._memory[world.size * _LINE :].view(torch.float64)
        self._count = torch.zeros(1, dtype=torch.int64, device=world.device)
        self._ranks = torch.tensor(list(ranks), device=world.device)
        address = self._memory.data_ptr()
        error = torch.cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE_AND_MAPPED)
        if int(error):
            with suppress(RuntimeError):  # CUDA keeps the error, and the next call of torch raises it
                torch.zeros(1, device=world.device)
            raise OSError(f"host memory cannot be mapped by the GPU ({error})")
        # Keeps the memory until then: a later map may get the same address.
        weakref.finalize(self, _unregister, self._memory).atexit = False

    def __call__(self, vector: Tensor) -> None:
        """Sum a float64 vector of this device in place."""
        from stormo.parallel.host_sum_kernel import host_sum_kernel  # imports triton

        assert vector.dtype == torch.float64, vector.dtype
        assert vector.is_contiguous()
        for part in vector.view(-1).split(_CAPACITY):
            launch(
                host_sum_kernel,
                (1,),
                part,
                self._values,
                self._numbers,
                self._count,
                self._ranks,
                part.numel(),
                self._rank,
                self._num_ranks,
                self._limit_ns,
                SIZE=self._size,
                CAPACITY=_CAPACITY,
                BLOCK=1 << max(5, (part.numel() - 1).bit_length()),
            )

    def wait_up_to(self, seconds: float) -> None:
        """Wait so long for the others; after that a sum is not-a-number."""
        self._limit_ns = int(seconds * 1e9)


def _unregister(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def open_host_sum(world: World, ranks: Sequence[int]) -> HostSum | None:
    """A sum over these ranks that was tried, or None where it does not work. All ranks, of one host, call it."""
    path = world.from_rank_0(lambda: _new_file(_num_bytes(world.size)))
    made = _tried(lambda: HostSum(world, ranks, path)) if path else None
    is_missing = world.any(made is None)
    if world.is_main and path:
        Path(path).unlink()  # those that map it keep it
    if made is None or is_missing:
        return None
    sizes = (1, 1281, _CAPACITY + 3)
    is_right = _tried(lambda: all(_is_right(made, world, ranks, size) for size in sizes))
    if world.any(not is_right):
        return None
    made.wait_up_to(world.timeout.total_seconds())
    return made


def _tried(make: Callable[[], _Made]) -> _Made | None:
    """What it makes, or None: CUDA, Triton and the file system fail in many ways, and NCCL is used instead."""
    try:
        return make()
    except Exception:
        return None


def _is_right(made: HostSum, world: World, ranks: Sequence[int], size: int) -> bool:
    vector = torch.arange(size, dtype=torch.float64, device=world.device) + world.rank
    made(vector)
    expected = torch.arange(size, dtype=torch.float64) * len(ranks) + sum(ranks)
    return bool(vector.cpu().equal(expected))


def _num_bytes(num_ranks: int) -> int:
    return 8 * num_ranks * (_LINE + 2 * _CAPACITY)


def _new_file(num_bytes: int) -> str:
    """A file in shared memory, or an empty name where there is no room for it."""
    path = ""
    try:
        handle, path = tempfile.mkstemp(prefix="stormo-", dir=_MEMORY)
        with os.fdopen(handle, "wb"):  # closes it
            os.posix_fallocate(handle, 0, num_bytes)
    except OSError:
        if path:
            Path(path).unlink()
        return ""
    return path
