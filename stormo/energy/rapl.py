"""The energy of CPU packages and their memory: RAPL of Intel and AMD, through the kernel's powercap folders.

Cores and the uncore are parts of their package, and psys is the whole board with the packages in it: neither is added.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stormo.energy.probe import Missing, Source

POWERCAP = Path("/sys/class/powercap")
_REFRESH_S = 0.001
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

    def __init__(self, sources: tuple[Source, ...], counters: Mapping[str, Path], notes: tuple[str, ...] = ()) -> None:
        self.sources = sources
        self.notes = notes
        self._counters = dict(counters)

    def read(self) -> Mapping[str, float]:
        """Joules by zone, up to where each begins again."""
        values = {}
        for source_id, path in self._counters.items():
            try:
                values[source_id] = int(path.read_text()) / 1e6
            except (OSError, ValueError):
                continue
        return values

    def close(self) -> None:
        """Nothing is held between readings."""


def open_rapl(root: Path | None = None) -> tuple[RaplProbe | None, list[Missing]]:
    """A probe of every package and its memory, and what of them cannot be read, with the mend."""
    root = root or POWERCAP
    zones = _zones(root)
    if not any(zone.kind == "cpu" for zone in zones):
        return None, [Missing(kind="cpu", reason=_why_none(root))]
    missing, sources, counters = [], [], {}
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
        counters[zone.folder.name] = zone.counter
        sources.append(
            Source(
                id=zone.folder.name,
                kind=zone.kind,
                name=zone.name,
                method="counter",
                resolution_j=_RESOLUTION_J,
                interval_s=_REFRESH_S,
                wraps_at_j=wraps_at_j,
            )
        )
    missing += [Missing(kind=kind, reason=_why_refused(found)) for kind, found in refused.items()]
    return (RaplProbe(tuple(sources), counters, _shared()) if sources else None), missing


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
    own, all_cpus = len(os.sched_getaffinity(0)), os.cpu_count() or 0
    if own >= all_cpus:
        return ()
    return (f"this job may use {own} of {all_cpus} CPUs: the energy of the packages is that of all of them",)


def _why_none(root: Path) -> str:
    return f"{root} shows no CPU package: a virtual machine, a container without it, or a CPU or kernel without RAPL"


def _why_refused(zones: list[_Zone]) -> str:
    names = " and ".join(zone.name for zone in zones)
    paths = " ".join(str(zone.counter) for zone in zones)
    return (
        f"{names}: root alone may read the counter (CVE-2020-8694); an administrator allows it until the next boot "
        f"with: sudo chmod a+r {paths}"
    )
