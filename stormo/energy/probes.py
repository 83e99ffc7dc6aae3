"""Sources of energy, and the probes that read them: NVML for GPUs, RAPL for CPUs and their memory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from stormo.errors import pluralize
from stormo.system.hardware import num_cores
from stormo.system.nvml import Device, Nvml, NvmlUnavailableError, open_nvml


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A GPU, a CPU package, or its memory."""

    id: str  # of one device on one machine
    kind: str  # "gpu", "cpu", "dram"
    name: str
    method: str  # "counter": the device counts joules; "power": watts, integrated here
    resolution_j: float  # the smallest step of its figure
    interval_s: float  # how old its figure may be
    wraps_at_j: float | None = None  # a counter begins again at zero here; None: never

    def as_json(self) -> dict[str, Any]:
        """What a node's file says of it."""
        return {key: value for key, value in asdict(self).items() if key != "wraps_at_j"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """A kind of source that cannot be read, and why; never replaced by a guess."""

    kind: str
    reason: str


class Probe(Protocol):
    """Reads some sources; time, wrap-arounds and integration are the meter's."""

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources; they never change."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Whose energy is in the figures besides the job's."""

    def read(self) -> Mapping[str, float]:
        """By source id: the counter in joules, or the power in watts; one that fails now is left out."""

    def close(self) -> None:
        """Release resources."""


_REFRESH_S = 0.1  # NVML renews counter and power about ten times a second
_COUNTER_RESOLUTION_J = 0.001
_POWER_RESOLUTION_J = 0.0001  # one milliwatt over one refresh


class NvidiaProbe:
    """The physical GPUs of some devices, each once.

    Args:
        slices: into how many slices a GPU is cut, by its UUID.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        close: Callable[[], None] = lambda: None,
        *,
        slices: Mapping[str, int] | None = None,
    ) -> None:
        self._close, slices = close, slices or {}
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
            if uuid in slices:
                notes.append(_sharing(uuid, slices[uuid], len({part.uuid for part in parts if part.parent_uuid})))
            self._read[uuid] = read
            sources.append(
                Source(
                    id=uuid,
                    kind="gpu",
                    name=device.name.partition(" MIG ")[0],
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
        """Close NVML."""
        self._close()


def _sharing(uuid: str, num_slices: int, num_used: int) -> str:
    """How the energy of a GPU that is cut into slices is counted: it has one counter."""
    cut = f"{uuid} is cut into {pluralize(num_slices, 'slice')}"
    if num_used == num_slices:
        return f"{cut}, and this run uses all of them: the energy of the whole GPU is the run's"
    used = f"this run uses {num_used} of them" if num_used else "this run uses only some"
    return f"{cut}, and {used}: the GPU has one counter, so the figure includes what the other slices drew"


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
    slices = Counter(instance.physical_uuid for instance in nvml.instances())
    probe = NvidiaProbe([device for device in found if device], nvml.close, slices=slices)
    unknown = [uuid for uuid, device in zip(uuids or (), found, strict=False) if device is None]
    missing = [Missing(kind="gpu", reason=f"{uuid}: NVML shows no such GPU here") for uuid in unknown] + probe.missing
    if not probe.sources:
        probe.close()
        return None, missing or [Missing(kind="gpu", reason="CUDA shows no GPU to this process")]
    return probe, missing


POWERCAP = Path("/sys/class/powercap")
_RAPL_REFRESH_S = 0.001
_NO_PACKAGE = "a virtual machine, a container without it, or a CPU or kernel without RAPL"
_RESOLUTION_J = 2.0**-14  # the coarsest energy unit of current CPUs


@dataclass(frozen=True, slots=True)
class _Zone:
    folder: Path
    kind: str
    name: str

    @property
    def counter(self) -> Path:
        return self.folder / "energy_uj"


class RaplProbe:
    """Some zones whose counters can be read."""

    def __init__(self, root: Path, sources: Sequence[Source], notes: tuple[str, ...]) -> None:
        self.sources = tuple(sources)
        self.notes = notes
        self._root = root

    def read(self) -> Mapping[str, float]:
        """Joules by zone, up to where each begins again."""
        values = {}
        for source in self.sources:
            try:
                values[source.id] = int((self._root / source.id / "energy_uj").read_text()) / 1e6
            except (OSError, ValueError):
                continue
        return values

    def close(self) -> None:
        """Do nothing."""


def open_rapl(root: Path | None = None) -> tuple[RaplProbe | None, list[Missing]]:
    """A probe of every package and its memory, and what of them cannot be read, with the fix."""
    root = root or POWERCAP
    zones = _zones(root)
    if not any(zone.kind == "cpu" for zone in zones):
        return None, [Missing(kind="cpu", reason=f"{root} shows no CPU package: {_NO_PACKAGE}")]
    missing, sources = [], []
    if not any(zone.kind == "dram" for zone in zones):
        missing.append(Missing(kind="dram", reason=f"{root} has no dram zone: this CPU does not count its memory"))
    refused: dict[str, list[_Zone]] = {}
    for zone in zones:
        try:
            int(zone.counter.read_text())
            wraps_at_j = int((zone.folder / "max_energy_range_uj").read_text()) / 1e6
        except PermissionError:
            refused.setdefault(zone.kind, []).append(zone)
            continue
        except (OSError, ValueError) as error:
            missing.append(Missing(kind=zone.kind, reason=f"{zone.name}: {zone.folder} cannot be read ({error})"))
            continue
        sources.append(
            Source(
                id=zone.folder.name,
                kind=zone.kind,
                name=zone.name,
                method="counter",
                resolution_j=_RESOLUTION_J,
                interval_s=_RAPL_REFRESH_S,
                wraps_at_j=wraps_at_j,
            )
        )
    missing += [Missing(kind=kind, reason=_why_refused(found)) for kind, found in refused.items()]
    return (RaplProbe(root, sources, _shared()) if sources else None), missing


def _zones(root: Path) -> list[_Zone]:
    """The packages and their memory. `intel-rapl:` is the driver's prefix on AMD too; its mmio twin is left out."""
    names = {}
    for folder in sorted(root.glob("intel-rapl:*")):
        try:
            names[folder] = (folder / "name").read_text().strip()
        except OSError:
            continue
    zones = []
    for folder, name in names.items():
        owner = names.get(folder.with_name(folder.name.rpartition(":")[0]), "")
        if name.startswith("package"):
            zones.append(_Zone(folder, "cpu", name))
        elif name.startswith("dram"):
            zones.append(_Zone(folder, "dram", f"{owner} {name}".strip()))
    return zones


def _shared() -> tuple[str, ...]:
    own, all_cpus = num_cores(), os.cpu_count() or 0
    if own >= all_cpus:
        return ()
    return (f"this job may use {own} of {all_cpus} CPUs: the energy of the packages is that of all of them",)


def _why_refused(zones: list[_Zone]) -> str:
    names = " and ".join(zone.name for zone in zones)
    paths = " ".join(str(zone.counter) for zone in zones)
    return (
        f"{names}: only root may read the counter (CVE-2020-8694); an administrator allows it until the next boot "
        f"with: sudo chmod a+r {paths}"
    )
