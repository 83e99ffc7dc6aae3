"""The slices (MIG instances) of this machine's GPUs, and the environment that puts a process onto one of them."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

from stormo.system.hardware import visible_slices

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
    """Every slice that this process may use."""
    slices = visible_slices()
    names = sorted({one.name for one in slices})
    machine = f"{len(slices)} × {', '.join(names)}, {os.cpu_count()} {platform.machine()} cores"
    return Devices(device="cuda", uuids=tuple(one.uuid for one in slices), machine=machine)
