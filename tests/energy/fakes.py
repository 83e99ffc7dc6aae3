"""A node with two GPUs that are not there, and its samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stormo.energy.probes import Source


class FakeDevice:
    """Answers as `stormo.system.nvml.Device` does; what is set to None is not supported."""

    def __init__(self, index: int, *, throttled: tuple[str, ...] | None = (), parent: str | None = None) -> None:
        self.uuid = f"GPU-{index}" if parent is None else f"MIG-{index}"
        self.name = "NVIDIA H200"
        self.index = index
        self.parent_uuid = parent
        self.use: float | None = 0.5
        self._throttled = throttled

    def utilisation(self) -> float | None:
        return self.use

    def memory_used_bytes(self) -> int | None:
        return 20 << 30

    def memory_total_bytes(self) -> int | None:
        return 140 << 30

    def power_w(self) -> float | None:
        return 350.25

    def power_limit_w(self) -> float | None:
        return 700.0

    def temperature_c(self) -> float | None:
        return 61.0

    def sm_clock_mhz(self) -> float | None:
        return 1980.0

    def memory_clock_mhz(self) -> float | None:
        return 3201.0

    def throttled(self) -> tuple[str, ...] | None:
        return self._throttled

    def why_not(self, method_name: str) -> str:
        return "it does not tell"


class FakeNvml:
    """A driver that shows some devices."""

    def __init__(self, *devices: FakeDevice) -> None:
        self._devices = devices
        self.is_closed = False

    def devices(self) -> list[FakeDevice]:
        return [device for device in self._devices if device.parent_uuid is None]

    def instances(self) -> list[FakeDevice]:
        return [device for device in self._devices if device.parent_uuid is not None]

    def close(self) -> None:
        self.is_closed = True


class FakeProbe:
    """One GPU whose counter gains 100 J with every reading."""

    sources = (
        Source(id="GPU-0", kind="gpu", name="NVIDIA H200", method="counter", resolution_j=0.001, interval_s=0.1),
    )
    notes = ()

    def __init__(self) -> None:
        self._joules = 0.0

    def read(self) -> Mapping[str, float]:
        self._joules += 100.0
        return {"GPU-0": self._joules}

    def close(self) -> None:
        pass


def gpu(index: int = 0, **changes: Any) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "uuid": f"GPU-{index}",
        "name": "NVIDIA H200",
        "index": index,
        "utilisation": 0.97,
        "memory_used_bytes": 20 << 30,
        "memory_total_bytes": 140 << 30,
        "power_w": 512.25,
        "power_limit_w": 700.0,
        "temperature_c": 61.0,
        "sm_clock_mhz": 1980.0,
        "memory_clock_mhz": 3201.0,
        "throttled": [],
    }
    return figures | changes


def sample(*gpus: dict[str, Any], **changes: Any) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "time_unix_s": 1_700_000_000.1239,
        "host": "n1",
        "cpu_fraction": 0.5,
        "num_cpus": 16,
        "load_1": 8.0,
        "memory_used_bytes": 32 << 30,
        "memory_total_bytes": 128 << 30,
        "disk_read_bytes_per_s": 1.5e6,
        "disk_write_bytes_per_s": 250.0,
        "network_in_bytes_per_s": 3e9,
        "network_out_bytes_per_s": 4e3,
        "cpu_temperature_c": 55.0,
        "cpu_clock_mhz": 2900.0,
        "cpu_power_w": 120.0,
        "gpus": list(gpus),
    }
    return figures | changes
