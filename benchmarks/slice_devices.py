"""The GPUs of this machine, or slices (MIG instances) of them, and the environment that puts a process onto one."""

from __future__ import annotations

import itertools
import os
import platform
from dataclasses import dataclass

from stormo.system.hardware import visible_gpus

_ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # as under torchrun
_LINK = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Devices:
    """What the ranks run on: slices of a GPU, whole GPUs, which ranks may share, or nameless CPU processes."""

    device: str  # "cuda" or "cpu"
    names: tuple[str, ...]  # as CUDA_VISIBLE_DEVICES takes them
    machine: str  # in words

    def __len__(self) -> int:
        return len(self.names)

    @property
    def are_shared(self) -> bool:
        """Whether ranks take turns on a GPU, so that times mean nothing."""
        return self.device == "cuda" and len(set(self.names)) < len(self)

    def take(self, first: int, count: int) -> Devices:
        """Some of them."""
        return Devices(device=self.device, names=self.names[first : first + count], machine=self.machine)

    def of_rank(self, rank: int) -> dict[str, str]:
        """The variables of a rank that has one device; NCCL takes the ranks for ranks of several hosts."""
        if self.device == "cpu":
            return _ONE_THREAD
        own = {"CUDA_VISIBLE_DEVICES": self.names[rank], "NCCL_HOSTID": f"rank-{rank}"}
        return {**_ONE_THREAD, **_LINK, **own}

    def of_command(self) -> dict[str, str]:
        """The variables of a `stormo train --backend nccl` that starts its workers on all of these."""
        if self.device == "cpu":
            return _ONE_THREAD
        return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(self.names))}


def cpu_processes(count: int) -> Devices:
    """CPU processes, to try a benchmark itself."""
    machine = f"{count} processes on {os.cpu_count()} {platform.machine()} cores"
    return Devices(device="cpu", names=("",) * count, machine=machine)


def find_devices(count: int = 7) -> Devices:
    """Every slice that this process may use; where no GPU is cut, `count` ranks that share the whole ones."""
    gpus = visible_gpus()
    names = tuple(gpu.uuid for gpu in gpus)  # of slices alone
    told = f"{len(gpus)} × {', '.join(sorted({gpu.name for gpu in gpus}))}" if gpus else "no GPU"
    if gpus and not gpus[0].slice_of:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(len(gpus))))
        names = tuple(itertools.islice(itertools.cycle(shown.split(",")), count))
        told = f"{count} ranks on {told}"
    machine = f"{told}, {os.cpu_count()} {platform.machine()} cores"
    return Devices(device="cuda", names=names, machine=machine)
