"""`stormo doctor --slices`: what each GPU can be cut into (MIG), the commands for it, and running them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from stormo.errors import SettingError, pluralize
from stormo.system.nvml import Device, Nvml, NvmlUnavailableError, Profile, open_nvml
from stormo.telemetry.text import format_bytes

Command = list[str]
Run = Callable[[Command], "subprocess.CompletedProcess[str]"]
_LIMIT_S = 120.0


def show_slices(open_library: Callable[[], Nvml] = open_nvml, *, as_document: bool = False) -> str:
    """Every GPU: whether it can be cut, into what, whether it is cut now, and the commands."""
    with _opened("--slices", open_library) as nvml:
        gpus = [(gpu, _slices_of(nvml, gpu)) for gpu in nvml.devices()]
        if not gpus:
            raise SettingError("--slices was set", "NVML lists no GPU", "run it on a machine with NVIDIA GPUs")
        if as_document:
            return json.dumps([_as_json(gpu, slices) for gpu, slices in gpus], indent=2) + "\n"
        return "\n".join(_describe(gpu, slices) for gpu, slices in gpus)


def cut(
    count: int,
    open_library: Callable[[], Nvml] = open_nvml,
    run: Run | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> None:
    """Cut the GPU into so many slices, the largest that fit; 0 makes it whole again."""
    asked = f"--slices {count}"
    run = run or _run
    gpu = _chosen(asked, count, open_library)
    if os.geteuid() != 0:
        chosen = f"CUDA_VISIBLE_DEVICES={gpu.index} " if "CUDA_VISIBLE_DEVICES" in os.environ else ""  # sudo drops it
        raise SettingError(f"{asked} was set", "only root may cut a GPU", f"type sudo {chosen}stormo doctor {asked}")
    for destroy in _destroy(gpu):
        say(" ".join(destroy))
        run(destroy)  # fails where nothing is cut; what stays in the way ends the next command
    if not count:
        _do(asked, _mode(gpu, on=False), run, say)
        return
    _do(asked, _mode(gpu, on=True), run, say)
    _do(asked, _create(gpu, _choose(asked, _in_mig_mode(asked, gpu, open_library), count), count), run, say)


def _chosen(asked: str, count: int, open_library: Callable[[], Nvml]) -> Device:
    """The one GPU that is meant; refuses several, one that cannot be cut and one in use."""
    with _opened(asked, open_library) as nvml:
        setting = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = nvml.devices()
        if setting is not None:
            named = {one.index for one in nvml.usable(setting)}
            gpus = [gpu for gpu in gpus if gpu.index in named]
        if len(gpus) != 1:
            why = f"{len(gpus)} GPUs are visible, and one is cut at a time" if gpus else "no GPU is visible"
            why += "" if setting is None else f" (CUDA_VISIBLE_DEVICES={setting})"
            raise SettingError(f"{asked} was set", why, "set CUDA_VISIBLE_DEVICES to the number of one GPU")
        gpu = gpus[0]
        if gpu.is_split() is None:
            fix = "leave it out; A100, A30, H100, H200, GH200 and later ones for data centres can be cut"
            raise SettingError(f"{asked} was set", f"GPU {gpu.index} ({gpu.name}) cannot be cut into slices", fix)
        pids = sorted({pid for one in [gpu, *_slices_of(nvml, gpu)] for pid in one.pids()})
        if pids:
            who = f"{pluralize(len(pids), 'process')} (pid {', '.join(map(str, pids[:4]))})"
            why = f"GPU {gpu.index} is in use by {who}"
            raise SettingError(f"{asked} was set", why, "end what runs there first")
        if count and (profiles := gpu.profiles()):
            _choose(asked, profiles, count)  # before anything is undone
        return gpu


def _in_mig_mode(asked: str, gpu: Device, open_library: Callable[[], Nvml]) -> list[Profile]:
    """The profiles of the GPU, once MIG mode is really on."""
    with _opened(asked, open_library) as nvml:
        found = nvml.find(gpu.uuid)
        if found is None or not found.is_split():
            fix = f"reset it: nvidia-smi -i {gpu.index} --gpu-reset (or reboot), and type the same again"
            raise SettingError(f"{asked} was set", f"GPU {gpu.index} takes MIG mode only at its next reset", fix)
        return found.profiles()


def largest(profiles: Sequence[Profile], count: int) -> Profile | None:
    """The largest profile of which so many fit; of equal ones the plain one, without media engines."""
    fitting = [one for one in profiles if one.most >= count]
    return max(
        fitting, key=lambda one: (one.multiprocessors, one.memory_bytes, not set("+-") & set(one.name)), default=None
    )


def _choose(asked: str, profiles: Sequence[Profile], count: int) -> Profile:
    found = largest(profiles, count)
    if found is None:
        most = max((one.most for one in profiles), default=0)
        raise SettingError(f"{asked} was set", f"at most {most} slices fit", f"set --slices {most} or less")
    return found


def _do(asked: str, command: Command, run: Run, say: Callable[[str], object]) -> None:
    say(" ".join(command))
    done = run(command)
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
        why = f"{' '.join(command)} failed with exit code {done.returncode}: {' '.join(lines)[:400].rstrip('.')}"
        fix = "look at the output above; stormo doctor --slices shows how far it came"
        raise SettingError(f"{asked} was set", why, fix)


def _run(command: Command) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def _mode(gpu: Device, *, on: bool) -> Command:
    return ["nvidia-smi", "-i", str(gpu.index), "-mig", str(int(on))]


def _create(gpu: Device, profile: Profile, count: int) -> Command:
    return ["nvidia-smi", "mig", "-i", str(gpu.index), "-cgi", ",".join([str(profile.id)] * count), "-C"]


def _destroy(gpu: Device) -> list[Command]:
    return [["nvidia-smi", "mig", "-i", str(gpu.index), flag] for flag in ("-dci", "-dgi")]


def _describe(gpu: Device, slices: Sequence[Device]) -> str:
    title = f"GPU {gpu.index} ({gpu.name}): "
    is_split = gpu.is_split()
    if is_split is None:
        return f"{title}cannot be cut into slices\n"
    if slices:
        kinds = Counter(one.name.partition(" MIG ")[2] or one.name for one in slices)
        title += f"cut into {pluralize(len(slices), 'slice')}: " + ", ".join(
            f"{n} × {name}" for name, n in kinds.items()
        )
    else:
        title += (
            "in MIG mode, without a slice: no process can use it" if is_split else "whole; it can be cut into slices"
        )
    lines = [title, *(f"  {one.uuid}" for one in slices)]
    profiles = gpu.profiles()
    lines += [
        f"  {one.name:<14} at most {one.most}, each with {format_bytes(one.memory_bytes)} and "
        f"{pluralize(one.multiprocessors, 'multiprocessor')} (profile {one.id})"
        for one in profiles
    ]
    most = max((one.most for one in profiles), default=0)
    plain = largest(profiles, most) if profiles else None
    if plain is None:
        lines.append(f"  its profiles are listed once MIG mode is on: {' '.join(_mode(gpu, on=True))}")
    elif not slices:
        begin = [] if is_split else [_mode(gpu, on=True)]
        lines.append(f"  cut it into {most}: {_typed([*begin, _create(gpu, plain, most)])}")
    lines.append(f"  undo it: {_typed([*_destroy(gpu), _mode(gpu, on=False)])}")
    lines.append(
        f"  or: stormo doctor --slices {most or 'N'}, and --slices 0 to undo it; both need root and an idle GPU"
    )
    return "\n".join(lines) + "\n"


def _typed(commands: Sequence[Command]) -> str:
    return "; ".join(" ".join(one) for one in commands)


def _as_json(gpu: Device, slices: Sequence[Device]) -> dict[str, Any]:
    is_split = gpu.is_split()
    return {
        "gpu": gpu.index,
        "name": gpu.name,
        "uuid": gpu.uuid,
        "can_be_cut": is_split is not None,
        "mig_mode": bool(is_split),
        "slices": [{"uuid": one.uuid, "name": one.name} for one in slices],
        "profiles": [asdict(one) for one in gpu.profiles()],
    }


def _slices_of(nvml: Nvml, gpu: Device) -> list[Device]:
    return [one for one in nvml.instances() if one.parent_uuid == gpu.uuid]


@contextlib.contextmanager
def _opened(asked: str, open_library: Callable[[], Nvml]) -> Iterator[Nvml]:
    try:
        nvml = open_library()
    except NvmlUnavailableError as error:
        raise SettingError(f"{asked} was set", error.reason, "run it on a machine with NVIDIA GPUs") from None
    try:
        yield nvml
    finally:
        nvml.close()
