"""The slices (MIG instances) of this machine's GPUs, and the environment that puts a process onto one of them."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_MIG_ENABLED = 1
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # as under torchrun
_LINK = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Devices:
    """What the ranks run on: slices of a GPU, or CPU processes, which have no UUID."""

    device: str  # "cuda" or "cpu"
    uuids: tuple[str, ...]
    machine: str  # in words

    def __len__(self) -> int:
        return len(self.uuids)

    def take(self, first: int, count: int) -> Devices:
        """Some of them."""
        return Devices(device=self.device, uuids=self.uuids[first : first + count], machine=self.machine)

    def of_rank(self, rank: int) -> dict[str, str]:
        """The variables of a rank that has one slice; NCCL takes the ranks for ranks of several hosts."""
        if self.device == "cpu":
            return _ONE_THREAD
        own = {"CUDA_VISIBLE_DEVICES": self.uuids[rank], "NCCL_HOSTID": f"slice-{rank}"}
        return {**_ONE_THREAD, **_LINK, **own}

    def of_command(self) -> dict[str, str]:
        """The variables of a `stormo train` that starts its workers on all of these."""
        if self.device == "cpu":
            return _ONE_THREAD
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.uuids)}


def cpu_processes(count: int) -> Devices:
    """CPU processes, to try a benchmark itself."""
    machine = f"{count} processes on {os.cpu_count()} {platform.machine()} cores"
    return Devices(device="cpu", uuids=("",) * count, machine=machine)


def find_slices() -> Devices:
    """Every slice of every GPU; none without NVML or where no GPU is cut."""
    slices: list[tuple[str, str]] = []
    with contextlib.suppress(ImportError):
        nvml: Any = importlib.import_module("pynvml")
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlInit()
            slices = [slice_ for index in range(nvml.nvmlDeviceGetCount()) for slice_ in _slices_of(nvml, index)]
            nvml.nvmlShutdown()
    uuids, names = tuple(uuid for uuid, _ in slices), sorted({name for _, name in slices})
    machine = f"{len(slices)} × {', '.join(names)}, {os.cpu_count()} {platform.machine()} cores"
    return Devices(device="cuda", uuids=uuids, machine=machine)


def _slices_of(nvml: Any, index: int) -> Iterator[tuple[str, str]]:
    gpu = nvml.nvmlDeviceGetHandleByIndex(index)
    with contextlib.suppress(nvml.NVMLError):  # a GPU that cannot be cut
        if nvml.nvmlDeviceGetMigMode(gpu)[0] != _MIG_ENABLED:
            return
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
            with contextlib.suppress(nvml.NVMLError):  # fewer are made than could be
                slice_ = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)
                yield _text(nvml.nvmlDeviceGetUUID(slice_)), _text(nvml.nvmlDeviceGetName(slice_))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
