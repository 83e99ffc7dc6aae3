"""One GPU: what of it would slow a training or make its results wrong.

NVML is asked directly for what `energy.nvml` has no use for; a device that does not tell something is not judged on it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from stormo.doctor.finding import Finding
from stormo.energy.nvml import Device
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


def examine(library: Any, device: Device) -> Iterator[Finding]:
    """What is wrong with one GPU, or that it is healthy."""
    handle = library.nvmlDeviceGetHandleByIndex(device.index)

    def ask_it(function: str, *arguments: int) -> Any:
        return ask(library, function, handle, *arguments)

    found = [one for look in _LOOKS for one in look(ask_it, device)]
    temperature = device.temperature_c()
    heat = "" if temperature is None else f" at {temperature:.0f} °C"
    facts = {"uuid": device.uuid, "temperature_c": temperature, "memory_used_bytes": device.memory_used_bytes()}
    if not any(one.level in ("warning", "error") for one in found):
        yield Finding(check="gpu-health", level="ok", where=f"GPU {device.index}", text=f"healthy{heat}", facts=facts)
    yield from found


def _memory_errors(ask: Ask, device: Device) -> Iterable[Finding]:
    where = f"GPU {device.index}"
    remapped = ask("nvmlDeviceGetRemappedRows")
    uncorrected = ask("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _SINCE_LOAD)
    if remapped and remapped[3]:
        mend = "have the GPU replaced: its memory has no spare rows left"
        yield Finding(check="gpu-ecc", level="error", where=where, text="a row of memory cannot be remapped", mend=mend)
    elif (remapped and remapped[2]) or ask("nvmlDeviceGetRetiredPagesPendingStatus"):
        mend = "reset the GPU (nvidia-smi -r) or reboot before the next job, so that the bad memory is taken out of use"
        yield Finding(check="gpu-ecc", level="error", where=where, text="bad memory waits to be taken out", mend=mend)
    elif uncorrected:
        yield Finding(
            check="gpu-ecc",
            level="error",
            where=where,
            text=f"{counted(uncorrected, 'memory error')} that could not be corrected since the driver was loaded",
            mend="reset the GPU (nvidia-smi -r) or choose another node: results of a training may be wrong",
            facts={"uncorrected_errors": uncorrected},
        )
    corrected = ask("nvmlDeviceGetTotalEccErrors", _CORRECTED, _SINCE_LOAD)
    if corrected:
        text = f"{counted(corrected, 'memory error')} corrected since the driver was loaded: harmless, unless many"
        yield Finding(check="gpu-ecc", level="note", where=where, text=text, facts={"corrected_errors": corrected})


def _heat(ask: Ask, device: Device) -> Iterable[Finding]:
    where, temperature = f"GPU {device.index}", device.temperature_c()
    limit = ask("nvmlDeviceGetTemperatureThreshold", _SLOWDOWN)
    held = device.throttled() or ()
    hard = [reason for reason in held if "heat" in reason or "hardware" in reason or "brake" in reason]
    if hard:
        mend = "look at the node's cooling and power supply, or choose another node: all workers wait for this one"
        text = f"its clocks are held back: {', '.join(hard)}" + (f" ({temperature:.0f} °C)" if temperature else "")
        yield Finding(check="gpu-throttle", level="warning", where=where, text=text, mend=mend)
    elif temperature is not None and limit and temperature > limit - _NEAR_SLOWDOWN_C:
        text = f"{temperature:.0f} °C, and slows down from {limit} °C on"
        yield Finding(check="gpu-throttle", level="warning", where=where, text=text, mend="look at the node's cooling")
    elif held:
        yield Finding(check="gpu-throttle", level="note", where=where, text=f"held back now: {', '.join(held)}")
    allowed, usual = ask("nvmlDeviceGetEnforcedPowerLimit"), ask("nvmlDeviceGetPowerManagementDefaultLimit")
    if allowed and usual and allowed < usual:
        text = f"may draw {allowed / 1000:.0f} W of its usual {usual / 1000:.0f} W: slower, and it needs less energy"
        facts = {"power_limit_w": allowed / 1000, "usual_power_limit_w": usual / 1000}
        yield Finding(check="gpu-power", level="note", where=where, text=text, facts=facts)


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
        yield Finding(check="gpu-in-use", level="note", where=f"GPU {device.index}", text=f"used {who}")
        return
    yield Finding(
        check="gpu-in-use",
        level="warning",
        where=f"GPU {device.index}",
        text=f"{format_bytes(used)} of {format_bytes(total)} in use {who}".rstrip(),
        mend="choose another GPU with CUDA_VISIBLE_DEVICES, or end what runs there: two jobs slow each other",
        facts={"memory_used_bytes": used, "memory_total_bytes": total, "num_processes": len(theirs)},
    )


def _modes(ask: Ask, device: Device) -> Iterable[Finding]:
    where, mode = f"GPU {device.index}", ask("nvmlDeviceGetComputeMode")
    if mode == _PROHIBITED:
        mend = f"allow computing: sudo nvidia-smi -i {device.index} -c DEFAULT"
        yield Finding(check="gpu-mode", level="error", where=where, text="computing is forbidden on it", mend=mend)
    elif mode in _EXCLUSIVE:
        yield Finding(check="gpu-mode", level="note", where=where, text="one process at a time may use it")
    if ask("nvmlDeviceGetPersistenceMode") == 0:
        mend = "an administrator keeps the driver loaded with: systemctl enable --now nvidia-persistenced"
        text = "the driver is unloaded between jobs, so that the first use takes seconds"
        yield Finding(check="gpu-mode", level="note", where=where, text=text, mend=mend)
    modes = ask("nvmlDeviceGetMigMode")
    if modes and modes[0]:
        text = "split into instances (MIG): a process sees one of them, and NCCL cannot join several of one GPU"
        yield Finding(check="gpu-mig", level="note", where=where, text=text)
    if modes and modes[0] != modes[1]:
        yield Finding(
            check="gpu-mig",
            level="warning",
            where=where,
            text=f"MIG will be {'on' if modes[1] else 'off'} after the next reset",
            mend=f"reset it now: sudo nvidia-smi -i {device.index} -r",
        )


def _links(ask: Ask, device: Device) -> Iterable[Finding]:
    where = f"GPU {device.index}"
    width, widest = ask("nvmlDeviceGetCurrPcieLinkWidth"), ask("nvmlDeviceGetMaxPcieLinkWidth")
    speed, fastest = ask("nvmlDeviceGetCurrPcieLinkGeneration"), ask("nvmlDeviceGetMaxPcieLinkGeneration")
    facts = {"pcie_width": width, "pcie_width_max": widest, "pcie_generation": speed, "pcie_generation_max": fastest}
    if width and widest and width < widest:
        mend = "have the card reseated, or its slot and riser looked at: copies to the GPU are that much slower"
        text = f"PCIe ×{width} instead of ×{widest}"
        yield Finding(check="gpu-pcie", level="warning", where=where, text=text, mend=mend, facts=facts)
    elif speed and fastest and speed < fastest and (device.utilisation() or 0.0) > 0.5:
        # An idle GPU lowers it to save power; under load it must be up.
        mend = "have the slot's setting in the firmware looked at"
        text = f"PCIe generation {speed} instead of {fastest} although it is busy"
        yield Finding(check="gpu-pcie", level="warning", where=where, text=text, mend=mend, facts=facts)
    states = [ask("nvmlDeviceGetNvLinkState", link) for link in range(_MOST_LINKS)]
    states = [state for state in states if state is not None]
    if any(states) and not all(states):
        yield Finding(
            check="gpu-nvlink",
            level="warning",
            where=where,
            text=f"{states.count(0)} of {len(states)} NVLinks are down",
            mend="choose another node, and look at nvidia-smi nvlink -s and dmesg: exchange between GPUs is slower",
            facts={"nvlinks": len(states), "nvlinks_down": states.count(0)},
        )


_LOOKS: tuple[Callable[[Ask, Device], Iterable[Finding]], ...] = (_memory_errors, _heat, _others, _modes, _links)


def ask(library: Any, function: str, *arguments: Any) -> Any:
    """What NVML says; None where this device or this release of it does not tell."""
    try:
        return getattr(library, function)(*arguments)
    except (library.NVMLError, AttributeError):
        return None
