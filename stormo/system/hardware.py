"""The devices this process can see, and the published peaks of known ones; an unknown device stays unknown.

Asks the CUDA driver directly, so that counting GPUs costs no import of torch and honours CUDA_VISIBLE_DEVICES. CUDA
shows a process one slice (MIG instance) of a GPU, so slices are listed by NVML.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from stormo.system.affinity import own_cores
from stormo.system.nvml import Device, Nvml, NvmlUnavailableError, open_nvml

_T = TypeVar("_T")
NODE_SLICES = "STORMO_NODE_SLICES"  # the slices of all workers of a node, in a worker that CUDA shows its own alone
_DRIVER = Path("/dev/nvidiactl")  # spares machines without GPUs the import of NVML
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED
_COMPUTE_MAJOR, _COMPUTE_MINOR = 75, 76  # CUdevice_attribute
GPU_SHARE = 0.9  # of what a GPU has for a worker that may be filled; the rest is for fragments and longer samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One visible GPU, or a slice (MIG instance) of one."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]  # CUDA compute capability
    bus_id: str = ""  # its PCI address
    uuid: str = ""  # of a slice
    slice_of: str | None = None  # the physical GPU's UUID; None for a whole one
    share: float | None = 1.0  # of the physical GPU's multiprocessors; None where NVML does not tell

    @property
    def profile(self) -> str:
        """The size of a slice as NVIDIA writes it, as in 1g.18gb; empty for a whole GPU."""
        return self.name.partition(" MIG ")[2]

    @property
    def has_bf16(self) -> bool:
        """Whether bf16 runs on its matrix units (Ampere and later)."""
        return self.capability >= (8, 0)

    @property
    def has_fp16_matrix_units(self) -> bool:
        """Whether fp16 runs on matrix units (Volta and later)."""
        return self.capability >= (7, 0)


# Dense peaks in TFLOP/s from the vendors' data sheets, without sparsity: (16-bit matrix units, TF32, FP32).
PEAK_TFLOPS: dict[str, tuple[float, float | None, float]] = {
    "H200 NVL": (835.0, 417.0, 60.0),
    "H200": (989.0, 494.0, 67.0),
    "H100 NVL": (835.0, 417.0, 60.0),
    "H100 PCIe": (756.0, 378.0, 51.0),
    "H100": (989.0, 494.0, 67.0),
    "GH200": (989.0, 494.0, 67.0),
    "A100": (312.0, 156.0, 19.5),
    "A40": (149.7, 74.8, 37.4),
    "A30": (165.0, 82.0, 10.3),
    "L40S": (362.0, 183.0, 91.6),
    "L4": (121.0, 60.0, 30.3),
    "V100 PCIE": (112.0, None, 14.0),
    "V100": (125.0, None, 15.7),
    "T4": (65.0, None, 8.1),
}


def peak_tflops(gpu_name: str) -> tuple[float, float | None, float] | None:
    """The row of `PEAK_TFLOPS` for a device name, or None where it is not known."""
    matches = [key for key in PEAK_TFLOPS if all(word in gpu_name.replace("-", " ").split() for word in key.split())]
    return PEAK_TFLOPS[max(matches, key=len)] if matches else None


def peaks_of(gpu: Gpu) -> tuple[float, float | None, float] | None:
    """The peaks of a GPU, or those of the share that a slice has of it."""
    peaks = peak_tflops(gpu.name)
    if peaks is None or gpu.share is None:
        return None
    sixteen, tf32, fp32 = peaks
    return sixteen * gpu.share, None if tf32 is None else tf32 * gpu.share, fp32 * gpu.share


def visible_gpus() -> list[Gpu]:
    """Every GPU that this process may use, in the order torch numbers them, or every slice; empty without a driver."""
    if "MIG-" in (_visible_names() or "") and (slices := visible_slices()):
        return slices
    shown = _shown_by_cuda()
    if any(gpu.profile for gpu in shown):
        return visible_slices() or shown
    return shown


def visible_slices() -> list[Gpu]:
    """Every slice that this process may use; does not start CUDA, which would settle on the first."""
    return _ask_nvml(lambda nvml: [_slice(one) for one in nvml.usable(_visible_names()) if one.parent_uuid])


def why_no_gpu() -> str:
    """What keeps GPUs from being visible, to end a sentence with; empty where that is not known."""
    unused = _ask_nvml(lambda nvml: [f"GPU {gpu.index} ({gpu.name})" for gpu in nvml.empty_mig_gpus()])
    if not unused:
        names = os.environ.get("CUDA_VISIBLE_DEVICES")
        return "" if names is None else f" with CUDA_VISIBLE_DEVICES={names!r}"
    mode = "is in MIG mode and has no slice" if len(unused) == 1 else "are in MIG mode and have no slices"
    return f": {', '.join(unused)} {mode}; stormo doctor --slices tells how to cut or undo it"


def cuda_has_started() -> bool:
    """Whether this process has started CUDA, which reads CUDA_VISIBLE_DEVICES then and never again."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return bool(cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED)


def _visible_names() -> str | None:
    return os.environ.get(NODE_SLICES, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _ask_nvml(question: Callable[[Nvml], list[_T]]) -> list[_T]:
    """What NVML answers; nothing where there is no NVML."""
    if not _DRIVER.exists():
        return []
    try:
        nvml = open_nvml()
    except NvmlUnavailableError:
        return []
    try:
        return question(nvml)
    finally:
        nvml.close()


def _slice(device: Device) -> Gpu:
    _, memory_bytes = device.slice_attributes() or (0, device.memory_total_bytes() or 0)
    return Gpu(
        name=device.name,
        memory_bytes=memory_bytes,
        capability=device.capability() or (8, 0),  # the first that can be cut
        bus_id=device.bus_id() or "",
        uuid=device.uuid,
        slice_of=device.parent_uuid,
        share=device.share(),
    )


def _shown_by_cuda() -> list[Gpu]:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    return [_describe(cuda, index) for index in range(count.value)]


def _describe(cuda: ctypes.CDLL, index: int) -> Gpu:
    device = ctypes.c_int()
    name = ctypes.create_string_buffer(128)
    memory_bytes = ctypes.c_size_t()
    major, minor = ctypes.c_int(), ctypes.c_int()
    bus_id = ctypes.create_string_buffer(32)
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory_bytes), device)
    cuda.cuDeviceGetPCIBusId(bus_id, len(bus_id), device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), _COMPUTE_MAJOR, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), _COMPUTE_MINOR, device)
    return Gpu(
        name=name.value.decode(errors="replace"),
        memory_bytes=memory_bytes.value,
        capability=(major.value, minor.value),
        bus_id=bus_id.value.decode(errors="replace"),
    )


def num_cores() -> int:
    """The CPU cores this process may run on (a scheduler's or container's share, not the machine's)."""
    return len(own_cores())


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownGpu:
    """A device by its data sheet."""

    name: str
    memory_gb: int  # as published, in 10^9 bytes; the driver often shows some more
    capability: tuple[int, int]
    has_nvlink: bool  # as it is usually built into a node

    def described(self, memory_bytes: int | None = None) -> Gpu:
        """As if it were visible here."""
        return Gpu(
            name=self.name,
            memory_bytes=self.memory_gb * 10**9 if memory_bytes is None else memory_bytes,
            capability=self.capability,
        )


# Published sizes of memory, by the names that users type.
KNOWN_GPUS: dict[str, KnownGpu] = {
    key: KnownGpu(name=name, memory_gb=memory_gb, capability=capability, has_nvlink=has_nvlink)
    for key, name, memory_gb, capability, has_nvlink in (
        ("b200", "NVIDIA B200", 180, (10, 0), True),
        ("gh200-96gb", "NVIDIA GH200 96GB", 96, (9, 0), True),
        ("gh200-144gb", "NVIDIA GH200 144GB", 144, (9, 0), True),
        ("h200", "NVIDIA H200", 141, (9, 0), True),
        ("h100-80gb", "NVIDIA H100 80GB HBM3", 80, (9, 0), True),
        ("h100-64gb", "NVIDIA H100 64GB", 64, (9, 0), True),
        ("h100-pcie", "NVIDIA H100 PCIe", 80, (9, 0), False),
        ("h100-nvl", "NVIDIA H100 NVL", 94, (9, 0), True),
        ("a100-80gb", "NVIDIA A100-SXM4-80GB", 80, (8, 0), True),
        ("a100-64gb", "NVIDIA A100-SXM-64GB", 64, (8, 0), True),
        ("a100-40gb", "NVIDIA A100-SXM4-40GB", 40, (8, 0), True),
        ("a100-pcie-80gb", "NVIDIA A100 80GB PCIe", 80, (8, 0), False),
        ("a100-pcie-40gb", "NVIDIA A100-PCIE-40GB", 40, (8, 0), False),
        ("a40", "NVIDIA A40", 48, (8, 6), False),
        ("a30", "NVIDIA A30", 24, (8, 0), False),
        ("a10", "NVIDIA A10", 24, (8, 6), False),
        ("a6000", "NVIDIA RTX A6000", 48, (8, 6), False),
        ("l40s", "NVIDIA L40S", 48, (8, 9), False),
        ("l40", "NVIDIA L40", 48, (8, 9), False),
        ("l4", "NVIDIA L4", 24, (8, 9), False),
        ("rtx-4090", "NVIDIA GeForce RTX 4090", 24, (8, 9), False),
        ("rtx-3090", "NVIDIA GeForce RTX 3090", 24, (8, 6), False),
        ("v100-32gb", "Tesla V100-SXM2-32GB", 32, (7, 0), True),
        ("v100-16gb", "Tesla V100-SXM2-16GB", 16, (7, 0), True),
        ("p100", "Tesla P100-PCIE-16GB", 16, (6, 0), False),
        ("t4", "Tesla T4", 16, (7, 5), False),
    )
}
