"""The state of a node: its GPUs, processors, memory, disks and network, one dictionary per sample.

Figures are of the whole node, also inside a container, except those of the network. What cannot be read is None, and
so is every rate in the first sample: a rate is the change since the last sample.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from stormo.energy.probes import open_rapl

if TYPE_CHECKING:
    from stormo.system.nvml import Device

_MOST_CLOCKS = 16  # of the cores' clocks that are read: each costs a system call, and cores of one node are alike
_IPOIB = "32"  # ARPHRD_INFINIBAND: an interface whose bytes are in the counters of its InfiniBand port too
_IB_WORD_BYTES = 4  # InfiniBand counts its data in words of four bytes
# The sensors that stand for a whole processor, by the driver's name; those of single cores and boards are left out.
_PROCESSOR_SENSORS: dict[str, tuple[str, ...]] = {
    "coretemp": ("Package",),
    "k10temp": ("Tctl", "Tdie"),
    "zenpower": ("Tctl", "Tdie"),
    "cpu_thermal": ("",),
    "soc_thermal": ("",),
}


class NodeMetrics:
    """Samples one node; `system` is where Linux shows its devices."""

    def __init__(
        self,
        gpus: Sequence[Device] = (),
        *,
        system: Path = Path("/sys"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpus = tuple(gpus)
        self._system = system
        self._clock = clock
        self._host = socket.gethostname()
        self._temperatures = list(_processor_temperatures(system))
        self._clocks = _evenly_chosen(sorted(system.glob("devices/system/cpu/cpufreq/policy*/scaling_cur_freq")))
        self._rapl, missing = open_rapl(system / "class" / "powercap")
        self._no_power = next((each.reason for each in missing if each.kind == "cpu"), None)
        self._last: dict[str, tuple[float, float]] = {}  # counter -> (when, value)

    def sample(self) -> dict[str, Any]:
        """The node's state now, by name; names carry units, fractions are of one."""
        memory = psutil.virtual_memory()
        disk_read, disk_written = self._disk_bytes()
        network_in, network_out = self._network_bytes()
        busy, total = _cpu_times()
        busy_per_s, total_per_s = self._per_s("cpu busy", busy), self._per_s("cpu total", total)
        return {
            "time_unix_s": time.time(),
            "host": self._host,
            "cpu_fraction": None if busy_per_s is None or not total_per_s else min(busy_per_s / total_per_s, 1.0),
            "num_cpus": os.cpu_count(),
            "load_1": os.getloadavg()[0],
            "memory_used_bytes": memory.total - memory.available,
            "memory_total_bytes": memory.total,
            "disk_read_bytes_per_s": self._per_s("disk read", disk_read),
            "disk_write_bytes_per_s": self._per_s("disk written", disk_written),
            "network_in_bytes_per_s": self._per_s("network in", network_in),
            "network_out_bytes_per_s": self._per_s("network out", network_out),
            "cpu_temperature_c": max((value / 1000 for value in _numbers(self._temperatures)), default=None),
            "cpu_clock_mhz": self._cpu_clock_mhz(),
            "cpu_power_w": self._cpu_power_w(),
            "gpus": [_sample_gpu(gpu) for gpu in self._gpus],
        }

    def reasons(self) -> dict[str, str]:
        """Why a figure of the processors is None in every sample, by its name."""
        found: dict[str, str] = {}
        if not self._temperatures:
            found["cpu_temperature_c"] = "the kernel shows no sensor of a processor (usual in a virtual machine)"
        if not self._clocks:
            found["cpu_clock_mhz"] = "the kernel shows no clock of a core (usual in a virtual machine)"
        if self._no_power is not None:
            found["cpu_power_w"] = self._no_power
        return found

    def _per_s(self, counter: str, value: float | None, *, wraps_at: float | None = None) -> float | None:
        """The change of a counter since its last reading; None for a first one and for one that was set back."""
        now_s = self._clock()
        before = self._last.pop(counter, None)
        if value is None:
            return None
        self._last[counter] = (now_s, value)
        if before is None or now_s <= before[0]:
            return None
        change = value - before[1]
        if change < 0 and wraps_at is not None:
            change += wraps_at
        return change / (now_s - before[0]) if change >= 0 else None

    def _disk_bytes(self) -> tuple[float | None, float | None]:
        """Bytes read and written by the disks themselves: those of partitions, RAID and LVM are in them already."""
        try:
            counters = psutil.disk_io_counters(perdisk=True) or {}
        except (OSError, NotImplementedError):  # containers may hide both places that tell
            return None, None
        disks = {path.name for path in self._system.glob("block/*")}
        disks -= {path.name for path in self._system.glob("devices/virtual/block/*")}
        found = [counter for name, counter in counters.items() if name in disks]
        if not found:
            return None, None
        return sum(disk.read_bytes for disk in found), sum(disk.write_bytes for disk in found)

    def _network_bytes(self) -> tuple[float | None, float | None]:
        """Bytes in and out over all network cards, RDMA with them; loopback stays out, bridges repeat others."""
        ports = list(self._system.glob("class/infiniband/*/ports/*/counters"))
        counters = {name: card for name, card in psutil.net_io_counters(pernic=True).items() if name != "lo"}
        if ports:
            counters = {name: card for name, card in counters.items() if not self._is_ipoib(name)}
        virtual = {path.name for path in self._system.glob("devices/virtual/net/*")}
        # Inside a container there may be nothing but a virtual card.
        cards = [card for name, card in counters.items() if name not in virtual] or list(counters.values())
        if not cards and not ports:
            return None, None
        words_in = sum(_numbers(port / "port_rcv_data" for port in ports))
        words_out = sum(_numbers(port / "port_xmit_data" for port in ports))
        return (
            sum(card.bytes_recv for card in cards) + _IB_WORD_BYTES * words_in,
            sum(card.bytes_sent for card in cards) + _IB_WORD_BYTES * words_out,
        )

    def _is_ipoib(self, card: str) -> bool:
        return _text(self._system / "class" / "net" / card / "type") == _IPOIB

    def _cpu_clock_mhz(self) -> float | None:
        clocks_khz = _numbers(self._clocks)
        return sum(clocks_khz) / len(clocks_khz) / 1000 if clocks_khz else None

    def _cpu_power_w(self) -> float | None:
        """Power of all processor packages by their energy counters; None where one of them cannot be read."""
        if self._rapl is None or self._no_power is not None:
            return None
        energies_j, power_w = self._rapl.read(), 0.0
        for source in self._rapl.sources:
            if source.kind == "cpu":
                watts = self._per_s(source.id, energies_j.get(source.id), wraps_at=source.wraps_at_j)
                power_w = math.nan if watts is None else power_w + watts
        return None if math.isnan(power_w) else power_w


def _sample_gpu(gpu: Device) -> dict[str, Any]:
    reasons = gpu.throttled()
    return {
        "uuid": gpu.uuid,
        "name": gpu.name,
        "index": gpu.index,
        "utilisation": gpu.utilisation(),
        "memory_used_bytes": gpu.memory_used_bytes(),
        "memory_total_bytes": gpu.memory_total_bytes(),
        "power_w": gpu.power_w(),
        "power_limit_w": gpu.power_limit_w(),
        "temperature_c": gpu.temperature_c(),
        "sm_clock_mhz": gpu.sm_clock_mhz(),
        "memory_clock_mhz": gpu.memory_clock_mhz(),
        "throttled": None if reasons is None else list(reasons),
    }


def _cpu_times() -> tuple[float, float]:
    """Busy and total processor seconds since the start; waiting for a disk is not busy, guests are in `user`."""
    times = psutil.cpu_times()
    idle_s = times.idle + times.iowait
    busy_s = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
    return busy_s, busy_s + idle_s


def _processor_temperatures(system: Path) -> Iterable[Path]:
    for monitor in sorted(system.glob("class/hwmon/hwmon*")):
        wanted = _PROCESSOR_SENSORS.get(_text(monitor / "name") or "")
        if wanted is not None:
            for reading in sorted(monitor.glob("temp*_input")):
                label = _text(reading.with_name(reading.name.replace("_input", "_label"))) or ""
                if label.startswith(wanted):
                    yield reading


def _evenly_chosen(paths: list[Path]) -> list[Path]:
    return paths[:: -(-len(paths) // _MOST_CLOCKS)] if paths else []


def _numbers(paths: Iterable[Path]) -> list[float]:
    return [number for path in paths if (number := _number(path)) is not None]


def _number(path: Path) -> float | None:
    try:
        return float(_text(path) or "")
    except ValueError:
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # absent, for root only, or a sensor that does not answer
        return None
