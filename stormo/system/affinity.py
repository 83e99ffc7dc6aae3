"""Binds a worker to the CPU cores next to its GPU: memory and PCIe of the other socket are slower."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

_PCI = Path("/sys/bus/pci/devices")
_LEAST_EXCLUSIVE = 4  # cores; NCCL's and the loader's threads inherit the binding, and would starve on fewer
_unbound: set[int] | None = None  # the cores of this process before it was bound here


@dataclass(frozen=True, slots=True)
class _Neighbours:
    """The NUMA node of a GPU, and its cores."""

    node: int
    cores: tuple[int, ...]


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
    found = choose_cores(bus_ids, local_rank, local_size, allowed, _PCI)
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
    cores = [] if own is None else [core for core in own.cores if core in allowed]
    if own is None or not cores:
        return None
    if len(bus_ids) >= local_size:  # else the launcher shows each worker other GPUs
        on_node = [rank for rank in range(local_size) if _neighbours(bus_ids[rank], root) == own]
        if len(cores) >= _LEAST_EXCLUSIVE * len(on_node):
            cores = _part(cores, on_node.index(local_rank), len(on_node))
    return None if set(cores) == set(allowed) else (own.node, cores)


def _part(cores: Sequence[int], index: int, count: int) -> list[int]:
    """An equal part of every run of consecutive numbers: the second run holds the hyperthreads of the first."""
    return [
        core
        for first, last in _runs(cores)
        for core in range(
            first + (last + 1 - first) * index // count,
            first + (last + 1 - first) * (index + 1) // count,
        )
    ]


def _neighbours(bus_id: str, root: Path) -> _Neighbours | None:
    folder = root / bus_id.lower()[-12:]  # NVML writes the domain with eight digits
    try:
        node = int((folder / "numa_node").read_text())
        cores = _parse((folder / "local_cpulist").read_text())
    except (OSError, ValueError):
        return None
    return _Neighbours(node, cores) if bus_id and node >= 0 else None  # -1: one node, or a virtual machine


def _parse(text: str) -> tuple[int, ...]:
    """Linux' lists: 0-3,8-11."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(sorted(found))


def _runs(cores: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], core)
        else:
            runs.append((core, core))
    return runs


def _ranges(cores: Sequence[int]) -> str:
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in _runs(cores))
