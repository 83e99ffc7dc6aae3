"""Energy counters: which can be read, and why the others cannot."""

from __future__ import annotations

from collections.abc import Iterator

from stormo.doctor.finding import Finding
from stormo.doctor.machine import Machine
from stormo.energy.nvml import open_nvml
from stormo.energy.probes import Missing, Probe, open_nvidia, open_rapl
from stormo.errors import counted

_WORDS = {"gpu": "GPUs", "cpu": "processors", "dram": "memory of the processors"}
_FOR_GOOD = "for good, with a rule of udev or systemd-tmpfiles that does the same at every boot"


def check(machine: Machine) -> Iterator[Finding]:
    """What a run on this machine can say of its energy."""
    gpus, missing_gpus = open_nvidia(None, lambda: open_nvml(machine.load))
    yield from _readable(gpus, "energy-gpu")
    rapl, missing = open_rapl(machine.root / "sys/class/powercap")
    yield from _readable(rapl, "energy-cpu")
    for one in missing_gpus + missing:
        yield _unreadable(one)


def _readable(probe: Probe | None, name: str) -> Iterator[Finding]:
    if probe is None:
        return
    kinds: dict[str, int] = {}
    for source in probe.sources:
        word = {"gpu": "GPU", "cpu": "CPU package", "dram": "memory zone"}[source.kind]
        kinds[word] = kinds.get(word, 0) + 1
    methods = {source.method for source in probe.sources}
    whose = " and ".join(counted(number, word) for word, number in kinds.items())
    text = f"the energy of {whose} can be read"
    text += "" if methods == {"counter"} else ", by their power where they have no counter"
    yield Finding(check=name, level="ok", text=text, facts={"num_sources": len(probe.sources)})
    for note in probe.notes:
        yield Finding(check=name, level="note", text=note)
    probe.close()


def _unreadable(missing: Missing) -> Finding:
    name = "energy-gpu" if missing.kind == "gpu" else "energy-cpu"
    what, _, mend = missing.reason.partition("; an administrator allows it until the next boot with: ")
    text = f"the energy of the {_WORDS[missing.kind]} is not measured: {what}"
    if mend:
        full = f"an administrator allows it until the next boot with: {mend}; {_FOR_GOOD}"
        return Finding(check=name, level="warning", text=text, mend=full)
    return Finding(check=name, level="note", text=text)
