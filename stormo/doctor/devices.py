"""GPUs: the driver, which there are, which of them CUDA shows, and the health of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stormo.doctor.finding import Finding
from stormo.doctor.gpu import ask, examine
from stormo.doctor.machine import Machine
from stormo.energy.nvml import Nvml, NvmlUnavailableError, open_nvml
from stormo.errors import counted
from stormo.telemetry.text import format_bytes

_NO_PERMISSION = 4  # NVML_ERROR_NO_PERMISSION


def check(machine: Machine) -> Iterator[Finding]:
    """All there is to say of the GPUs."""
    try:
        library = machine.load("pynvml")
        nvml = open_nvml(lambda _: library)
    except (ImportError, NvmlUnavailableError) as error:
        yield from _without_nvml(machine, str(error))
        return
    try:
        yield from _driver(library)
        if nvml.devices():
            yield _shown(nvml)
        else:
            yield Finding(check="gpus", level="note", text="a driver, but it shows no GPU", facts={"num_gpus": 0})
        yield from _silent(library, nvml)
        yield from _visibility(machine, nvml)
        for device in nvml.devices():
            yield from examine(library, device)
    finally:
        nvml.close()


def _without_nvml(machine: Machine, reason: str) -> Iterator[Finding]:
    num_cards = machine.num_cards()
    if "mismatch" in reason.lower():
        mend = "unload the old kernel module (or reboot): the driver was updated under it"
        yield Finding(check="gpu-driver", level="error", text=reason, mend=mend)
    elif num_cards:
        yield Finding(
            check="gpu-driver",
            level="error",
            text=f"{counted(num_cards, 'NVIDIA GPU')} on the PCI bus, but {reason}",
            mend="load or install NVIDIA's driver (nvidia-smi must list the GPUs); in a container, start it with them: "
            "docker run --gpus all, apptainer exec --nv",
            facts={"num_cards": num_cards},
        )
    elif machine.num_amd_cards():
        text = f"{counted(machine.num_amd_cards(), 'AMD GPU')} on the PCI bus: stormo uses NVIDIA's, or processors"
        yield Finding(check="gpus", level="note", text=text)
    else:
        text = f"no GPU: training runs on the processors ({reason})"
        yield Finding(check="gpus", level="note", text=text, facts={"num_gpus": 0})


def _driver(library: Any) -> Iterator[Finding]:
    version, cuda = _versions(library)
    text = f"NVIDIA driver {version or 'of unknown version'}, good for CUDA up to {cuda or 'n/a'}"
    yield Finding(check="gpu-driver", level="ok", text=text, facts={"driver": version, "cuda_of_driver": cuda})


def _versions(library: Any) -> tuple[str | None, str | None]:
    version = ask(library, "nvmlSystemGetDriverVersion")
    newest = ask(library, "nvmlSystemGetCudaDriverVersion_v2")
    version = version.decode() if isinstance(version, bytes) else version
    return version, None if newest is None else f"{newest // 1000}.{newest % 1000 // 10}"


def _shown(nvml: Nvml) -> Finding:
    models: dict[str, int] = {}
    for device in nvml.devices():
        models[device.name] = models.get(device.name, 0) + 1
    text = ", ".join(f"{number} × {name}" for name, number in models.items())
    memory = nvml.devices()[0].memory_total_bytes()
    if memory is not None and len(models) == 1:
        text += f", {format_bytes(memory)} each" if len(nvml.devices()) > 1 else f", {format_bytes(memory)}"
    facts = {"num_gpus": len(nvml.devices()), "num_instances": len(nvml.instances()), "memory_bytes": memory}
    if len(models) > 1:
        mend = "choose GPUs of one model with CUDA_VISIBLE_DEVICES: all workers go at the pace of the slowest"
        return Finding(check="gpus", level="warning", text=f"{text}: different models", mend=mend, facts=facts)
    return Finding(check="gpus", level="ok", text=text, facts=facts)


def _silent(library: Any, nvml: Nvml) -> Iterator[Finding]:
    """GPUs that the driver counts but does not open: another job's, or lost."""
    seen, others, lost = {device.index for device in nvml.devices()}, 0, dict[int, str]()
    for index in range(library.nvmlDeviceGetCount()):
        if index in seen:
            continue
        try:
            library.nvmlDeviceGetHandleByIndex(index)
        except library.NVMLError as error:
            if getattr(error, "value", None) == _NO_PERMISSION or "Permission" in str(error):
                others += 1
            else:
                lost[index] = str(error)
    if others:
        yield Finding(check="gpus", level="note", text=f"{counted(others, 'more GPU')} of this machine for other jobs")
    for index, reason in lost.items():
        mend = "take the node out of service; dmesg has Xid lines that say why, and a reboot may help"
        yield Finding(check="gpu-lost", level="error", where=f"GPU {index}", text=f"it is lost: {reason}", mend=mend)


def _visibility(machine: Machine, nvml: Nvml) -> Iterator[Finding]:
    asked = machine.environ.get("CUDA_VISIBLE_DEVICES")
    visible, there = len(nvml.visible(machine.environ)), len(nvml.devices())
    by_cuda = len(machine.gpus())
    facts = {"num_visible": visible, "num_visible_to_cuda": by_cuda, "num_gpus": there}
    entries = [entry for entry in (asked or "").split(",") if entry.strip()]
    if asked is not None and visible < len(entries) and not nvml.instances():
        yield Finding(
            check="gpu-visible",
            level="warning",
            text=f"CUDA_VISIBLE_DEVICES={asked} names {len(entries)} GPUs, but CUDA shows {visible}: it reads up to "
            f"the first entry that is none of the {there} here, and nothing where one is named twice",
            mend="correct the list, or unset it",
            facts=facts,
        )
    elif there and not visible:
        mend = f"unset CUDA_VISIBLE_DEVICES to use the {counted(there, 'GPU')} of this machine"
        yield Finding(
            check="gpu-visible", level="warning", text=f"CUDA_VISIBLE_DEVICES={asked!r} hides all GPUs", mend=mend
        )
    elif visible != by_cuda and by_cuda == 0:
        yield Finding(
            check="gpu-visible",
            level="error",
            text=f"the driver lists {counted(visible, 'GPU')}, but CUDA cannot start on any",
            mend="load the module nvidia_uvm (run nvidia-modprobe -u as root); on machines with NVSwitch start "
            "nvidia-fabricmanager; see dmesg",
            facts=facts,
        )
    elif there:
        text = f"{visible} of {there} visible" + (f" (CUDA_VISIBLE_DEVICES={asked})" if asked is not None else "")
        yield Finding(check="gpu-visible", level="ok", text=text, facts=facts)


def driver_versions(machine: Machine) -> tuple[str | None, str | None]:
    """The driver and the newest CUDA it is good for; None for both where no driver answers."""
    try:
        library = machine.load("pynvml")
        library.nvmlInit()
    except (ImportError, AttributeError):
        return None, None
    except library.NVMLError:
        return None, None
    try:
        return _versions(library)
    finally:
        library.nvmlShutdown()
