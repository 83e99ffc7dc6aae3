"""How much memory a worker can use, and how much it has used: on its GPUs or on the host.

A full GPU raises an error, so every size can be tried there. On a host the kernel kills a process that uses too much,
so a size is tried only if the last one suggests that it is safe.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from stormo.distributed.devices import device_uuid
from stormo.distributed.world import World
from stormo.system.hardware import GPU_SHARE

HOST_SHARE = 0.5  # of the free host memory of each worker

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# Limit and usage of a control group (of a container or a batch job): version 2, then 1.
_GROUP_FILES = {
    "": (_CGROUPS, "memory.max", "memory.current"),
    "memory": (_CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
}


class GpuMemory:
    """What the allocator uses of a worker's GPUs; `room_bytes` is all that a step could use."""

    def __init__(self, devices: Sequence[torch.device], num_sharers: int) -> None:
        self._devices = devices
        self.clear()
        # Without what other programs and CUDA itself use; workers on one GPU share the rest.
        self.room_bytes = min(
            torch.cuda.memory_reserved(device) + torch.cuda.mem_get_info(device)[0] // num_sharers for device in devices
        )

    def clear(self) -> None:
        """Free cached memory, and reset the peak."""
        gc.collect()
        torch.cuda.empty_cache()
        for device in self._devices:
            torch.cuda.reset_peak_memory_stats(device)

    def peak_bytes(self) -> int:
        """The most that was reserved on any of the GPUs."""
        return max(torch.cuda.max_memory_reserved(device) for device in self._devices)

    def expect(self, size: int, last_size: int, last_bytes: int) -> int | None:
        """None: every size may be tried."""
        return None

    def is_enough(self, peak_bytes: int) -> bool:
        """Whether a tenth is left free."""
        return peak_bytes <= GPU_SHARE * self.room_bytes


class HostMemory:
    """The growth of this process; `room_bytes` is all that a step could use."""

    def __init__(self, num_sharers: int) -> None:
        self.clear()
        self._before_bytes = _own_bytes("VmRSS")
        self.room_bytes = free_host_bytes() // num_sharers

    def clear(self) -> None:
        """Collect garbage, and let the kernel reset the peak if it can."""
        gc.collect()
        with contextlib.suppress(OSError):
            (_PROC / "self" / "clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """The growth since before the first try: an allocator may keep freed memory."""
        return max(0, _own_bytes("VmHWM") - self._before_bytes)

    def expect(self, size: int, last_size: int, last_bytes: int) -> int | None:
        """The last bytes scaled by size, if that is above half of what is free."""
        expected = last_bytes * size // last_size
        return expected if expected > HOST_SHARE * self.room_bytes else None

    def is_enough(self, peak_bytes: int) -> bool:
        """Always: only sizes are tried that leave a margin."""
        return True


Memory = GpuMemory | HostMemory


def memory_of(world: World, devices: Sequence[torch.device]) -> Memory:
    """The memory of this worker on its devices, measured while all workers are idle. All workers call it."""
    if world.device.type != "cuda":
        world.barrier()
        memory: Memory = HostMemory(world.rank_info.local_size)
    else:
        # Workers under Gloo may share a GPU on purpose.
        own = device_uuid(world.device.index)
        every = world.broadcast_object(world.gather_objects(own))
        memory = GpuMemory(devices, every.count(own))
    world.barrier()
    return memory


def free_host_bytes() -> int:
    """The host memory that this process can still use, within the limits of its control groups."""
    (available,) = (line for line in (_PROC / "meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
    return max(0, min([int(available.split()[1]) * 1024, *_free_in_groups()]))


def _free_in_groups() -> Iterator[int]:
    with contextlib.suppress(OSError):
        for line in (_PROC / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in _GROUP_FILES:
                continue
            root, limit_name, used_name = _GROUP_FILES[controllers]
            folder = root / path.lstrip("/")
            while folder.is_relative_to(root):  # a group's limit binds all groups within it
                with contextlib.suppress(OSError, ValueError):  # no such file; "max" is no number
                    limit = int((folder / limit_name).read_text())
                    used = int((folder / used_name).read_text())
                    yield limit - used + _reclaimable_bytes(folder)
                folder = folder.parent


def _reclaimable_bytes(folder: Path) -> int:
    """The page cache, which the kernel frees first."""
    fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))


def _own_bytes(name: str) -> int:
    for line in (_PROC / "self" / "status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {name}")
