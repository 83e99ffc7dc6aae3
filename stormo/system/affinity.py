"""Binds a worker to the CPU cores next to its GPU: memory and PCIe of the other socket are slower."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

_SYSFS = Path("/sys")
_LEAST_EXCLUSIVE = 4  # cores; NCCL's and the loader's threads inherit the binding, and would starve on fewer
_unbound: set[int] | None = None  # the cores of this process before it was bound here


def own_cores() -> set[int]:
    """The cores that this process was given, whatever it has bound itself to since."""
    return _unbound if _unbound is not None else os.sched_getaffinity(0)


def bind_to_gpu(bus_ids: Sequence[str], local_rank: int, local_size: int) -> str | None:
    """Bind all threads of this worker, and those that they start; the sentence for it, or None where nothing changed.

    Args:
        bus_ids: the PCI addresses of the GPUs that this process sees, that of local rank i at i.
    """
    global _unbound  # noqa: PLW0603 - an affinity belongs to the whole process, too
    allowed = os.sched_getaffinity(0)
    if len(allowed) < (os.cpu_count() or 0):
        return None  # bound by the user, the launcher or a container
    found = choose_cores(bus_ids, local_rank, local_size, allowed, _SYSFS)
    if found is None:
        return None
    node, cores = found
    _unbound = allowed
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), cores)
    return f"bound to cores {_ranges(cores)} (NUMA node {node} of its GPU)"


def choose_cores(
    bus_ids: Sequence[str], local_rank: int, local_size: int, allowed: Collection[int], root: Path
) -> tuple[int, list[int]] | None:
    """The NUMA node of a worker's GPU, and the cores for it; None where they are not known, or all that are allowed.

    Workers on one NUMA node share its cores equally, where each then has enough.
    """
    if not bus_ids:
        return None
    own = _neighbours(bus_ids[local_rank % len(bus_ids)], root)
    node, near = own or (0, ())
    cores = [core for core in near if core in allowed]
    if not cores:
        return None
    if len(bus_ids) >= local_size:  # else the launcher shows each worker other GPUs
        on_node = [rank for rank in range(local_size) if _neighbours(bus_ids[rank], root) == own]
        if len(cores) >= _LEAST_EXCLUSIVE * len(on_node):
            cores = _part(cores, on_node.index(local_rank), len(on_node), root)
    return None if set(cores) == set(allowed) else (node, cores)


def _part(cores: Sequence[int], index: int, count: int, root: Path) -> list[int]:
    """An equal part; hyperthreads of one core stay together where that is possible."""
    in_order = sorted(cores, key=lambda core: (_first_thread(core, root), core))
    return sorted(in_order[len(cores) * index // count : len(cores) * (index + 1) // count])


def _first_thread(core: int, root: Path) -> int:
    """The first hyperthread of the same physical core."""
    try:
        return _parse((root / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text())[0]
    except (OSError, ValueError):
        return core


def _neighbours(bus_id: str, root: Path) -> tuple[int, tuple[int, ...]] | None:
    """The NUMA node of a GPU, and its cores."""
    folder = root / "bus/pci/devices" / bus_id.lower()[-12:]  # NVML writes the domain with eight digits
    try:
        node = int((folder / "numa_node").read_text())
        cores = _parse((folder / "local_cpulist").read_text())
    except (OSError, ValueError):
        return None
    return (node, cores) if bus_id and node >= 0 else None  # -1: one node, or a virtual machine


def _parse(text: str) -> tuple[int, ...]:
    """Cores from Linux' notation: 0-3,8-11."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(sorted(found))


def _ranges(cores: Sequence[int]) -> str:
    """As Linux writes them: 0-3,8-11."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
