"""A stand-in for the module pynvml: GPUs, MIG instances and refusals as a test describes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """The library's own error."""


@dataclass
class Card:
    """One GPU or MIG instance; a value that is an exception is raised, as is one that is not there."""

    uuid: str
    name: str = "NVIDIA H200"
    instances: list[Card | None] = field(default_factory=list)  # None: an empty place
    is_hidden: bool = False  # another job's
    tells: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        if key not in self.tells:
            raise NVMLError("Not Supported")
        value = self.tells[key]
        if isinstance(value, Exception):
            raise value
        return value() if callable(value) else value


# By NVML's number: the id of nvidia-smi, name, how many fit, multiprocessors, MiB.
H200_PROFILES = {
    0x0: (19, "MIG 1g.18gb", 7, 16, 16384),
    0x1: (14, "MIG 2g.35gb", 3, 32, 33280),
    0x2: (9, "MIG 3g.71gb", 2, 60, 71424),
    0x3: (5, "MIG 4g.71gb", 1, 64, 71424),
    0x4: (0, "MIG 7g.141gb", 1, 132, 143360),
    0x7: (20, "MIG 1g.18gb+me", 1, 16, 16384),
    0x9: (15, "MIG 1g.35gb", 4, 26, 33280),
}


def cut_h200(number: int = 0, num_slices: int = 7) -> Card:
    """An H200 in MIG mode, in up to seven slices: MIG-00, MIG-01 and so on."""
    tells = {"multiprocessors": 16, "memory_mb": 16384}
    slices = [Card(f"MIG-{number}{index}", "NVIDIA H200 MIG 1g.18gb", tells=tells) for index in range(num_slices)]
    return Card(
        f"GPU-{number}",
        instances=[*slices, *[None] * (7 - num_slices)],
        tells={"bus": f"00000000:{number:02X}:00.0", "capability": (9, 0), "profiles": H200_PROFILES},
    )


class FakeNvml:
    """What `stormo.system.nvml` uses of pynvml."""

    NVMLError = NVMLError
    NVML_GPU_INSTANCE_PROFILE_COUNT = 0x12

    def __init__(self, cards: list[Card], *, init: Exception | None = None) -> None:
        self.cards = cards
        self.num_open = 0
        self._init = init

    def nvmlInit(self) -> None:  # noqa: N802 - the library's names
        if self._init is not None:
            raise self._init
        self.num_open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        if not self.num_open:
            raise NVMLError("Uninitialized")
        self.num_open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        assert self.num_open > 0
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:  # noqa: N802
        if self.cards[index].is_hidden:
            raise NVMLError("Insufficient Permissions")
        return self.cards[index]

    def nvmlDeviceGetUUID(self, card: Card) -> str:  # noqa: N802
        return card.uuid

    def nvmlDeviceGetName(self, card: Card) -> str:  # noqa: N802
        return card.name

    def nvmlDeviceGetMigMode(self, card: Card) -> list[int]:  # noqa: N802
        if "V100" in card.name:
            raise NVMLError("Not Supported")
        return [int(bool(card.instances))] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Card) -> int:  # noqa: N802
        return len(card.instances)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Card, place: int) -> Card:  # noqa: N802
        instance = card.instances[place]
        if instance is None:
            raise NVMLError("Not Found")
        return instance

    def nvmlDeviceGetGpuInstanceProfileInfo(self, card: Card, kind: int) -> Any:  # noqa: N802
        found = card["profiles"].get(kind)
        if found is None:
            raise NVMLError("Not Supported")
        number, name, count, multiprocessors, memory_mb = found
        return SimpleNamespace(
            id=number,
            name=name.encode(),
            instanceCount=count,
            multiprocessorCount=multiprocessors,
            memorySizeMB=memory_mb,
        )

    def nvmlDeviceGetComputeRunningProcesses(self, card: Card) -> Any:  # noqa: N802
        return card["ComputeRunningProcesses"]

    def nvmlDeviceGetPciInfo(self, card: Card) -> Any:  # noqa: N802
        return SimpleNamespace(busId=card["bus"].encode())

    def nvmlDeviceGetAttributes(self, card: Card) -> Any:  # noqa: N802
        return SimpleNamespace(multiprocessorCount=card["multiprocessors"], memorySizeMB=card["memory_mb"])

    def nvmlDeviceGetCudaComputeCapability(self, card: Card) -> Any:  # noqa: N802
        return card["capability"]

    def nvmlDeviceGetTotalEnergyConsumption(self, card: Card) -> Any:  # noqa: N802
        assert self.num_open > 0
        return card["energy_mj"]

    def nvmlDeviceGetPowerUsage(self, card: Card) -> Any:  # noqa: N802
        return card["power_mw"]

    def nvmlDeviceGetEnforcedPowerLimit(self, card: Card) -> Any:  # noqa: N802
        return card["power_limit_mw"]

    def nvmlDeviceGetUtilizationRates(self, card: Card) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=card["percent"], memory=1)

    def nvmlDeviceGetMemoryInfo(self, card: Card) -> Any:  # noqa: N802
        return SimpleNamespace(used=card["used"], total=card["total"])

    def nvmlDeviceGetTemperature(self, card: Card, sensor: int) -> Any:  # noqa: N802
        assert sensor == 0
        return card["celsius"]

    def nvmlDeviceGetClockInfo(self, card: Card, clock: int) -> Any:  # noqa: N802
        return card[{1: "sm_mhz", 2: "memory_mhz"}[clock]]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card: Card) -> Any:  # noqa: N802
        return card["throttle_bits"]
