"""From what was measured across a job to findings: which node, link or device is bad, and what to do about it.

Pure functions. Nodes, links and devices are compared with their likes in the same job, never with a data sheet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from statistics import median_high

from stormo.doctor.finding import Fact, Finding, Level
from stormo.doctor.judge_links import judge_links
from stormo.doctor.judge_reach import judge_clocks, judge_reach
from stormo.doctor.measured import Device, Measured
from stormo.doctor.naming import Names, flops_text
from stormo.telemetry.text import format_bytes

SLOW_DEVICE, VERY_SLOW_DEVICE = 0.8, 0.5  # of the median of its likes
SLOW_PROCESSOR = 0.4  # its cores may be shared with anything
SLOW_COPY = 0.5
TAKEN_MEMORY = 0.9
LITTLE_SPACE_BYTES = 1 << 30
_MUST_BE_EQUAL = ("stormo", "torch", "CUDA", "NCCL")


def judge(measured: Measured) -> list[Finding]:
    """Everything that the measurements say, what is well included."""
    names = Names(measured.spots)
    return [
        *judge_reach(measured.attempts, names),
        *judge_clocks(measured.attempts, names),
        *_judge_versions(measured.devices, names),
        *_judge_folder(measured, names),
        *_judge_devices(measured.devices, names),
        *judge_links(measured, names),
    ]


def _judge_devices(devices: Sequence[Device], names: Names) -> list[Finding]:
    """Wrong results, other bits, slow devices, slow copies and memory that somebody else holds."""
    found = [_wrong(device, names) for device in devices if not device.is_exact]
    for likes in _groups(devices, lambda one: (one.name, one.num_threads, *sorted(one.versions.items()))):
        found += _other_bits(likes, names)
    for likes in _groups(devices, lambda one: one.name):
        found += [*_slow_devices(likes, names), *_slow_copies(likes, names), *_taken_memory(likes, names)]
        speeds = [one.flops_per_s for one in likes]
        text = f"{len(likes)} × {likes[0].name}: {flops_text(min(speeds))} to {flops_text(max(speeds))}"
        facts = {"count": len(likes), "least_flops_per_s": min(speeds), "most_flops_per_s": max(speeds)}
        found.append(Finding(check="devices", level="ok", group="devices", text=text, facts=facts))
    return found


def _wrong(device: Device, names: Names) -> Finding:
    mend = "leave this node out and have the device tested; it would spoil any training"
    return _about(device, names, "arithmetic", "error", f"computes wrong results on {device.name}", mend)


def _other_bits(likes: Sequence[Device], names: Names) -> Iterable[Finding]:
    digests = [one.digest for one in likes]
    usual = _commonest(digests)
    for device in likes:
        if device.digest != usual and device.is_exact:
            text = f"gets other bits from the same product than most of the {len(likes)} × {device.name}"
            mend = "compare its libraries and ECC errors with the others'; runs on it are not repeatable bit by bit"
            yield _about(device, names, "bits", "warning" if device.kind == "cuda" else "note", text, mend)


def _slow_devices(likes: Sequence[Device], names: Names) -> Iterable[Finding]:
    usual, uuids = median_high(one.flops_per_s for one in likes), Counter(one.uuid for one in likes)
    for device in likes:
        share, is_gpu = device.flops_per_s / usual, device.kind == "cuda"
        is_shared = is_gpu and uuids[device.uuid] > 1  # on purpose, and then each slows the other down
        if share >= (SLOW_DEVICE if is_gpu else SLOW_PROCESSOR) or is_shared:
            continue
        text = f"computes at {share:.0%} of the usual speed ({flops_text(device.flops_per_s)}, not {flops_text(usual)})"
        mend = "look at what else runs on that node; all workers wait for it"
        if is_gpu:
            mend = "see nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER there; all workers wait for it"
        level: Level = "error" if is_gpu and share < VERY_SLOW_DEVICE else "warning"
        yield _about(device, names, "device-speed", level, text, mend)


def _slow_copies(likes: Sequence[Device], names: Names) -> Iterable[Finding]:
    for way, field in (("from its host", "copy_in_bytes_per_s"), ("to its host", "copy_out_bytes_per_s")):
        usual = median_high(getattr(one, field) for one in likes)
        for device in likes:
            rate = getattr(device, field)
            if device.kind == "cuda" and rate < SLOW_COPY * usual:
                text = f"copies {way} at {format_bytes(rate)}/s, the others at {format_bytes(usual)}/s"
                mend = "compare PCIe width and generation (nvidia-smi -q -d PCIE) and the cores it is bound to"
                yield _about(device, names, "copy-speed", "warning", text, mend)


def _taken_memory(likes: Sequence[Device], names: Names) -> Iterable[Finding]:
    most = max(one.free_bytes for one in likes)
    for device in likes:
        if device.kind == "cuda" and device.free_bytes < TAKEN_MEMORY * most:
            text = f"has {format_bytes(device.free_bytes)} of memory free, the others up to {format_bytes(most)}"
            mend = "end what else uses that GPU; nvidia-smi lists it"
            yield _about(device, names, "device-memory", "warning", text, mend)


def _judge_versions(devices: Sequence[Device], names: Names) -> list[Finding]:
    found = []
    for kind in dict.fromkeys(kind for device in devices for kind in device.versions):
        values = [device.versions.get(kind, "none") for device in devices]
        usual = _commonest(values)
        odd = [device for device, value in zip(devices, values, strict=True) if value != usual]
        if odd:
            text = f"{kind} is {odd[0].versions.get(kind, 'none')} on {names.ranks([one.rank for one in odd])}"
            level: Level = "error" if kind in _MUST_BE_EQUAL else "warning"
            mend = f"install the same {kind} on every node"
            found.append(_about_job("versions", level, f"{text} and {usual} on the others", mend))
    if devices and not found:
        text = ", ".join(f"{kind} {version}" for kind, version in devices[0].versions.items())
        found.append(_about_job("versions", "ok", f"the same on all workers: {text}"))
    return found


def _judge_folder(measured: Measured, names: Names) -> list[Finding]:
    """Only rank 0 writes, but for checkpoints of a model that is spread, and for the energy of each node."""
    folder, free = measured.runs_folder, measured.runs_folder_free_bytes
    if not folder:
        return []
    if free is None:
        mend = "set --runs-folder to one that can be written"
        why = f" ({measured.runs_folder_error})" if measured.runs_folder_error else ""
        return [_about_job("runs-folder", "error", f"{folder} cannot be written by rank 0{why}", mend)]
    found = []
    if free < LITTLE_SPACE_BYTES:
        mend = "make room, or set --runs-folder to another file system"
        found.append(_about_job("runs-folder", "warning", f"{folder} has {format_bytes(free)} left", mend))
    blind = [device.rank for device in measured.devices if device.sees_runs_folder is False]
    if blind:
        who = names.nodes(names.node_of(rank) for rank in blind)
        text, mend = f"{folder} is not seen on {who}", "set --runs-folder to a file system that all nodes share"
        if measured.needs_shared_folder:
            found.append(_about_job("shared-folder", "error", f"{text}, where parts of checkpoints are written", mend))
        else:
            found.append(_about_job("shared-folder", "note", f"{text}, whose energy would be missing", mend))
    return found or [_about_job("runs-folder", "ok", f"{folder} is seen on all nodes, {format_bytes(free)} free")]


def _about(device: Device, names: Names, check: str, level: Level, text: str, mend: str) -> Finding:
    facts: dict[str, Fact] = {"rank": device.rank, "uuid": device.uuid, "flops_per_s": device.flops_per_s}
    where = names.rank(device.rank)
    return Finding(check=check, level=level, group="devices", where=where, text=text, mend=mend, facts=facts)


def _about_job(check: str, level: Level, text: str, mend: str = "") -> Finding:
    return Finding(check=check, level=level, group="job", text=text, mend=mend)


def _commonest(values: Iterable[str]) -> str:
    return Counter(values).most_common(1)[0][0]


def _groups(devices: Iterable[Device], key: Callable[[Device], Hashable]) -> list[list[Device]]:
    groups: dict[Hashable, list[Device]] = {}
    for device in devices:
        groups.setdefault(key(device), []).append(device)
    return list(groups.values())
