"""NVIDIA's management library (NVML): the GPUs of this node by UUID, and their figures.

A figure that is not supported is None, with the reason. A MIG instance has its own memory; energy, power, temperature
and clocks are those of the whole physical GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stormo.errors import StormoError

_SM_CLOCK, _MEMORY_CLOCK, _GPU_TEMPERATURE = 1, 2, 0  # NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU
_MIG_ENABLED = 1
_RUNNING = "nvmlDeviceGetComputeRunningProcesses"

# Bits of nvmlDeviceGetCurrentClocksEventReasons that hold a busy GPU back; idle and set clocks are no throttling.
THROTTLE_REASONS = {
    0x004: "power limit",
    0x008: "hardware slowdown",
    0x010: "held to the slowest GPU of its group",
    0x020: "heat",
    0x040: "heat, by hardware",
    0x080: "power brake from outside",
    0x200: "board limit",
    0x400: "reliability voltage",
}


class NvmlUnavailableError(StormoError):
    """NVML is not available on this node."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A size of MIG instances that a GPU can be cut into."""

    id: int  # as nvidia-smi takes it
    name: str
    most: int  # of which so many fit
    multiprocessors: int
    memory_bytes: int


class Device:
    """One GPU, or one MIG instance of it."""

    def __init__(
        self, library: Any, handle: Any, *, uuid: str, name: str, index: int, parent: tuple[str, Any] | None = None
    ) -> None:
        self.uuid = uuid
        self.name = name
        self.index = index  # NVML's number of the physical GPU, as nvidia-smi prints it
        self.parent_uuid = parent[0] if parent else None
        self._library = library
        self.handle = handle  # NVML's
        self._whole = parent[1] if parent else handle
        self._why: dict[str, str] = {}

    @property
    def physical_uuid(self) -> str:
        """The UUID of the physical GPU."""
        return self.parent_uuid or self.uuid

    def energy_j(self) -> float | None:
        """Joules since the driver was loaded; refreshed about every 0.1 s."""
        return self._number("energy_j", "nvmlDeviceGetTotalEnergyConsumption", per=1000)

    def power_w(self) -> float | None:
        """Watts, as the device averages them (over up to a second)."""
        return self._number("power_w", "nvmlDeviceGetPowerUsage", per=1000)

    def power_limit_w(self) -> float | None:
        """The enforced power limit in watts."""
        return self._number("power_limit_w", "nvmlDeviceGetEnforcedPowerLimit", per=1000)

    def utilisation(self) -> float | None:
        """The share of the last sampling period in which a kernel ran, 0 to 1."""
        value = self._ask("utilisation", self.handle, "nvmlDeviceGetUtilizationRates")
        return None if value is None else value.gpu / 100

    def memory_used_bytes(self) -> int | None:
        """Bytes in use, by any process."""
        value = self._ask("memory_used_bytes", self.handle, "nvmlDeviceGetMemoryInfo")
        return None if value is None else int(value.used)

    def memory_total_bytes(self) -> int | None:
        """Total bytes."""
        value = self._ask("memory_total_bytes", self.handle, "nvmlDeviceGetMemoryInfo")
        return None if value is None else int(value.total)

    def temperature_c(self) -> float | None:
        """Degrees Celsius of the chip."""
        return self._number("temperature_c", "nvmlDeviceGetTemperature", _GPU_TEMPERATURE)

    def sm_clock_mhz(self) -> float | None:
        """Clock of its multiprocessors."""
        return self._number("sm_clock_mhz", "nvmlDeviceGetClockInfo", _SM_CLOCK)

    def memory_clock_mhz(self) -> float | None:
        """Clock of its memory."""
        return self._number("memory_clock_mhz", "nvmlDeviceGetClockInfo", _MEMORY_CLOCK)

    def throttled(self) -> tuple[str, ...] | None:
        """What throttles its clocks now; empty: nothing."""
        bits = self._ask("throttled", self._whole, "nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:  # the name that drivers before 535 know
            bits = self._ask("throttled", self._whole, "nvmlDeviceGetCurrentClocksThrottleReasons")
        return None if bits is None else tuple(word for bit, word in THROTTLE_REASONS.items() if bits & bit)

    def is_split(self) -> bool | None:
        """Whether MIG mode is on; None for a GPU that cannot be split."""
        modes = self._ask("is_split", self._whole, "nvmlDeviceGetMigMode")
        return None if modes is None else modes[0] == _MIG_ENABLED

    def profiles(self) -> list[Profile]:
        """The sizes of MIG instances that the GPU offers; empty where it has none, or not before MIG mode is on."""
        number = getattr(self._library, "NVML_GPU_INSTANCE_PROFILE_COUNT", 0)
        found = [
            self._ask("profiles", self._whole, "nvmlDeviceGetGpuInstanceProfileInfo", kind) for kind in range(number)
        ]
        return [
            Profile(
                id=int(info.id),
                name=_text(info.name).removeprefix("MIG "),
                most=int(info.instanceCount),
                multiprocessors=int(info.multiprocessorCount),
                memory_bytes=int(info.memorySizeMB) * 2**20,
            )
            for info in found
            if info is not None
        ]

    def pids(self) -> list[int]:
        """The processes that compute on it."""
        return [int(process.pid) for process in self._ask("pids", self.handle, _RUNNING) or ()]

    def bus_id(self) -> str | None:
        """The PCI address of the physical GPU."""
        value = self._ask("bus_id", self._whole, "nvmlDeviceGetPciInfo")
        return None if value is None else _text(value.busId)

    def slice_attributes(self) -> tuple[int, int] | None:
        """Multiprocessors and bytes of memory of a MIG instance."""
        value = self._ask("slice_attributes", self.handle, "nvmlDeviceGetAttributes")
        return None if value is None else (int(value.multiprocessorCount), int(value.memorySizeMB) * 2**20)

    def capability(self) -> tuple[int, int] | None:
        """The CUDA compute capability of the physical GPU."""
        value = self._ask("capability", self._whole, "nvmlDeviceGetCudaComputeCapability")
        return None if value is None else (int(value[0]), int(value[1]))

    def share(self) -> float | None:
        """The share of a MIG instance in the multiprocessors of its GPU; 1 for a whole GPU."""
        if self.parent_uuid is None:
            return 1.0
        own, whole = self.slice_attributes(), max((one.multiprocessors for one in self.profiles()), default=0)
        return own[0] / whole if own is not None and whole else None

    def why_not(self, method_name: str) -> str:
        """Why the last call of that method gave None; empty where it gave a value or was never called."""
        return self._why.get(method_name, "")

    def _number(self, method: str, function: str, *arguments: int, per: int = 1) -> float | None:
        value = self._ask(method, self._whole, function, *arguments)
        return None if value is None else float(value / per)

    def _ask(self, method: str, handle: Any, function: str, *arguments: int) -> Any:
        try:
            value = getattr(self._library, function)(handle, *arguments)
        except (self._library.NVMLError, AttributeError) as error:  # an old nvidia-ml-py may lack the function
            whose = "a MIG instance" if self.parent_uuid and handle is self.handle else self.name
            self._why[method] = f"{whose} does not support it ({error})"
            return None
        self._why.pop(method, None)
        return value


class Nvml:
    """An open NVML; `close` it when it is no longer needed."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._physical: list[Device] = []
        for index in range(library.nvmlDeviceGetCount()):
            try:
                self._physical.append(self._device(library.nvmlDeviceGetHandleByIndex(index), index))
            except library.NVMLError:
                continue  # another job's (a scheduler's cgroup hides it), or fallen off the bus: CUDA skips it too

    def devices(self) -> list[Device]:
        """The physical GPUs of this node (of this container) in the order of the PCI bus."""
        return list(self._physical)

    def instances(self) -> list[Device]:
        """The MIG instances of all of them."""
        return [instance for device in self._physical for instance in self._instances_of(device)]

    def usable(self, names: str | None) -> list[Device]:
        """What a process with this CUDA_VISIBLE_DEVICES may use: every MIG instance, or whole GPUs without any.

        Numbers count in the order of the PCI bus: CUDA does so too among GPUs of one model, and among different ones
        with CUDA_DEVICE_ORDER=PCI_BUS_ID.
        """
        physical, instances = self.devices(), self.instances()
        if names is None:
            return instances or physical  # beside an instance CUDA shows no whole GPU
        groups: list[list[Device]] = []
        for entry in names.split(","):
            found = _find(entry.strip(), physical, instances)
            if not found:
                break  # CUDA reads up to the first entry that names nothing
            if any(found[0].uuid == group[0].uuid for group in groups):
                return []  # named twice: CUDA then shows none at all
            groups.append(found)
        chosen = list({device.uuid: device for group in groups for device in group}.values())
        return [device for device in chosen if device.parent_uuid] or chosen

    def visible(self, environment: Mapping[str, str] | None = None) -> list[Device]:
        """What CUDA shows to this process: of MIG instances the first."""
        usable = self.usable((os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES"))
        return [device for device in usable if device.parent_uuid][:1] or usable

    def empty_mig_gpus(self) -> list[Device]:
        """The GPUs in MIG mode without an instance, which no process can use."""
        return [one for one in self._physical if one.is_split() and not self._instances_of(one)]

    def find(self, uuid: str) -> Device | None:
        """The GPU or MIG instance of that UUID, with or without its "GPU-" or "MIG-"; None where there is none."""
        wanted = bare_uuid(uuid)
        return next((one for one in [*self.devices(), *self.instances()] if bare_uuid(one.uuid) == wanted), None)

    def close(self) -> None:
        """Close the library; no device may be used afterwards."""
        with contextlib.suppress(self._library.NVMLError):  # the driver may be gone
            self._library.nvmlShutdown()

    def _device(self, handle: Any, index: int, parent: tuple[str, Any] | None = None) -> Device:
        uuid, name = (_text(ask(handle)) for ask in (self._library.nvmlDeviceGetUUID, self._library.nvmlDeviceGetName))
        return Device(self._library, handle, uuid=uuid, name=name, index=index, parent=parent)

    def _instances_of(self, device: Device) -> list[Device]:
        library, handle, found = self._library, device.handle, []
        if not device.is_split():
            return []
        for index in range(library.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                instance = library.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
                found.append(self._device(instance, device.index, (device.uuid, handle)))
            except library.NVMLError:
                continue  # an empty slot, or an instance of another container
        return found


def open_nvml(load: Callable[[str], Any] = importlib.import_module) -> Nvml:
    """NVML of this node; `NvmlUnavailableError` says why there is none."""
    try:
        library = load("pynvml")
    except ImportError:
        raise NvmlUnavailableError("the package nvidia-ml-py is not installed") from None
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        raise NvmlUnavailableError(f"NVML cannot be opened ({error}): no NVIDIA driver answers") from None
    try:
        return Nvml(library)
    except library.NVMLError as error:
        library.nvmlShutdown()
        raise NvmlUnavailableError(f"NVML does not list its GPUs ({error})") from None


def bare_uuid(uuid: str) -> str:
    """A UUID as torch prints it, without NVML's prefix."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _find(entry: str, physical: Sequence[Device], instances: Sequence[Device]) -> list[Device]:
    """The devices of one entry of CUDA_VISIBLE_DEVICES: a number, or an unambiguous prefix of a UUID."""
    if entry.startswith("MIG-GPU-"):  # as drivers before 470 wrote it: MIG-GPU-<uuid>/<instance>/<part of it>
        candidates = [one for one in instances if one.uuid == entry]
    elif entry.startswith(("GPU-", "MIG-")) and len(entry) > 4:
        candidates = [one for one in [*physical, *instances] if one.uuid.startswith(entry)]
    elif entry.isdecimal() and int(entry) < len(physical):
        candidates = [physical[int(entry)]]
    else:
        return []
    if len(candidates) != 1:
        return []
    return [one for one in instances if one.parent_uuid == candidates[0].uuid] or candidates


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")
