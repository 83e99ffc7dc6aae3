"""Python, torch and what it was built against, the driver, libraries in the way; and whether Gloo and NCCL work."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stormo.doctor.finding import Finding
from stormo.doctor.gpus import driver_versions
from stormo.doctor.machine import Machine
from stormo.errors import counted

Packages = Mapping[str, list[tuple[str, str]]]  # by name: version and place of each installation
_PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*\(?==\s*([0-9][^;,)\s]*)")
_IN_THE_WAY = ("libnccl.so*", "libcudnn.so*", "libcudart.so*", "libcublas.so*")


def installed() -> Packages:
    """Every package that Python would find, with each place it is found at."""
    found: dict[str, list[tuple[str, str]]] = {}
    for package in importlib.metadata.distributions():
        name = _normal(package.metadata["Name"] or "")
        place = (package.version, str(Path(str(package.locate_file(""))).resolve()))
        if place not in found.setdefault(name, []):
            found[name].append(place)
    return found


def pins_of_torch() -> list[str]:
    """What the installed torch asks of other packages."""
    try:
        return importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def check(
    machine: Machine,
    packages: Callable[[], Packages] = installed,
    pins: Callable[[], Iterable[str]] = pins_of_torch,
) -> Iterator[Finding]:
    """All versions, and which of them do not fit; what needs torch comes last, whose import may hang or crash."""
    there = packages()
    stormo = f"stormo {there['stormo'][0][0]}" if "stormo" in there else "stormo from a folder"
    yield Finding("python", "ok", f"Python {platform.python_version()}, {stormo}")
    yield from _duplicates(there)
    yield from _pinned(there, pins())
    if not any(machine.program(name) for name in ("cc", "gcc", "clang")) and not machine.environ.get("CC"):
        text = "no C compiler: --compile and fused kernels cannot be built"
        yield Finding("compiler", "note", text, "install gcc, or load a module that has it")
    machine.tell("the import of torch")
    facts = machine.torch()
    yield from _paths(machine, facts)
    if "error" in facts:
        fix = "import torch by hand to see it all (python -c 'import torch'), and install it anew where it fails"
        yield Finding("torch", "error", str(facts["error"]), fix)
    else:
        yield from _torch(machine, facts)


def _torch(machine: Machine, facts: Mapping[str, Any]) -> Iterator[Finding]:
    built_for = f"CUDA {facts['cuda_of_torch']}" if facts.get("cuda_of_torch") else "CPUs alone"
    if facts.get("hip_of_torch"):
        built_for = f"ROCm {facts['hip_of_torch']}"
    text = f"torch {facts['torch']} for {built_for}"
    text += f", NCCL {facts['nccl']}" if facts.get("nccl") else ""
    text += f", cuDNN {_cudnn(facts['cudnn'])}" if facts.get("cudnn") else ""
    shown = {name: facts.get(name) for name in ("torch", "cuda_of_torch", "nccl", "cudnn", "import_s", "path")}
    yield Finding("torch", "ok", text, facts=shown)
    if facts.get("import_s", 0.0) > 20.0:
        fix = "keep the Python environment on a local disk, or in one file (a container image, an archive)"
        text = f"importing torch took {facts['import_s']:.0f} s: so long every worker takes to start"
        yield Finding("torch-import", "warning", text, fix)
    for warning in facts.get("warnings") or ():
        yield Finding("torch", "note", f"it warns: {warning}")
    if facts.get("numpy_error"):
        fix = "install a numpy that this torch was built for: pip install --upgrade numpy torch"
        yield Finding("numpy", "error", f"torch cannot use numpy: {facts['numpy_error']}", fix)
    yield from _cuda(machine, facts)


def _cuda(machine: Machine, facts: Mapping[str, Any]) -> Iterator[Finding]:
    driver, newest = driver_versions(machine)
    built = facts.get("cuda_of_torch")
    num_cards = machine.num_cards()
    if built is None:
        if num_cards or driver:
            there = counted(num_cards, "NVIDIA GPU") if num_cards else f"NVIDIA driver {driver}"
            fix = "install a torch that is built for CUDA; pytorch.org lists the command for each release of CUDA"
            text = f"torch is built for CPUs alone, but this machine has {there}"
            yield Finding("torch-cuda", "error", text, fix)
        return
    if newest is not None and _version(built)[:1] > _version(newest)[:1]:
        yield Finding(
            "torch-cuda",
            "error",
            f"torch is built for CUDA {built}, but driver {driver} goes up to CUDA {newest}",
            f"update the driver, or install a torch for CUDA {_version(newest)[0]}",
            facts={"cuda_of_torch": built, "cuda_of_driver": newest, "driver": driver},
        )
    elif newest is not None and _version(built) > _version(newest):
        text = f"torch is built for CUDA {built}, the driver for {newest}: fine within one major release, mostly"
        yield Finding("torch-cuda", "note", text, "update the driver where something fails")
    if facts.get("num_gpus") and facts.get("cuda_error"):
        fix = "see dmesg and nvidia-smi; a GPU in a bad state is fixed by a reset or a reboot"
        text = f"torch cannot compute on the GPU: {facts['cuda_error']}"
        yield Finding("torch-cuda", "error", text, fix)
    for capability in sorted(set(facts.get("capabilities") or ())):
        if not _runs_on(capability, facts.get("architectures") or ()):
            fix = "install a torch built for this GPU: an older release for an old GPU, the newest for a new one"
            text = f"this torch has no kernels for a GPU of compute capability {capability}"
            yield Finding("torch-cuda", "error", text, fix)


def _runs_on(capability: str, architectures: Iterable[str]) -> bool:
    """Machine code runs on its own major line from its minor on, PTX (compute_) on everything newer."""
    major, minor = (int(part) for part in capability.split("."))
    for architecture in architectures:
        kind, _, digits = architecture.rpartition("_")
        digits = re.sub(r"\D", "", digits)
        its_major, its_minor = int(digits[:-1]), int(digits[-1])
        if kind == "compute" and (its_major, its_minor) <= (major, minor):
            return True
        if kind == "sm" and its_major == major and its_minor <= minor:
            return True
    return not list(architectures)


def _duplicates(there: Packages) -> Iterator[Finding]:
    for name in ("torch", "numpy", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "triton"):
        places = there.get(name, [])
        if len({place for _, place in places}) > 1:
            listed = " and ".join(f"{version} in {place}" for version, place in places)
            fix = "remove all but one; the second is often in ~/.local, which PYTHONNOUSERSITE=1 leaves out"
            yield Finding(f"two-{name}", "warning", f"{name} is there twice: {listed}", fix)


def _pinned(there: Packages, pins: Iterable[str]) -> Iterator[Finding]:
    """Packages that torch wants in exactly one version and that are there in another."""
    wanted: dict[str, set[str]] = {}
    for pin in pins:
        match = _PIN.match(pin)
        if match and "extra ==" not in pin:
            wanted.setdefault(_normal(match[1]), set()).add(match[2])
    wrong = {
        name: (there[name][0][0], " or ".join(sorted(versions)))
        for name, versions in wanted.items()
        if name in there and there[name][0][0].partition("+")[0] not in versions
    }
    for name, (has, wants) in wrong.items():
        fix = f"install the one that torch was tested with: pip install '{name}=={wants}'"
        text = f"{name} {has} is installed, but torch wants {wants}"
        yield Finding("torch-pins", "warning", text, fix, facts={"package": name})
    num_there = sum(name in there for name in wanted)
    if num_there and not wrong:
        text = f"{counted(num_there, 'package')} that torch wants in one version fit"
        yield Finding("torch-pins", "ok", text)


def _paths(machine: Machine, facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Libraries of the system or of a module that would be loaded, or are, instead of torch's own."""
    homes = tuple(facts.get("homes") or ())
    loaded = {name: path for name, path in (facts.get("libraries") or {}).items() if not path.startswith(homes)}
    for name, path in loaded.items():
        text = f"torch uses {name} of {path}, not the one that it came with"
        fix = "unload the module that brings it, or take its folder out of LD_LIBRARY_PATH, unless it is meant"
        yield Finding("library-path", "warning", text, fix)
    for folder in filter(None, machine.environ.get("LD_LIBRARY_PATH", "").split(":")):
        names = sorted({path.name.partition(".so")[0] for kind in _IN_THE_WAY for path in Path(folder).glob(kind)})
        names = [name for name in names if name not in loaded]
        if names:
            text = f"LD_LIBRARY_PATH has {', '.join(names)} in {folder}, which go before torch's own"
            fix = "unload the module that sets it, or unset LD_LIBRARY_PATH, unless it is meant"
            yield Finding("library-path", "warning", text, fix)
    if machine.environ.get("LD_PRELOAD"):
        text = f"LD_PRELOAD={machine.environ['LD_PRELOAD']} is loaded into every process"
        yield Finding("library-path", "note", text)


def _cudnn(number: int) -> str:
    """cuDNN's one number as people write it; release 9 gave the minor version a second digit."""
    step = 10_000 if number >= 90_000 else 1_000
    return f"{number // step}.{number % step // 100}.{number % 100}"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


_GLOO_FIX = "check that the interface lo is up (ip link set lo up) and that nothing forbids sockets here"
_NCCL_FIX = "run again with NCCL_DEBUG=INFO, which says which part fails; see the findings on the GPUs and libraries"


def check_backends(machine: Machine) -> Iterator[Finding]:
    """One finding a backend."""
    facts = machine.torch()
    if "error" in facts:
        yield Finding("backends", "note", "not tried: torch cannot be imported")
        return
    has = facts["backends"]
    if facts["gloo_error"] or not has["gloo"]:
        why = facts["gloo_error"] or "this torch is built without it"
        fix = _GLOO_FIX if has["gloo"] else "install a torch that has it: all of pytorch.org's do"
        yield Finding("gloo", "error", f"Gloo does not work: {why}", fix)
    else:
        yield Finding("gloo", "ok", "Gloo works: a group of one process on the loopback address sums")
    if facts["nccl_error"]:
        text = f"NCCL does not work: {facts['nccl_error']}"
        yield Finding("nccl", "error", text, _NCCL_FIX)
    elif facts["has_tried_nccl"]:
        yield Finding("nccl", "ok", f"NCCL {facts.get('nccl')} works: one process sums on a GPU")
    elif has["nccl"]:
        yield Finding("nccl", "note", "NCCL is there, but no GPU that it could use")
    elif facts["num_gpus"]:
        fix = "install a torch that has it: all of pytorch.org's for Linux and CUDA do"
        yield Finding("nccl", "error", "GPUs, but a torch that is built without NCCL", fix)
    else:
        yield Finding("nccl", "ok", "no NCCL, and no GPU that needs it")


_WATCHED = ("libnccl", "libcudnn.", "libcudart", "libcublas.")


def gather() -> dict[str, Any]:
    """Versions, devices and backends of torch, each tried; `error` where torch cannot be imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    began_s = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            import torch
            import torch.distributed as dist
        except Exception as error:  # whatever goes wrong is what was asked for
            return {"error": f"torch cannot be imported: {_in_one_line(error)}"}
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
        return _in_one_line(error)
    return None


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


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
