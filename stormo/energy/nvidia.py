"""The energy of NVIDIA GPUs: the driver's counter, or its power where a device has no counter (before Volta)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from stormo.energy.nvml import Device, Nvml, NvmlUnavailableError, open_nvml
from stormo.energy.probe import Missing, Source

_REFRESH_S = 0.1  # NVML renews counter and power about ten times a second
_COUNTER_RESOLUTION_J = 0.001
_POWER_RESOLUTION_J = 0.0001  # one milliwatt over one refresh


class NvidiaProbe:
    """The physical GPUs of some devices, each once."""

    def __init__(self, devices: Sequence[Device], close: Callable[[], None] = lambda: None) -> None:
        self._close = close
        self._read: dict[str, Callable[[], float | None]] = {}
        sources, notes, self.missing = [], [], list[Missing]()
        by_gpu: dict[str, list[Device]] = {}
        for device in devices:
            by_gpu.setdefault(device.physical_uuid, []).append(device)
        for uuid, parts in by_gpu.items():
            device = parts[0]
            method, resolution_j, read = "counter", _COUNTER_RESOLUTION_J, device.energy_j
            if read() is None:
                method, resolution_j, read = "power", _POWER_RESOLUTION_J, device.power_w
                if read() is None:
                    why = f"energy: {device.why_not('energy_j')}; power: {device.why_not('power_w')}"
                    self.missing.append(Missing(kind="gpu", reason=f"{uuid}: {why}"))
                    continue
                notes.append(f"{uuid} has no energy counter ({device.why_not('energy_j')}): its power is integrated")
            if device.parent_uuid:
                notes.append(
                    f"{uuid} is split (MIG): its energy is that of the whole GPU, other instances and jobs included"
                )
            self._read[uuid] = read
            sources.append(
                Source(
                    id=uuid,
                    kind="gpu",
                    name=device.name,
                    method=method,
                    resolution_j=resolution_j,
                    interval_s=_REFRESH_S,
                )
            )
        self.sources = tuple(sources)
        self.notes = tuple(notes)

    def read(self) -> Mapping[str, float]:
        """Joules since the driver was loaded or watts, by UUID."""
        values = {uuid: read() for uuid, read in self._read.items()}
        return {uuid: value for uuid, value in values.items() if value is not None}

    def close(self) -> None:
        """Let go of NVML."""
        self._close()


def open_nvidia(
    uuids: Sequence[str] | None, open_library: Callable[[], Nvml] = open_nvml
) -> tuple[NvidiaProbe | None, list[Missing]]:
    """A probe of the GPUs of these UUIDs (None: all that CUDA shows to this process), and what cannot be read."""
    if uuids is not None and not uuids:
        return None, []
    try:
        nvml = open_library()
    except NvmlUnavailableError as error:
        return None, [Missing(kind="gpu", reason=error.reason)]
    found = [nvml.find(uuid) for uuid in uuids] if uuids is not None else list(nvml.visible())
    probe = NvidiaProbe([device for device in found if device], nvml.close)
    unknown = [uuid for uuid, device in zip(uuids or (), found, strict=False) if device is None]
    missing = [Missing(kind="gpu", reason=f"{uuid}: NVML shows no such GPU here") for uuid in unknown] + probe.missing
    if not probe.sources:
        probe.close()
        return None, missing or [Missing(kind="gpu", reason="CUDA shows no GPU to this process")]
    return probe, missing
