"""One machine: its network, its limits (files, memory, cores) and its file systems.

The storage check writes at most 64 MB and a few small files into a temporary folder, and deletes them.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import os
import re
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import psutil

from stormo.doctor.finding import Fact, Finding, Level
from stormo.errors import StormoError, pluralize
from stormo.launch.address import resolve
from stormo.launch.rank_info import host_name
from stormo.system.hardware import NODE_SLICES, Gpu, num_cores, visible_gpus
from stormo.telemetry.text import format_bytes

_NVIDIA, _DISPLAY = "0x10de", "0x03"  # PCI vendor, and the PCI class of displays and GPUs


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The machine that is checked; tests replace each way to look at it."""

    root: Path = Path("/")  # of /proc, /sys, /dev and /etc
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    runs_folder: Path = Path("runs")
    data_folder: Path = Path("~/.cache/stormo")
    temp_folder: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    load: Callable[[str], Any] = importlib.import_module  # imports NVML
    gpus: Callable[[], list[Gpu]] = visible_gpus  # as the CUDA driver lists them
    torch: Callable[[], Mapping[str, Any]] = dict  # see `gpus.torch_facts`
    statvfs: Callable[[Path], os.statvfs_result] = os.statvfs
    limit: Callable[[int], tuple[int, int]] = resource.getrlimit
    cores: Callable[[], int] = num_cores
    memory: Callable[[], Any] = psutil.virtual_memory
    progress: Callable[[str], None] = lambda _: None  # called with what is checked next, which may never answer

    def text(self, path: str) -> str | None:
        """The text of a small file; None where it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def number(self, path: str) -> int | None:
        """The number in a file; None where there is none."""
        try:
            return int(self.text(path) or "")
        except ValueError:
            return None

    def num_nvidia_gpus(self) -> int:
        """NVIDIA's GPUs on the PCI bus, with or without a driver."""
        devices = [f"sys/bus/pci/devices/{path.name}" for path in self.root.glob("sys/bus/pci/devices/*")]
        displays = [device for device in devices if (self.text(f"{device}/class") or "").startswith(_DISPLAY)]
        return sum(self.text(f"{device}/vendor") == _NVIDIA for device in displays)


def existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists: a folder made later is on the same file system."""
    for one in (folder, *folder.parents):
        with contextlib.suppress(OSError):  # a parent that this user may not read
            if one.is_dir():
                return one
    return Path("/")


def obstacle(folder: Path) -> Path | None:
    """What keeps a folder from being made: a file of its name, or a dangling link."""
    there = existing(folder)
    inner = next((one for one in (folder, *folder.parents) if one.parent == there and one != there), None)
    return inner if inner is not None and os.path.lexists(inner) else None


_SLOW_MBIT = 10_000
_SMALLEST_MTU = 1280  # the least that IPv6 allows
_ACTIVE = "ACTIVE"
_SLOWING_VARIABLES = {
    "NCCL_P2P_DISABLE": "GPUs exchange through host memory instead of NVLink or PCIe",
    "NCCL_SHM_DISABLE": "GPUs of one node exchange over the network instead of shared memory",
    "NCCL_IB_DISABLE": "NCCL uses TCP instead of InfiniBand or RoCE",
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel",
}


def check_network(
    machine: Machine, find: Callable[[str], list[str]] = resolve, name: Callable[[], str] = host_name
) -> Iterator[Finding]:
    """Interfaces, InfiniBand, this host's name, and the variables of Gloo and NCCL; nothing is sent."""
    cards = _network_cards(machine)
    yield from _check_cards(machine, cards)
    ports = _infiniband_ports(machine)
    yield from _check_infiniband(machine, ports)
    yield _check_host_name(find, name())
    yield from _check_socket_variables(machine, set(cards))
    has_infiniband = any(port.state == _ACTIVE for port in ports)
    for variable, effect in _SLOWING_VARIABLES.items():
        if machine.environ.get(variable, "0") in ("", "0"):
            continue
        if variable == "NCCL_IB_DISABLE" and NODE_SLICES in machine.environ:
            continue  # set by stormo itself: slices of one GPU are joined over sockets
        if variable == "NCCL_IB_DISABLE" and not has_infiniband:
            yield Finding("variables", "note", f"{variable} is set: {effect}")
            continue
        yield Finding("variables", "warning", f"{variable} is set: {effect}", f"unset {variable}, unless it is meant")
    if machine.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        text = "TORCH_DISTRIBUTED_DEBUG=DETAIL: every collective is first checked between all workers, which is slow"
        yield Finding("variables", "warning", text, "unset it for real runs")


class _Card(NamedTuple):
    is_up: bool
    speed_mbit: int  # 0 where it is not known
    mtu: int


def _network_cards(machine: Machine) -> dict[str, _Card]:
    """The network interfaces, by name; psutil would ask their drivers, of which some refuse."""
    found = {}
    for path in sorted(machine.root.glob("sys/class/net/*/mtu")):
        folder = path.parent
        is_up = int(machine.text(f"{folder}/flags") or "0", 16) & 1 and machine.text(f"{folder}/operstate") != "down"
        speed_mbit = max(machine.number(f"{folder}/speed") or 0, 0)
        found[folder.name] = _Card(bool(is_up), speed_mbit, machine.number(str(path)) or 0)
    return found


def _check_cards(machine: Machine, cards: Mapping[str, _Card]) -> Iterator[Finding]:
    up = {name: card for name, card in cards.items() if card.is_up}
    if up.pop("lo", None) is None:
        fix = "bring it up: ip link set lo up; workers of one node connect over it"
        yield Finding("loopback", "error", "the interface lo is not up", fix)
    routes = [line.split() for line in (machine.text("proc/net/route") or "").splitlines()[1:]]
    default = next((route[0] for route in routes if len(route) > 7 and route[1] == route[7] == "00000000"), None)
    virtual = machine.root / "sys/devices/virtual/net"
    physical = {name: card for name, card in up.items() if name == default or not (virtual / name).exists()} or up
    if not physical:
        yield Finding("network-card", "note", "no network card is up: only jobs of one node can run")
    for name, card in sorted(physical.items()):
        speed = f"{card.speed_mbit / 1000:g} Gbit/s" if card.speed_mbit else "speed unknown"
        text = f"{name}: {speed}, MTU {card.mtu}" + (", default route" if name == default else "")
        facts = {"card": name, "speed_mbit_per_s": card.speed_mbit or None, "mtu": card.mtu}
        if card.mtu < _SMALLEST_MTU:
            fix = f"raise it: ip link set {name} mtu 1500"
            yield Finding("network-card", "warning", f"{text}: too small", fix, facts=facts)
        elif 0 < card.speed_mbit < _SLOW_MBIT:
            text += f": at most {card.speed_mbit / 8:.0f} MB/s of gradients between nodes"
            yield Finding("network-card", "note", text, facts=facts)
        else:
            yield Finding("network-card", "ok", text, facts=facts)


class _Port(NamedTuple):
    name: str
    state: str
    physical_state: str
    rate: str
    gbit: float


def _infiniband_ports(machine: Machine) -> list[_Port]:
    found = []
    for path in sorted(machine.root.glob("sys/class/infiniband/*/ports/*")):
        state, physical_state, rate = (machine.text(f"{path}/{file}") or "" for file in ("state", "phys_state", "rate"))
        name, number = f"{path.parents[1].name} port {path.name}", re.match(r"[\d.]+", rate)
        words = state.rpartition(" ")[2], physical_state.partition(": ")[2], rate.replace("Gb/sec", "Gbit/s")
        found.append(_Port(name, *words, float(number[0]) if number else 0.0))
    return found


def _check_infiniband(machine: Machine, ports: list[_Port]) -> Iterator[Finding]:
    active = [port for port in ports if port.state == _ACTIVE]
    best = max((port.gbit for port in active), default=0.0)
    for port in ports:
        facts: dict[str, Fact] = {"port": port.name, "state": port.state, "gbit_per_s": port.gbit}
        if port.state != _ACTIVE:
            text = f"{port.name}: {port.state or 'unknown state'} ({port.physical_state or 'unknown physical state'})"
            fix = "check its cable, its switch and the subnet manager (ibstat, ibdiagnet)"
            level: Level = "note" if active else "warning"  # often some of many ports have no cable
            yield Finding("infiniband", level, text, fix, facts=facts)
        elif port.gbit < best:
            text = f"{port.name}: {port.rate}, but another port of this node has {best:g} Gbit/s"
            fix = "check its cable: a link that trained with fewer lanes slows every exchange"
            yield Finding("infiniband", "warning", text, fix, facts=facts)
        else:
            yield Finding("infiniband", "ok", f"{port.name}: {port.rate}, active", facts=facts)
    if active and not list(machine.root.glob("dev/infiniband/uverbs*")):
        text = f"{pluralize(len(active), 'active port')}, but no /dev/infiniband/uverbs*: NCCL falls back to TCP"
        fix = "load the module ib_uverbs; in a container give it /dev/infiniband (docker: --device /dev/infiniband)"
        yield Finding("infiniband", "warning", text, fix)


def _check_host_name(find: Callable[[str], list[str]], name: str) -> Finding:
    try:
        numbers = find(name)
    except StormoError:
        text = f"this host's name, {name}, has no address"
        fix = f"enter it in DNS or in /etc/hosts, or give --master-addr a number instead of {name}"
        return Finding("host-name", "warning", text, fix, facts={"host": name})
    facts = {"host": name, "addresses": " ".join(numbers)}
    if all(ipaddress.ip_address(number).is_loopback for number in numbers):
        text = f"this host's name, {name}, is {numbers[0]}, which no other machine can reach"
        fix = f"give {name} its outer address in /etc/hosts; until then name node 0 by its number (--master-addr)"
        return Finding("host-name", "warning", text, fix, facts=facts)
    return Finding("host-name", "ok", f"{name} is {numbers[0]}", facts=facts)


def _check_socket_variables(machine: Machine, names: set[str]) -> Iterator[Finding]:
    """An interface that a variable names must exist, or no worker finds the others."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = machine.environ.get(variable)
        if not value:
            continue
        missing = _missing_interfaces(value, names, is_nccl=variable.startswith("NCCL"))
        if missing:
            text = f"{variable}={value} names {missing}, which is no network interface of this machine"
            fix = f"unset {variable}, or name one of: {', '.join(sorted(names)) or 'there is none'}"
            yield Finding("socket-card", "error", text, fix)
        else:
            yield Finding("socket-card", "ok", f"{variable}={value}")


def _missing_interfaces(value: str, names: set[str], *, is_nccl: bool) -> str:
    """What of the value matches no interface; NCCL takes prefixes of names, = for whole names, ^ for all but these."""
    if is_nccl and value.startswith("^"):
        return "" if any(not name.startswith(tuple(value.lstrip("^=").split(","))) for name in names) else value
    is_exact = not is_nccl or value.startswith("=")
    wanted = [entry.partition(":")[0] for entry in value.lstrip("=").split(",") if entry]
    matches = {entry: entry in names if is_exact else any(n.startswith(entry) for n in names) for entry in wanted}
    if is_nccl:  # uses whatever of a list is there
        return "" if any(matches.values()) else value
    return ", ".join(entry for entry, is_there in matches.items() if not is_there)


_ENOUGH_FILES = 4096
_ENOUGH_PROCESSES = 4096
_ENOUGH_SHARED_BYTES = 1 << 30  # Docker gives 64 MiB, which a few loader processes fill
_LOW_MEMORY = 0.1  # of what there is
_NO_LIMIT_V1 = 1 << 60  # version 1 of cgroups writes a huge number for "no limit"


def check_limits(machine: Machine) -> Iterator[Finding]:
    """Each limit, and what would run into it."""
    for check in (_open_files, _locked_memory, _processes, _shared_memory, _memory, _cores):
        yield check(machine)


def _open_files(machine: Machine) -> Finding:
    soft, hard = (_finite(limit) for limit in machine.limit(resource.RLIMIT_NOFILE))
    facts = {"open_files": soft, "open_files_hard": hard}
    if soft is None or soft >= _ENOUGH_FILES:
        number = "any number of" if soft is None else soft
        return Finding("open-files", "ok", f"{number} open files a process", facts=facts)
    fix = f"ulimit -n {_ENOUGH_FILES} before the command"
    if hard is not None and hard < _ENOUGH_FILES:
        fix = "an administrator raises nofile in /etc/security/limits.conf (Slurm: LimitNOFILE of slurmd)"
    text = f"{soft} open files a process: loaders with many workers need more"
    return Finding("open-files", "warning" if soft < 1024 else "note", text, fix, facts=facts)


def _locked_memory(machine: Machine) -> Finding:
    soft = _finite(machine.limit(resource.RLIMIT_MEMLOCK)[0])
    facts = {"locked_bytes": soft}
    if soft is None:
        return Finding("locked-memory", "ok", "no limit on locked memory", facts=facts)
    text = f"{format_bytes(soft)} of locked memory"
    if not any(machine.root.glob("sys/class/infiniband/*")):
        return Finding("locked-memory", "ok", f"{text}: enough without InfiniBand", facts=facts)
    fix = "ulimit -l unlimited; an administrator sets memlock unlimited in limits.conf (Slurm: LimitMEMLOCK=infinity)"
    text += ": RDMA over InfiniBand registers far more, and NCCL fails without it"
    return Finding("locked-memory", "error", text, fix, facts=facts)


def _processes(machine: Machine) -> Finding:
    soft = _finite(machine.limit(resource.RLIMIT_NPROC)[0])
    most = _cgroup_number(machine, "pids.max", "pids/pids.max")
    least = min([value for value in (soft, most) if value is not None], default=None)
    facts = {"processes": least}
    text = f"{'any number of' if least is None else least} processes and threads"
    if least is None or least >= _ENOUGH_PROCESSES:
        return Finding("processes", "ok", text, facts=facts)
    fix = "ulimit -u, or the pids limit of the container (docker: --pids-limit), must be raised"
    return Finding("processes", "warning", f"{text}: workers, loaders and their threads may not fit", fix, facts=facts)


def _shared_memory(machine: Machine) -> Finding:
    try:
        found = machine.statvfs(machine.root / "dev/shm")
    except OSError as error:
        text = f"/dev/shm, where loaders put their batches, cannot be used ({error.strerror})"
        return Finding("shared-memory", "error", text, "mount a tmpfs at /dev/shm")
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    facts = {"total_bytes": total, "free_bytes": free}
    if free >= _ENOUGH_SHARED_BYTES:
        return Finding("shared-memory", "ok", f"{format_bytes(free)} free in /dev/shm", facts=facts)
    return Finding(
        "shared-memory",
        "warning",
        f"{format_bytes(free)} of {format_bytes(total)} free in /dev/shm, where loaders put their batches",
        "docker: --ipc=host or --shm-size=16g; Kubernetes: an emptyDir with medium Memory at /dev/shm; "
        "else delete what is left there, or set --loader-workers 0",
        facts=facts,
    )


def _memory(machine: Machine) -> Finding:
    memory = machine.memory()
    allowed = _cgroup_number(machine, "memory.max", "memory/memory.limit_in_bytes")
    facts = {"total_bytes": memory.total, "available_bytes": memory.available, "allowed_bytes": allowed}
    if allowed is not None and allowed < memory.total:
        text = f"this job may use {format_bytes(allowed)} of the machine's {format_bytes(memory.total)}"
        return Finding("memory", "note", text, facts=facts)
    text = f"{format_bytes(memory.available)} of {format_bytes(memory.total)} memory available"
    if memory.available >= _LOW_MEMORY * memory.total:
        return Finding("memory", "ok", text, facts=facts)
    return Finding("memory", "warning", text, "end what uses it (top -o %MEM), or choose another machine", facts=facts)


def _cores(machine: Machine) -> Finding:
    cores, all_cores = machine.cores(), os.cpu_count() or machine.cores()
    quota = _core_quota(machine)
    threads = machine.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    facts = {"cores": cores, "all_cores": all_cores, "core_quota": quota, "omp_num_threads": threads or None}
    text, fix = f"{cores} of {pluralize(all_cores, 'core')}", ""
    if quota is not None and quota < cores:
        text += f", but a quota of {quota:g}"
        fix = f"set OMP_NUM_THREADS={max(int(quota), 1)}: the kernel throttles more threads"
    elif threads.isdecimal() and int(threads) > cores:
        text += f", but OMP_NUM_THREADS={threads}"
        fix = f"set OMP_NUM_THREADS to {cores} at most, or unset it: stormo divides the cores among its workers"
    elif cores == 1 and all_cores > 4:
        fix = "ask the scheduler for more (Slurm: --cpus-per-task): loaders need cores beside the workers"
    elif threads:
        text += f", OMP_NUM_THREADS={threads}"
    return Finding("cores", "warning" if fix else "ok", text, fix, facts=facts)


def _cgroup_number(machine: Machine, name: str, name_v1: str) -> int | None:
    """The tightest limit of this process's control groups; None where there is none."""
    numbers = [machine.number(file) for file in _cgroup_files(machine, name, name_v1)]
    return min((number for number in numbers if number is not None and number < _NO_LIMIT_V1), default=None)


def _core_quota(machine: Machine) -> float | None:
    found = []
    for file in _cgroup_files(machine, "cpu.max", "cpu/cpu.cfs_quota_us"):
        words = (machine.text(file) or "").split()
        if len(words) == 1:
            words.append(machine.text(file.replace("quota", "period")) or "")
        if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]):
            found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


def _cgroup_files(machine: Machine, name: str, name_v1: str) -> Iterator[str]:
    """A file of this process's control group and of all around it, in both versions of the hierarchy."""
    controller, _, file_v1 = name_v1.partition("/")
    for line in (machine.text("proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, file = "sys/fs/cgroup", name
        elif controller in controllers.split(","):
            root, file = f"sys/fs/cgroup/{controllers}", file_v1
            if not (machine.root / root).is_dir():
                root = f"sys/fs/cgroup/{controller}"
        else:
            continue
        inner = PurePosixPath(path.lstrip("/"))
        for folder in (inner, *inner.parents):
            yield str(Path(root) / folder / file)


def _finite(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


_NETWORK = (
    *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "smbfs", "glusterfs", "afs", "9p", "virtiofs"),
    *("wekafs", "panfs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.beegfs", "fuse.juicefs"),
)
_FILE_BYTES, _BLOCK_BYTES = 64 << 20, 4 << 20
_NUM_SMALL = 20
_LONGEST_S = 1.0  # for each of the large and the small files
_ROOM = 4  # times the file must be free
_LOW_BYTES = 5e9
_SLOW_BYTES_PER_S = 50e6
_SLOW_SMALL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What a folder was measured to do."""

    write_bytes_per_s: float  # with fsync
    read_bytes_per_s: float
    small_s: float  # to write a small file with fsync and to rename it


def check_storage(machine: Machine) -> Iterator[Finding]:
    """The folders for runs, data and temporary files."""
    for name, folder in (("runs", machine.runs_folder), ("data", machine.data_folder), ("temp", machine.temp_folder)):
        machine.progress(str(folder))
        for finding in _check_folder(machine, name, folder):
            yield replace(finding, check=f"storage-{name}")


def _check_folder(machine: Machine, name: str, asked: Path) -> Iterator[Finding]:
    try:
        path = asked.expanduser().absolute()
    except RuntimeError:
        text = f"{asked}: this user has no home folder"
        yield Finding("", "warning", text, "set STORMO_DATA to a folder for data")
        return
    if (file := obstacle(path)) is not None:
        text = f"{asked} cannot be made: {file} is no folder"
        yield Finding("", "error", text, "choose another folder, or move that away")
        return
    folder = existing(path)
    kind, room = _file_system(machine, folder), machine.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    facts: dict[str, Fact] = {
        "folder": str(asked),
        "file_system": kind,
        "is_network": kind in _NETWORK,
        "free_bytes": free,
        "free_inodes": room.f_favail if room.f_files else None,
    }
    what = f"{asked} ({kind}{', over the network' if kind in _NETWORK else ''}"
    try:
        speed = _measure_in(folder) if free > _ROOM * _FILE_BYTES else None
    except OSError as error:
        why = "mounted read-only" if room.f_flag & os.ST_RDONLY else f"cannot be written ({error.strerror})"
        if name == "data":
            yield Finding("", "note", f"{what}): {why}; fine if the data are there", facts=facts)
            return
        fix = "choose another folder with --runs-folder" if name == "runs" else "set TMPDIR to a writable folder"
        yield Finding("", "error", f"{what}): {why}", fix, facts=facts)
        return
    yield _judge_speed(name, f"{what}, {format_bytes(free)} free)", speed, facts)
    if free < _LOW_BYTES:
        fix = "make room, or choose another folder: --runs-folder, STORMO_DATA, TMPDIR"
        text = f"{what}): {format_bytes(free)} free, less than a few checkpoints of a large model take"
        yield Finding("", "warning", text, fix, facts=facts)
    if room.f_files and room.f_favail < max(0.01 * room.f_files, 1000):
        fix = "delete small files: no more files can be made, however much space is left"
        yield Finding("", "warning", f"{what}): {room.f_favail} of {room.f_files} files left", fix, facts=facts)
    if name == "runs" and kind in ("tmpfs", "ramfs"):
        fix = "choose a folder on a disk with --runs-folder"
        yield Finding("", "warning", f"{what}): kept in memory, and lost at the next reboot", fix, facts=facts)
    if name == "temp" and room.f_flag & os.ST_NOEXEC:
        fix = "set TMPDIR, TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR to folders from which programs may run"
        yield Finding("", "warning", f"{folder} is mounted noexec: compiled kernels there cannot be loaded", fix)


def _judge_speed(name: str, what: str, speed: Speed | None, facts: dict[str, Fact]) -> Finding:
    if speed is None:
        return Finding("", "note", f"{what}: too little room to measure its speed", facts=facts)
    facts |= {
        "write_bytes_per_s": speed.write_bytes_per_s,
        "read_bytes_per_s": speed.read_bytes_per_s,
        "small_file_s": speed.small_s,
    }
    text = f"{what}: writes {format_bytes(speed.write_bytes_per_s)}/s, reads {format_bytes(speed.read_bytes_per_s)}/s, "
    text += f"{speed.small_s * 1000:.1f} ms a small file"
    if name == "runs" and speed.write_bytes_per_s < _SLOW_BYTES_PER_S:
        fix = "write checkpoints in the background (--async-checkpoint) or less often (--checkpoint-every), "
        fix += "or choose a faster file system with --runs-folder"
        text += f"; a checkpoint of 1 GB takes {1e9 / speed.write_bytes_per_s:.0f} s"
        return Finding("", "warning", text, fix, facts=facts)
    if name == "data" and speed.small_s > _SLOW_SMALL_S:
        fix = "keep data in few large files, or copy them to a local disk first (STORMO_DATA, --task.data-folder)"
        return Finding("", "warning", text, fix, facts=facts)
    return Finding("", "ok", text, facts=facts)


def _measure_in(folder: Path) -> Speed:
    scratch = Path(tempfile.mkdtemp(prefix=".stormo-doctor-", dir=folder))
    try:
        return _measure_speed(scratch)
    finally:
        try:
            shutil.rmtree(scratch, ignore_errors=True)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)  # again, if a signal interrupted the first


def _file_system(machine: Machine, folder: Path) -> str:
    """The type of the file system that holds a folder."""
    real, best, kind = str(folder.resolve()), "", "unknown"
    for line in (machine.text("proc/self/mounts") or "").splitlines():
        fields = line.split()
        if len(fields) < 4:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[1])  # a space is written as \040
        is_parent = real == point or real.startswith(point.rstrip("/") + "/")
        if is_parent and len(point) >= len(best):  # a later mount hides an earlier one at the same point
            best, kind = point, fields[2]
    return kind


def _measure_speed(folder: Path) -> Speed:
    block = os.urandom(_BLOCK_BYTES)  # so that no file system can compress it
    path, num_written, began_s = folder / "large", 0, time.monotonic()
    with path.open("wb", buffering=0) as file:
        num_written += file.write(block)
        os.fsync(file.fileno())
        # As much more as fits into the time at this speed: a slow file system would take a minute for all of it.
        num_more = _LONGEST_S / max(time.monotonic() - began_s, 1e-9)
        for _ in range(min(int(num_more), _FILE_BYTES // _BLOCK_BYTES - 1)):
            num_written += file.write(block)
        os.fsync(file.fileno())
        write_s = time.monotonic() - began_s
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else it is read from memory
    began_s = time.monotonic()
    with path.open("rb", buffering=0) as file:
        while file.read(_BLOCK_BYTES):
            pass
    read_s = time.monotonic() - began_s
    times = []
    first_s = time.monotonic()
    for number in range(_NUM_SMALL):
        began_s = time.monotonic()
        with (folder / f"{number}.new").open("wb") as file:
            file.write(block[:4096])
            file.flush()
            os.fsync(file.fileno())
        (folder / f"{number}.new").rename(folder / str(number))
        times.append(time.monotonic() - began_s)
        if time.monotonic() - first_s > _LONGEST_S:
            break
    return Speed(
        write_bytes_per_s=num_written / max(write_s, 1e-9),
        read_bytes_per_s=num_written / max(read_s, 1e-9),
        small_s=statistics.median(times),
    )
