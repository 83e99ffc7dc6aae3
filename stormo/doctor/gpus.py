"""GPUs: the driver, which there are, which of them CUDA shows, and the health of each.

NVML is asked directly for what `energy.nvml` has no use for; a device that does not tell something is not judged on it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from stormo.doctor.finding import Finding
from stormo.doctor.machine import AMD, Machine
from stormo.energy.nvml import Device, Nvml, NvmlUnavailableError, open_nvml
from stormo.errors import counted
from stormo.telemetry.text import format_bytes

_UNCORRECTED, _CORRECTED = 1, 0  # NVML_MEMORY_ERROR_TYPE_*
_SINCE_LOAD = 0  # NVML_VOLATILE_ECC
_SLOWDOWN = 1  # NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
_PROHIBITED, _EXCLUSIVE = 2, (1, 3)  # NVML_COMPUTEMODE_*
_MOST_LINKS = 36  # NVML_NVLINK_MAX_LINKS
_NEAR_SLOWDOWN_C = 5.0
_IN_USE_BYTES = 1e9  # what a driver and an idle context leave on a GPU is less

Ask = Callable[..., Any]


def _examine_gpu(library: Any, device: Device) -> Iterator[Finding]:
    """What is wrong with one GPU, or that it is healthy."""
    handle = library.nvmlDeviceGetHandleByIndex(device.index)

    def ask_it(function: str, *arguments: int) -> Any:
        return ask(library, function, handle, *arguments)

    found = [one for look in _LOOKS for one in look(ask_it, device)]
    temperature = device.temperature_c()
    heat = "" if temperature is None else f" at {temperature:.0f} °C"
    facts = {"uuid": device.uuid, "temperature_c": temperature, "memory_used_bytes": device.memory_used_bytes()}
    if not any(one.level in ("warning", "error") for one in found):
        found.insert(0, Finding("gpu-health", "ok", f"healthy{heat}", facts=facts))
    yield from (replace(one, where=f"GPU {device.index}") for one in found)


def _memory_errors(ask: Ask, device: Device) -> Iterable[Finding]:
    remapped = ask("nvmlDeviceGetRemappedRows")
    uncorrected = ask("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _SINCE_LOAD)
    if remapped and remapped[3]:
        fix = "have the GPU replaced: its memory has no spare rows left"
        yield Finding("gpu-ecc", "error", "a row of memory cannot be remapped", fix)
    elif (remapped and remapped[2]) or ask("nvmlDeviceGetRetiredPagesPendingStatus"):
        fix = "reset the GPU (nvidia-smi -r) or reboot before the next job, so that the bad memory is taken out of use"
        yield Finding("gpu-ecc", "error", "bad memory waits to be taken out", fix)
    elif uncorrected:
        yield Finding(
            "gpu-ecc",
            "error",
            f"{counted(uncorrected, 'memory error')} that could not be corrected since the driver was loaded",
            "reset the GPU (nvidia-smi -r) or choose another node: results of a training may be wrong",
            facts={"uncorrected_errors": uncorrected},
        )
    corrected = ask("nvmlDeviceGetTotalEccErrors", _CORRECTED, _SINCE_LOAD)
    if corrected:
        text = f"{counted(corrected, 'memory error')} corrected since the driver was loaded: harmless, unless many"
        yield Finding("gpu-ecc", "note", text, facts={"corrected_errors": corrected})


def _heat(ask: Ask, device: Device) -> Iterable[Finding]:
    temperature = device.temperature_c()
    limit = ask("nvmlDeviceGetTemperatureThreshold", _SLOWDOWN)
    held = device.throttled() or ()
    hard = [reason for reason in held if "heat" in reason or "hardware" in reason or "brake" in reason]
    if hard:
        fix = "look at the node's cooling and power supply, or choose another node: all workers wait for this one"
        text = f"its clocks are held back: {', '.join(hard)}" + (f" ({temperature:.0f} °C)" if temperature else "")
        yield Finding("gpu-throttle", "warning", text, fix)
    elif temperature is not None and limit and temperature > limit - _NEAR_SLOWDOWN_C:
        text = f"{temperature:.0f} °C, and slows down from {limit} °C on"
        yield Finding("gpu-throttle", "warning", text, "look at the node's cooling")
    elif held:
        yield Finding("gpu-throttle", "note", f"held back now: {', '.join(held)}")
    allowed, usual = ask("nvmlDeviceGetEnforcedPowerLimit"), ask("nvmlDeviceGetPowerManagementDefaultLimit")
    if allowed and usual and allowed < usual:
        text = f"may draw {allowed / 1000:.0f} W of its usual {usual / 1000:.0f} W: slower, and it needs less energy"
        facts = {"power_limit_w": allowed / 1000, "usual_power_limit_w": usual / 1000}
        yield Finding("gpu-power", "note", text, facts=facts)


def _others(ask: Ask, device: Device) -> Iterable[Finding]:
    """Memory that is in use before we begin, and by whom."""
    used, total = device.memory_used_bytes(), device.memory_total_bytes()
    theirs = [process for process in ask("nvmlDeviceGetComputeRunningProcesses") or () if process.pid != os.getpid()]
    if used is None or total is None or (used < _IN_USE_BYTES and not theirs):
        return
    who = (
        f"by {counted(len(theirs), 'process')} (pid {', '.join(str(one.pid) for one in theirs[:4])})" if theirs else ""
    )
    if used < _IN_USE_BYTES:
        yield Finding("gpu-in-use", "note", f"used {who}")
        return
    yield Finding(
        "gpu-in-use",
        "warning",
        f"{format_bytes(used)} of {format_bytes(total)} in use {who}".rstrip(),
        "choose another GPU with CUDA_VISIBLE_DEVICES, or end what runs there: two jobs slow each other",
        facts={"memory_used_bytes": used, "memory_total_bytes": total, "num_processes": len(theirs)},
    )


def _modes(ask: Ask, device: Device) -> Iterable[Finding]:
    mode = ask("nvmlDeviceGetComputeMode")
    if mode == _PROHIBITED:
        fix = f"allow computing: sudo nvidia-smi -i {device.index} -c DEFAULT"
        yield Finding("gpu-mode", "error", "computing is forbidden on it", fix)
    elif mode in _EXCLUSIVE:
        yield Finding("gpu-mode", "note", "one process at a time may use it")
    if ask("nvmlDeviceGetPersistenceMode") == 0:
        fix = "an administrator keeps the driver loaded with: systemctl enable --now nvidia-persistenced"
        text = "the driver is unloaded between jobs, so that the first use takes seconds"
        yield Finding("gpu-mode", "note", text, fix)
    modes = ask("nvmlDeviceGetMigMode")
    if modes and modes[0]:
        text = "split into instances (MIG): a process sees one of them, and NCCL cannot join several of one GPU"
        yield Finding("gpu-mig", "note", text)
    if modes and modes[0] != modes[1]:
        yield Finding(
            "gpu-mig",
            "warning",
            f"MIG will be {'on' if modes[1] else 'off'} after the next reset",
            f"reset it now: sudo nvidia-smi -i {device.index} -r",
        )


def _links(ask: Ask, device: Device) -> Iterable[Finding]:
    width, widest = ask("nvmlDeviceGetCurrPcieLinkWidth"), ask("nvmlDeviceGetMaxPcieLinkWidth")
    speed, fastest = ask("nvmlDeviceGetCurrPcieLinkGeneration"), ask("nvmlDeviceGetMaxPcieLinkGeneration")
    facts = {"pcie_width": width, "pcie_width_max": widest, "pcie_generation": speed, "pcie_generation_max": fastest}
    if width and widest and width < widest:
        fix = "have the card reseated, or its slot and riser looked at: copies to the GPU are that much slower"
        text = f"PCIe ×{width} instead of ×{widest}"
        yield Finding("gpu-pcie", "warning", text, fix, facts=facts)
    elif speed and fastest and speed < fastest and (device.utilisation() or 0.0) > 0.5:
        # An idle GPU lowers it to save power; under load it must be up.
        fix = "have the slot's setting in the firmware looked at"
        text = f"PCIe generation {speed} instead of {fastest} although it is busy"
        yield Finding("gpu-pcie", "warning", text, fix, facts=facts)
    states = [ask("nvmlDeviceGetNvLinkState", link) for link in range(_MOST_LINKS)]
    states = [state for state in states if state is not None]
    if any(states) and not all(states):
        yield Finding(
            "gpu-nvlink",
            "warning",
            f"{states.count(0)} of {len(states)} NVLinks are down",
            "choose another node, and look at nvidia-smi nvlink -s and dmesg: exchange between GPUs is slower",
            facts={"nvlinks": len(states), "nvlinks_down": states.count(0)},
        )


_LOOKS: tuple[Callable[[Ask, Device], Iterable[Finding]], ...] = (_memory_errors, _heat, _others, _modes, _links)


def ask(library: Any, function: str, *arguments: Any) -> Any:
    """What NVML says; None where this device or this release of it does not tell."""
    try:
        return getattr(library, function)(*arguments)
    except (library.NVMLError, AttributeError):
        return None


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
            yield Finding("gpus", "note", "a driver, but it shows no GPU", facts={"num_gpus": 0})
        yield from _silent(library, nvml)
        yield from _visibility(machine, nvml)
        for device in nvml.devices():
            yield from _examine_gpu(library, device)
    finally:
        nvml.close()


def _without_nvml(machine: Machine, reason: str) -> Iterator[Finding]:
    num_cards = machine.num_cards()
    if "mismatch" in reason.lower():
        fix = "unload the old kernel module (or reboot): the driver was updated under it"
        yield Finding("gpu-driver", "error", reason, fix)
    elif num_cards:
        yield Finding(
            "gpu-driver",
            "error",
            f"{counted(num_cards, 'NVIDIA GPU')} on the PCI bus, but {reason}",
            "load or install NVIDIA's driver (nvidia-smi must list the GPUs); in a container, start it with them: "
            "docker run --gpus all, apptainer exec --nv",
            facts={"num_cards": num_cards},
        )
    elif num_amd := machine.num_cards(AMD):
        text = f"{counted(num_amd, 'AMD GPU')} on the PCI bus: stormo uses NVIDIA's, or processors"
        yield Finding("gpus", "note", text)
    else:
        text = f"no GPU: training runs on the processors ({reason})"
        yield Finding("gpus", "note", text, facts={"num_gpus": 0})


def _driver(library: Any) -> Iterator[Finding]:
    version, cuda = _versions(library)
    text = f"NVIDIA driver {version or 'of unknown version'}, good for CUDA up to {cuda or 'n/a'}"
    yield Finding("gpu-driver", "ok", text, facts={"driver": version, "cuda_of_driver": cuda})


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
        fix = "choose GPUs of one model with CUDA_VISIBLE_DEVICES: all workers go at the pace of the slowest"
        return Finding("gpus", "warning", f"{text}: different models", fix, facts=facts)
    return Finding("gpus", "ok", text, facts=facts)


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
        yield Finding("gpus", "note", f"{counted(others, 'more GPU')} of this machine for other jobs")
    for index, reason in lost.items():
        fix = "take the node out of service; dmesg has Xid lines that say why, and a reboot may help"
        yield Finding("gpu-lost", "error", f"it is lost: {reason}", fix, where=f"GPU {index}")


def _visibility(machine: Machine, nvml: Nvml) -> Iterator[Finding]:
    asked = machine.environ.get("CUDA_VISIBLE_DEVICES")
    visible, there = len(nvml.visible(machine.environ)), len(nvml.devices())
    by_cuda = len(machine.gpus())
    facts = {"num_visible": visible, "num_visible_to_cuda": by_cuda, "num_gpus": there}
    entries = [entry for entry in (asked or "").split(",") if entry.strip()]
    if asked is not None and visible < len(entries) and not nvml.instances():
        yield Finding(
            "gpu-visible",
            "warning",
            f"CUDA_VISIBLE_DEVICES={asked} names {len(entries)} GPUs, but CUDA shows {visible}: it reads up to "
            f"the first entry that is none of the {there} here, and nothing where one is named twice",
            "correct the list, or unset it",
            facts=facts,
        )
    elif there and not visible:
        fix = f"unset CUDA_VISIBLE_DEVICES to use the {counted(there, 'GPU')} of this machine"
        yield Finding("gpu-visible", "warning", f"CUDA_VISIBLE_DEVICES={asked!r} hides all GPUs", fix)
    elif visible != by_cuda and by_cuda == 0:
        yield Finding(
            "gpu-visible",
            "error",
            f"the driver lists {counted(visible, 'GPU')}, but CUDA cannot start on any",
            "load the module nvidia_uvm (run nvidia-modprobe -u as root); on machines with NVSwitch start "
            "nvidia-fabricmanager; see dmesg",
            facts=facts,
        )
    elif there:
        text = f"{visible} of {there} visible" + (f" (CUDA_VISIBLE_DEVICES={asked})" if asked is not None else "")
        yield Finding("gpu-visible", "ok", text, facts=facts)


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
