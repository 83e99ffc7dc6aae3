"""GPUs and their driver, torch and the libraries it loads, and whether Gloo and NCCL work.

NVML is asked directly for what `system.nvml` does not read. A GPU that does not report a value is not judged by it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stormo.doctor.finding import Finding, in_one_line
from stormo.doctor.machine import Machine
from stormo.errors import pluralize
from stormo.system.nvml import THROTTLE_REASONS, Device, Nvml, NvmlUnavailableError, open_nvml
from stormo.telemetry.text import format_bytes

_UNCORRECTED, _SINCE_LOAD = 1, 0  # NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC
_SLOWDOWN = 1  # NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
_NO_PERMISSION = 4  # NVML_ERROR_NO_PERMISSION
_MAX_NVLINKS = 36  # NVML_NVLINK_MAX_LINKS
_HARDWARE_THROTTLE = tuple(THROTTLE_REASONS[bit] for bit in (0x008, 0x020, 0x040, 0x080))
_NEAR_SLOWDOWN_C = 5.0
_IN_USE_BYTES = 1e9  # a driver and an idle context use less
_SLOW_IMPORT_S = 20.0
_CUDA_LIBRARIES = ("libnccl", "libcudnn", "libcudart", "libcublas")
_SINGLE_PACKAGES = ("torch", "numpy", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "triton")
_NCCL_FIX = "run again with NCCL_DEBUG=INFO, which says which part fails; see the findings on the GPUs and libraries"

Query = Callable[..., Any]  # an NVML function's name and its arguments after the device


def check_gpus(machine: Machine) -> Iterator[Finding]:
    """The driver, the GPUs that CUDA shows, and the health of each."""
    try:
        library = machine.load("pynvml")
        nvml = open_nvml(lambda _: library)
    except (ImportError, NvmlUnavailableError) as error:
        yield _without_nvml(machine, str(error))
        return
    try:
        version = _query(library, "nvmlSystemGetDriverVersion")
        newest = _query(library, "nvmlSystemGetCudaDriverVersion_v2")
        version = version.decode() if isinstance(version, bytes) else version
        cuda = None if newest is None else f"{newest // 1000}.{newest % 1000 // 10}"
        text = f"NVIDIA driver {version or 'of unknown version'}, supports CUDA up to {cuda or 'n/a'}"
        yield Finding("gpu-driver", "ok", text, facts={"driver": version, "cuda_of_driver": cuda})
        yield _models(nvml)
        yield from _unreadable(library, nvml)
        yield from _visible(machine, nvml)
        for device in nvml.devices():
            yield from _check_gpu(library, device)
    finally:
        nvml.close()


def _without_nvml(machine: Machine, reason: str) -> Finding:
    num_gpus = machine.num_nvidia_gpus()
    if "mismatch" in reason.lower():  # NVML's own text
        fix = "unload the old kernel module (or reboot): the driver was updated under it"
        return Finding("gpu-driver", "error", reason, fix)
    if num_gpus:
        return Finding(
            "gpu-driver",
            "error",
            f"{pluralize(num_gpus, 'NVIDIA GPU')} on the PCI bus, but {reason}",
            "load or install NVIDIA's driver (nvidia-smi must list the GPUs); in a container, start it with them: "
            "docker run --gpus all, apptainer exec --nv",
            facts={"num_gpus": num_gpus},
        )
    return Finding("gpus", "note", f"no GPU: training runs on the CPU ({reason})", facts={"num_gpus": 0})


def _models(nvml: Nvml) -> Finding:
    devices = nvml.devices()
    if not devices:
        return Finding("gpus", "note", "a driver, but it shows no GPU", facts={"num_gpus": 0})
    models = Counter(device.name for device in devices)
    text = ", ".join(f"{count} × {name}" for name, count in models.items())
    memory = devices[0].memory_total_bytes()
    facts = {"num_gpus": len(devices), "num_instances": len(nvml.instances()), "memory_bytes": memory}
    if len(models) > 1:
        fix = "choose GPUs of one model with CUDA_VISIBLE_DEVICES: all workers run at the speed of the slowest"
        return Finding("gpus", "warning", f"{text}: different models", fix, facts=facts)
    if memory is not None:
        text += f", {format_bytes(memory)}{' each' if len(devices) > 1 else ''}"
    return Finding("gpus", "ok", text, facts=facts)


def _unreadable(library: Any, nvml: Nvml) -> Iterator[Finding]:
    """GPUs that the driver counts but does not open: another job's, or failed ones."""
    opened, num_other_jobs = {device.index for device in nvml.devices()}, 0
    for index in range(library.nvmlDeviceGetCount()):
        if index in opened:
            continue
        try:
            library.nvmlDeviceGetHandleByIndex(index)
        except library.NVMLError as error:
            if getattr(error, "value", None) == _NO_PERMISSION or "Permission" in str(error):
                num_other_jobs += 1
                continue
            fix = "take the node out of service; dmesg has Xid lines that say why, and a reboot may help"
            yield Finding("gpu-lost", "error", f"it is lost: {error}", fix, where=f"GPU {index}")
    if num_other_jobs:
        yield Finding("gpus", "note", f"{pluralize(num_other_jobs, 'more GPU')} of this machine for other jobs")


def _visible(machine: Machine, nvml: Nvml) -> Iterator[Finding]:
    setting = machine.environ.get("CUDA_VISIBLE_DEVICES")
    usable, num_gpus = nvml.usable(setting), len(nvml.devices())
    visible, num_slices = len(usable), sum(device.parent_uuid is not None for device in usable)
    by_cuda = len(machine.gpus())
    facts = {"num_visible": visible, "num_visible_to_cuda": by_cuda, "num_gpus": num_gpus}
    entries = [entry for entry in (setting or "").split(",") if entry.strip()]
    if setting is not None and visible < len(entries) and not nvml.instances():
        yield Finding(
            "gpu-visible",
            "warning",
            f"CUDA_VISIBLE_DEVICES={setting} names {len(entries)} GPUs, but CUDA shows {visible}: it stops at the "
            f"first entry that is none of the {num_gpus} here, and shows none if one is named twice",
            "correct the list, or unset it",
            facts=facts,
        )
    elif num_gpus and not visible:
        fix = f"unset CUDA_VISIBLE_DEVICES to use the {pluralize(num_gpus, 'GPU')} of this machine"
        yield Finding("gpu-visible", "warning", f"CUDA_VISIBLE_DEVICES={setting!r} hides all GPUs", fix)
    elif visible and by_cuda == 0:
        yield Finding(
            "gpu-visible",
            "error",
            f"the driver lists {pluralize(visible, 'GPU')}, but CUDA cannot start on any",
            "load the module nvidia_uvm (run nvidia-modprobe -u as root); on machines with NVSwitch start "
            "nvidia-fabricmanager; see dmesg",
            facts=facts,
        )
    elif num_gpus:
        text = f"{visible} of {num_gpus} visible"
        if num_slices:
            text = f"{pluralize(num_slices, 'slice')} of {pluralize(num_gpus, 'GPU')} visible"
        text += f" (CUDA_VISIBLE_DEVICES={setting})" if setting is not None else ""
        yield Finding("gpu-visible", "ok", text, facts=facts)


def _check_gpu(library: Any, device: Device) -> Iterator[Finding]:
    """What is wrong with one GPU, or that it is healthy."""
    handle = library.nvmlDeviceGetHandleByIndex(device.index)

    def query(function: str, *arguments: int) -> Any:
        return _query(library, function, handle, *arguments)

    checks = (_memory_errors, _throttling, _memory_in_use, _slices, _links)
    found = [finding for check in checks for finding in check(query, device)]
    temperature = device.temperature_c()
    if not any(finding.level in ("warning", "error") for finding in found):
        text = "healthy" + ("" if temperature is None else f" at {temperature:.0f} °C")
        facts = {"uuid": device.uuid, "temperature_c": temperature, "memory_used_bytes": device.memory_used_bytes()}
        found.insert(0, Finding("gpu-health", "ok", text, facts=facts))
    yield from (replace(finding, where=f"GPU {device.index}") for finding in found)


def _memory_errors(query: Query, _: Device) -> Iterable[Finding]:
    remapped = query("nvmlDeviceGetRemappedRows")
    uncorrected = query("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _SINCE_LOAD)
    if remapped and remapped[3]:
        fix = "have the GPU replaced: its memory has no spare rows left"
        yield Finding("gpu-ecc", "error", "a row of memory cannot be remapped", fix)
    elif (remapped and remapped[2]) or query("nvmlDeviceGetRetiredPagesPendingStatus"):
        fix = "reset the GPU (nvidia-smi -r) or reboot before the next job"
        yield Finding("gpu-ecc", "error", "bad memory is retired only at the next reset", fix)
    elif uncorrected:
        yield Finding(
            "gpu-ecc",
            "error",
            f"{pluralize(uncorrected, 'memory error')} that could not be corrected since the driver was loaded",
            "reset the GPU (nvidia-smi -r) or choose another node: results of a training may be wrong",
            facts={"uncorrected_errors": uncorrected},
        )


def _throttling(query: Query, device: Device) -> Iterable[Finding]:
    temperature = device.temperature_c()
    limit = query("nvmlDeviceGetTemperatureThreshold", _SLOWDOWN)
    reasons = device.throttled() or ()
    by_hardware = [reason for reason in reasons if reason in _HARDWARE_THROTTLE]
    if by_hardware:
        fix = "look at the node's cooling and power supply, or choose another node: all workers wait for this one"
        text = f"its clocks are throttled: {', '.join(by_hardware)}" + (
            f" ({temperature:.0f} °C)" if temperature else ""
        )
        yield Finding("gpu-throttle", "warning", text, fix)
    elif temperature is not None and limit and temperature > limit - _NEAR_SLOWDOWN_C:
        text = f"{temperature:.0f} °C, and it slows down from {limit} °C on"
        yield Finding("gpu-throttle", "warning", text, "look at the node's cooling")
    elif reasons:
        yield Finding("gpu-throttle", "note", f"throttled now: {', '.join(reasons)}")
    limit_w, usual_w = device.power_limit_w(), (query("nvmlDeviceGetPowerManagementDefaultLimit") or 0) / 1000
    if limit_w and limit_w < usual_w:
        text = f"may draw {limit_w:.0f} W of its usual {usual_w:.0f} W: slower, with less energy"
        yield Finding("gpu-power", "note", text, facts={"power_limit_w": limit_w, "usual_power_limit_w": usual_w})


def _memory_in_use(_: Query, device: Device) -> Iterable[Finding]:
    used, total = device.memory_used_bytes(), device.memory_total_bytes()
    pids = [pid for pid in device.pids() if pid != os.getpid()]
    if used is None or total is None:
        return
    who = f"by {pluralize(len(pids), 'process')} (pid {', '.join(map(str, pids[:4]))})" if pids else ""
    if used >= _IN_USE_BYTES:
        yield Finding(
            "gpu-in-use",
            "warning",
            f"{format_bytes(used)} of {format_bytes(total)} in use {who}".rstrip(),
            "choose another GPU with CUDA_VISIBLE_DEVICES, or end what runs there: two jobs slow each other",
            facts={"memory_used_bytes": used, "memory_total_bytes": total, "num_processes": len(pids)},
        )
    elif pids:
        yield Finding("gpu-in-use", "note", f"used {who}")


def _slices(_: Query, device: Device) -> Iterable[Finding]:
    if device.is_split():
        text = "cut into slices (MIG): each worker gets one, and NCCL joins those of one GPU over sockets"
        yield Finding("gpu-mig", "note", f"{text}; stormo doctor --slices lists them")


def _links(query: Query, _: Device) -> Iterable[Finding]:
    width, max_width = query("nvmlDeviceGetCurrPcieLinkWidth"), query("nvmlDeviceGetMaxPcieLinkWidth")
    if width and max_width and width < max_width:
        fix = "have the card reseated, or its slot and riser looked at: copies to the GPU are that much slower"
        facts = {"pcie_width": width, "pcie_width_max": max_width}
        yield Finding("gpu-pcie", "warning", f"PCIe ×{width} instead of ×{max_width}", fix, facts=facts)
    states = [query("nvmlDeviceGetNvLinkState", link) for link in range(_MAX_NVLINKS)]
    states = [state for state in states if state is not None]
    if any(states) and not all(states):
        yield Finding(
            "gpu-nvlink",
            "warning",
            f"{states.count(0)} of {len(states)} NVLinks are down",
            "choose another node, and look at nvidia-smi nvlink -s and dmesg: exchange between GPUs is slower",
            facts={"nvlinks": len(states), "nvlinks_down": states.count(0)},
        )


def _query(library: Any, function: str, *arguments: Any) -> Any:
    """What NVML reports; None where this GPU or this release of NVML does not."""
    try:
        return getattr(library, function)(*arguments)
    except (library.NVMLError, AttributeError):
        return None


def installations(name: str) -> dict[str, str]:
    """The versions of a package that Python would find, by their folder."""
    packages = importlib.metadata.distributions(name=name)
    return {str(Path(str(package.locate_file(""))).resolve()): package.version for package in packages}


def check_libraries(
    machine: Machine, installed: Callable[[str], Mapping[str, str]] = installations
) -> Iterator[Finding]:
    """All versions, and which of them do not fit; torch comes last, as its import may hang or crash."""
    stormo = next((f"stormo {version}" for version in installed("stormo").values()), "stormo from a folder")
    yield Finding("python", "ok", f"Python {platform.python_version()}, {stormo}")
    for name in _SINGLE_PACKAGES:
        if len(found := installed(name)) > 1:
            text = " and ".join(f"{version} in {folder}" for folder, version in found.items())
            fix = "remove all but one; the second is often in ~/.local, which PYTHONNOUSERSITE=1 leaves out"
            yield Finding(f"two-{name}", "warning", f"{name} is installed twice: {text}", fix)
    programs = machine.environ.get("PATH", os.defpath)
    if not any(shutil.which(name, path=programs) for name in ("cc", "gcc", "clang")) and not machine.environ.get("CC"):
        text = "no C compiler: --compile and fused kernels cannot be built"
        yield Finding("compiler", "note", text, "install gcc, or load a module that has it")
    machine.progress("the import of torch")
    facts = machine.torch()
    yield from _library_paths(machine, facts)
    if "error" in facts:
        fix = "import torch by hand to see it all (python -c 'import torch'), and reinstall it if that fails"
        yield Finding("torch", "error", str(facts["error"]), fix)
        return
    yield from _torch(facts)
    yield from _cuda(machine, facts)


def _torch(facts: Mapping[str, Any]) -> Iterator[Finding]:
    text = f"torch {facts['torch']} for {f'CUDA {cuda}' if (cuda := facts.get('cuda_of_torch')) else 'CPUs only'}"
    text += f", NCCL {facts['nccl']}" if facts.get("nccl") else ""
    text += f", cuDNN {_cudnn_version(facts['cudnn'])}" if facts.get("cudnn") else ""
    names = ("torch", "cuda_of_torch", "nccl", "cudnn", "import_s", "path")
    yield Finding("torch", "ok", text, facts={name: facts.get(name) for name in names})
    if facts.get("import_s", 0.0) > _SLOW_IMPORT_S:
        fix = "keep the Python environment on a local disk, or in one file (a container image, an archive)"
        text = f"importing torch took {facts['import_s']:.0f} s, and every worker imports it"
        yield Finding("torch-import", "warning", text, fix)
    if facts.get("numpy_error"):
        fix = "install a numpy that this torch was built for: pip install --upgrade numpy torch"
        yield Finding("numpy", "error", f"torch cannot use numpy: {facts['numpy_error']}", fix)


def _cuda(machine: Machine, facts: Mapping[str, Any]) -> Iterator[Finding]:
    if facts["cuda_of_torch"] is None:
        if num_gpus := machine.num_nvidia_gpus() or len(machine.gpus()):
            text = f"torch is built for CPUs only, but this machine has {pluralize(num_gpus, 'NVIDIA GPU')}"
            fix = "install a torch that is built for CUDA; pytorch.org lists the command for each release of CUDA"
            yield Finding("torch-cuda", "error", text, fix)
    elif facts["cuda_error"] and (facts["num_gpus"] or machine.gpus()):
        fix = (
            "too old a driver: update it, or install a torch for its CUDA; no kernel image: install a torch built for "
        )
        fix += "this GPU; else see dmesg and nvidia-smi: a GPU in a bad state is fixed by a reset or a reboot"
        yield Finding("torch-cuda", "error", f"torch cannot compute on the GPU: {facts['cuda_error']}", fix)


def _library_paths(machine: Machine, facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Libraries of the system or of a module that are, or would be, loaded instead of torch's."""
    own_folders = tuple(facts.get("homes") or ())
    foreign = {name: path for name, path in (facts.get("libraries") or {}).items() if not path.startswith(own_folders)}
    for name, path in foreign.items():
        text = f"torch uses {name} of {path}, not the one that it came with"
        fix = "unload the module that brings it, or take its folder out of LD_LIBRARY_PATH, unless it is meant"
        yield Finding("library-path", "warning", text, fix)
    for folder in filter(None, machine.environ.get("LD_LIBRARY_PATH", "").split(":")):
        names = [name for name in _CUDA_LIBRARIES if name not in foreign and any(Path(folder).glob(f"{name}.so*"))]
        if names:
            text = f"LD_LIBRARY_PATH has {', '.join(names)} in {folder}, which are loaded before torch's"
            fix = "unload the module that sets it, or unset LD_LIBRARY_PATH, unless it is meant"
            yield Finding("library-path", "warning", text, fix)


def _cudnn_version(number: int) -> str:
    """cuDNN's one number as people write it; release 9 gave the minor version a second digit."""
    step = 10_000 if number >= 90_000 else 1_000
    return f"{number // step}.{number % step // 100}.{number % 100}"


def check_backends(machine: Machine, try_sum: Callable[[str], None] | None = None) -> Iterator[Finding]:
    """Whether a group of one process can sum with Gloo and, on a GPU, with NCCL."""
    facts = machine.torch()
    if "error" in facts:
        yield Finding("backends", "note", "not tried: torch cannot be imported")
        return
    machine.progress("Gloo")
    try_sum = try_sum or _sum_alone
    gloo_error = _error_of(lambda: try_sum("gloo"))
    if gloo_error:
        fix = "check that the interface lo is up (ip link set lo up) and that nothing forbids sockets here"
        yield Finding("gloo", "error", f"Gloo does not work: {gloo_error}", fix)
    else:
        yield Finding("gloo", "ok", "Gloo works: a group of one process on the loopback address sums")
    if facts["backends"]["nccl"] and facts["num_gpus"] and facts["cuda_error"] is None:
        machine.progress("NCCL")
        nccl_error = _error_of(lambda: try_sum("nccl"))
        if nccl_error:
            yield Finding("nccl", "error", f"NCCL does not work: {nccl_error}", _NCCL_FIX)
        else:
            yield Finding("nccl", "ok", f"NCCL {facts.get('nccl')} works: one process sums on a GPU")
    elif facts["backends"]["nccl"]:
        yield Finding("nccl", "note", "NCCL is there, but no GPU that it could use")
    elif facts["num_gpus"]:
        fix = "install a torch that has it: all of pytorch.org's for Linux and CUDA do"
        yield Finding("nccl", "error", "GPUs, but a torch that is built without NCCL", fix)
    else:
        yield Finding("nccl", "ok", "no NCCL, and no GPU that needs it")


def torch_facts() -> dict[str, Any]:
    """Versions, devices and backends of torch; `error` where torch cannot be imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    began_s = time.monotonic()
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:  # any error is the answer
        return {"error": f"torch cannot be imported: {in_one_line(error)}"}
    import_s = time.monotonic() - began_s
    is_cuda_build = torch.version.cuda is not None
    has_nccl = dist.is_available() and dist.is_nccl_available()
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "path": str(Path(torch.__file__).parent),
        "homes": _library_folders(Path(torch.__file__).parents[1]),
        "import_s": import_s,
        "cuda_of_torch": torch.version.cuda,
        "num_gpus": torch.cuda.device_count() if is_cuda_build else 0,
        "cudnn": torch.backends.cudnn.version() if is_cuda_build else None,
        "backends": {"nccl": has_nccl},
        "numpy_error": _error_of(lambda: torch.zeros(1).numpy() + 1),
        "cuda_error": _error_of(lambda: torch.ones(64, device="cuda").sum().item()) if is_cuda_build else None,
    }
    if has_nccl:
        facts["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    facts["libraries"] = _loaded_libraries()
    return facts


def _sum_alone(backend: str) -> None:
    """Sum over a group of one process on the loopback address."""
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    device = torch.device("cuda", 0) if backend == "nccl" else None
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        tensor = torch.full((1000,), 2.0, device=device)
        dist.all_reduce(tensor)
        if tensor.sum().item() != 2000.0:
            raise ArithmeticError(f"a sum over one process gave {tensor.sum().item()} instead of 2000")
    finally:
        dist.destroy_process_group()


def _error_of(attempt: Callable[[], object]) -> str | None:
    """None where it worked, else the error in one line."""
    try:
        attempt()
    except Exception as error:  # any error is the answer
        return in_one_line(error)
    return None


def _library_folders(packages: Path) -> list[str]:
    """Where torch's libraries are: among its packages or, with conda, in the environment around them."""
    found = {str(packages), str(packages.resolve())}
    if Path(sys.prefix, "conda-meta").is_dir():
        found |= {sys.prefix, str(Path(sys.prefix).resolve())}
    return sorted(found)


def _loaded_libraries() -> dict[str, str]:
    """The CUDA libraries that this process has loaded, with their paths."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
            path = line.partition("/")[2]
            name = re.split(r"-|\.so", path.rpartition("/")[2])[0]  # wheels rename: libcudart-d0da41ae.so.11.0
            if name in _CUDA_LIBRARIES:
                found[name] = f"/{path}"
    return found
