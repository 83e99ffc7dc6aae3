"""A process of its own that imports torch, tries it, and prints what it found as JSON: `python -m` this module.

Drivers and libraries that do not fit hang or crash here, where a time limit ends them.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LIMIT_S = 60.0  # an import from a network file system under load takes so long
_WATCHED = ("libnccl", "libcudnn.", "libcudart", "libcublas.")


class TorchProcess:
    """The process, started at once and asked later; `read` gives a mapping with `error` where it failed."""

    def __init__(self, environ: Mapping[str, str], words: list[str] | None = None) -> None:
        self._began_s = time.monotonic()
        self._answer: dict[str, Any] | None = None
        self._process = subprocess.Popen(
            words or [sys.executable, "-P", "-m", __spec__.name],
            env={**environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def read(self, limit_s: float = LIMIT_S) -> Mapping[str, Any]:
        """What it said; waits for it, for so long since its start at most."""
        if self._answer is None:
            self._answer = self._wait(limit_s)
        return self._answer

    def _wait(self, limit_s: float) -> dict[str, Any]:
        left_s = max(limit_s - (time.monotonic() - self._began_s), 0.0)
        try:
            out, err = self._process.communicate(timeout=left_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # held by a driver: nobody can end it
                self._process.wait(1.0)
            for pipe in (self._process.stdout, self._process.stderr):
                if pipe is not None:
                    pipe.close()
            return {"error": f"importing and trying torch took longer than {limit_s:g} s", "is_slow": True}
        with contextlib.suppress(ValueError, IndexError):
            found = json.loads(out.decode().splitlines()[-1])
            if isinstance(found, dict):
                return found
        last = next((line for line in reversed(err.decode(errors="replace").splitlines()) if line.strip()), "")
        code = self._process.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return {"error": f"a process that imports torch ended with {how}: {last.strip()[:300]}"}


def gather() -> dict[str, Any]:
    """Versions, devices and backends of torch, each tried."""
    began_s = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import torch
        import torch.distributed as dist

        import_s = time.monotonic() - began_s
        is_cuda_build = torch.version.cuda is not None
        facts: dict[str, Any] = {
            "torch": torch.__version__,
            "path": str(Path(torch.__file__).parent),
            "homes": _homes(Path(torch.__file__).parents[1]),
            "import_s": import_s,
            "cuda_of_torch": torch.version.cuda,
            "hip_of_torch": torch.version.hip,
            "num_gpus": torch.cuda.device_count() if is_cuda_build else 0,
            "architectures": torch.cuda.get_arch_list() if is_cuda_build else [],
            "cudnn": torch.backends.cudnn.version() if is_cuda_build else None,
            "backends": {
                "gloo": dist.is_available() and dist.is_gloo_available(),
                "nccl": dist.is_available() and dist.is_nccl_available(),
                "mpi": dist.is_available() and dist.is_mpi_available(),
            },
            "numpy_error": _outcome(lambda: torch.zeros(1).numpy() + 1),
        }
        if facts["backends"]["nccl"]:
            facts["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
        if is_cuda_build:
            facts["cuda_error"] = _outcome(lambda: torch.ones(64, device="cuda").sum().item())
            names = [torch.cuda.get_device_capability(index) for index in range(facts["num_gpus"])]
            facts["capabilities"] = [f"{major}.{minor}" for major, minor in names]
        facts["gloo_error"] = _outcome(lambda: _try_group("gloo")) if facts["backends"]["gloo"] else None
        can_nccl = facts["backends"]["nccl"] and facts["num_gpus"] and facts["cuda_error"] is None
        facts["nccl_error"] = _outcome(lambda: _try_group("nccl")) if can_nccl else None
        facts["has_tried_nccl"] = bool(can_nccl)
    facts["warnings"] = [str(one.message).splitlines()[0][:300] for one in caught][:5]
    facts["libraries"] = _loaded()
    return facts


def _try_group(backend: str) -> None:
    """Meet nobody on the loopback address, and sum."""
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


def _outcome(attempt: Callable[[], object]) -> str | None:
    """None where it worked, else the error in one line."""
    try:
        attempt()
    except Exception as error:  # whatever goes wrong is what was asked for
        lines = str(error).splitlines() or [""]
        return f"{type(error).__name__}: {lines[0][:300]}"
    return None


def _homes(packages: Path) -> list[str]:
    """Where the libraries of torch live: among its packages or, with conda, in the environment around them."""
    found = {str(packages), str(packages.resolve())}
    if Path(sys.prefix, "conda-meta").is_dir():
        found |= {sys.prefix, str(Path(sys.prefix).resolve())}
    return sorted(found)


def _loaded() -> dict[str, str]:
    """Where the libraries that matter were loaded from."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
            path = line.partition("/")[2]
            name = next((name for name in _WATCHED if path.rpartition("/")[2].startswith(name)), None)
            if name:
                found[name.rstrip(".")] = f"/{path}"
    return found


if __name__ == "__main__":
    print(json.dumps(gather()))  # noqa: T201
