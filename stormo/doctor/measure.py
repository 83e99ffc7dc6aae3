"""What one worker measures of its own device and host, in a fraction of a second.

Leaves torch as it was: generators of its own, no setting changed, and the memory of the device given back.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from stormo.doctor.folders import existing, obstacle
from stormo.doctor.measured import Device
from stormo.system.hardware import num_cores
from stormo.version import __version__

if TYPE_CHECKING:
    import torch

_SEED = 20_240_229
_COPY_BYTES = 32 * 1024 * 1024
_SEEN_WITHIN_S = 2.0  # for a network file system to show a file that another node has just written


def measure_device(device: torch.device, rank: int, budget_s: float) -> Device:
    """The device: right results, its speed, its memory; the host: cores, load, versions."""
    import torch

    try:
        is_exact = _is_exact(device)
        flops_per_s, repeats, digest = _speed(device, budget_s)
        copy_in, copy_out = _copies(device)
    finally:
        give_back(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device) if device.type == "cuda" else _host_memory()
    return Device(
        rank=rank,
        name=torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        kind=device.type,
        uuid=str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "",
        flops_per_s=flops_per_s,
        is_exact=is_exact and repeats,
        digest=digest,
        copy_in_bytes_per_s=copy_in,
        copy_out_bytes_per_s=copy_out,
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        num_cores=num_cores(),
        num_threads=torch.get_num_threads(),
        load_1=os.getloadavg()[0],
        versions=_versions(device),
    )


def give_back(device: torch.device) -> None:
    """Leave no memory of the device behind, so that a run finds it as without this."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()  # a deterministic run asks for workspaces of another size
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _is_exact(device: torch.device) -> bool:
    """Whether products of small whole numbers, which every number format holds, come out as they must."""
    import torch

    shapes = [(torch.float32, 512, 512, 4)]
    if device.type == "cuda":
        shapes = [(torch.float32, 2048, 2048, 4), (_half(device), 4096, 64, 2)]
    generator = torch.Generator().manual_seed(_SEED)
    for dtype, side, inner, largest in shapes:
        left = torch.randint(-largest, largest + 1, (side, inner), generator=generator)
        right = torch.randint(-largest, largest + 1, (inner, side), generator=generator)
        product = (left.to(device, dtype) @ right.to(device, dtype)).double()
        rows, columns = left @ right.sum(1), left.sum(0) @ right
        if not torch.equal(product.sum(1).cpu().long(), rows) or not torch.equal(product.sum(0).cpu().long(), columns):
            return False
    return True


def _speed(device: torch.device, budget_s: float) -> tuple[float, bool, str]:
    """Operations a second, whether the same product gives the same bits again, and a digest of them."""
    import torch

    is_gpu = device.type == "cuda"
    side = 8192 if is_gpu and torch.cuda.mem_get_info(device)[0] > 4 << 30 else 768
    generator = torch.Generator(device).manual_seed(_SEED)
    dtype = _half(device) if is_gpu else torch.float32
    left, right = (torch.randn(side, side, generator=generator, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty(side, side, device=device, dtype=dtype)
    torch.mm(left, right, out=out)  # libraries are loaded, clocks rise
    first = out.clone()
    num_calls = 10 if is_gpu else 1

    def call() -> None:
        for _ in range(num_calls):
            torch.mm(left, right, out=out)

    best_s = best_time_s(call, device, budget_s)
    repeats = not is_gpu or torch.equal(first, out)
    digest = hashlib.sha256(out[:256].float().cpu().numpy().tobytes()).hexdigest()[:16]
    return 2.0 * side**3 * num_calls / best_s, repeats, digest


def _copies(device: torch.device) -> tuple[float, float]:
    """Bytes a second from the host to the device and back; on a CPU, within its memory."""
    import torch

    is_gpu = device.type == "cuda"
    host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=is_gpu).fill_(1)
    there = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device).fill_(1)
    into_s = best_time_s(lambda: there.copy_(host, non_blocking=True), device, 0.0)
    back_s = best_time_s(lambda: host.copy_(there, non_blocking=True), device, 0.0)
    return _COPY_BYTES / into_s, _COPY_BYTES / back_s


def best_time_s(call: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """The shortest time of a call that is repeated for so long, and three times at least."""
    import torch

    deadline, best_s, count = time.perf_counter() + budget_s, float("inf"), 0
    while count < 3 or time.perf_counter() < deadline:
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best_s, count = min(best_s, time.perf_counter() - began), count + 1
    return max(best_s, 1e-9)


def _half(device: torch.device) -> torch.dtype:
    import torch

    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def _host_memory() -> tuple[int, int]:
    import psutil

    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _processor() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
    return f"{platform.machine()} processor"


def _versions(device: torch.device) -> dict[str, str]:
    import torch

    found = {"stormo": __version__, "torch": torch.__version__, "Python": platform.python_version()}
    if device.type == "cuda":
        found |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
        with contextlib.suppress(OSError):
            found["NVIDIA driver"] = Path("/sys/module/nvidia/version").read_text(encoding="utf-8").strip()
    return found


def write_token(folder: Path) -> Path:
    """A small new file in the folder of runs, or in what there is of the path to it."""
    if (in_the_way := obstacle(folder.absolute())) is not None:
        raise NotADirectoryError(errno.ENOTDIR, f"{in_the_way} is no folder")
    path = existing(folder.absolute()) / f".stormo-preflight-{uuid.uuid4().hex}"
    path.touch()
    return path


def is_seen(path: Path) -> bool:
    """Whether a file that another node has just written is seen here."""
    deadline = time.monotonic() + _SEEN_WITHIN_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def free_bytes(path: Path) -> int:
    """Free space of the file system that a path lies on."""
    return shutil.disk_usage(path).free
