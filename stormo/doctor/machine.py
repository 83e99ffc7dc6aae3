"""The machine that is examined, its limits (files, memory, cores) and its file systems.

The storage check writes at most 64 MB and a few small files into a folder of its own, and deletes them.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from stormo.doctor.finding import Fact, Finding, Level
from stormo.errors import counted
from stormo.system.hardware import Gpu, num_cores, visible_gpus
from stormo.telemetry.text import format_bytes

NVIDIA, AMD = "0x10de", "0x1002"
_DISPLAY = "0x03"  # the PCI class of everything that draws, computing cards with it


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The machine that is examined; every way to look at it can be replaced."""

    root: Path = Path("/")  # of /proc, /sys, /dev and /etc
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    runs_folder: Path = Path("runs")
    data_folder: Path = Path("~/.cache/stormo")
    temp_folder: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    load: Callable[[str], Any] = importlib.import_module  # of NVML
    gpus: Callable[[], list[Gpu]] = visible_gpus  # by the CUDA driver
    torch: Callable[[], Mapping[str, Any]] = dict  # what a process that has imported torch says
    statvfs: Callable[[Path], os.statvfs_result] = os.statvfs
    limit: Callable[[int], tuple[int, int]] = resource.getrlimit
    cores: Callable[[], int] = num_cores
    tell: Callable[[str], None] = lambda _: None  # what is looked at now, which may never answer

    def text(self, path: str) -> str | None:
        """What a small file holds; None where it is absent or for others alone."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def number(self, path: str) -> int | None:
        """The one number that a file holds; None also where it holds something else."""
        try:
            return int(self.text(path) or "")
        except ValueError:
            return None

    def program(self, name: str) -> str | None:
        """Where a program is found, as a shell would."""
        return shutil.which(name, path=self.environ.get("PATH", os.defpath))

    def num_cards(self, vendor: str = NVIDIA) -> int:
        """The GPUs of a vendor on the PCI bus, whether a driver has them or not."""
        found = 0
        for card in self.root.glob("sys/bus/pci/devices/*"):
            kind, maker = ((card / name) for name in ("class", "vendor"))
            try:
                found += kind.read_text().startswith(_DISPLAY) and maker.read_text().strip() == vendor
            except OSError:
                continue
        return found


def existing(folder: Path) -> Path:
    """The folder, or the nearest one around it that is there: what is made later lands on its file system."""
    for one in (folder, *folder.parents):
        with contextlib.suppress(OSError):  # what is around it may be closed to this user
            if one.is_dir():
                return one
    return Path("/")


def obstacle(folder: Path) -> Path | None:
    """What is in the way where a folder is to be made: a file, or a link that leads nowhere."""
    there = existing(folder)
    inner = next((one for one in (folder, *folder.parents) if one.parent == there and one != there), None)
    return inner if inner is not None and os.path.lexists(inner) else None


_ENOUGH_FILES = 4096
_ENOUGH_PROCESSES = 4096
_ENOUGH_SHARED_BYTES = 1 << 30  # Docker gives 64 MiB, which a few loader processes fill
_LOW_MEMORY = 0.1  # of what there is
_NO_LIMIT_V1 = 1 << 60  # version 1 of cgroups writes a huge number for "no limit"


def check_limits(machine: Machine) -> Iterator[Finding]:
    """Each limit, and what would run into it."""
    yield from _open_files(machine)
    yield from _locked_memory(machine)
    yield from _processes(machine)
    yield from _address_space(machine)
    yield from _shared_memory(machine)
    yield from _memory(machine)
    yield from _cores(machine)


def _open_files(machine: Machine) -> Iterator[Finding]:
    soft, hard = machine.limit(resource.RLIMIT_NOFILE)
    facts = {"open_files": _finite(soft), "open_files_hard": _finite(hard)}
    if _less(soft, _ENOUGH_FILES):
        can = f"up to {hard}" if hard != resource.RLIM_INFINITY else "as many as wanted"
        fix = f"ulimit -n {_ENOUGH_FILES} before the command" if not _less(hard, _ENOUGH_FILES) else ""
        fix = fix or "an administrator raises nofile in /etc/security/limits.conf (Slurm: LimitNOFILE of slurmd)"
        level: Level = "warning" if _less(soft, 1024) else "note"
        text = f"{soft} open files a process ({can} on demand): loaders with many workers need more"
        yield Finding("open-files", level, text, fix, facts=facts)
    else:
        yield Finding("open-files", "ok", f"{_shown(soft)} open files a process", facts=facts)


def _locked_memory(machine: Machine) -> Iterator[Finding]:
    soft, _ = machine.limit(resource.RLIMIT_MEMLOCK)
    facts = {"locked_bytes": _finite(soft)}
    if soft == resource.RLIM_INFINITY:
        yield Finding("locked-memory", "ok", "no limit on locked memory", facts=facts)
        return
    text = f"{format_bytes(soft)} of locked memory"
    if any(machine.root.glob("sys/class/infiniband/*")):
        fix = (
            "ulimit -l unlimited; an administrator sets memlock unlimited in limits.conf (Slurm: LimitMEMLOCK=infinity)"
        )
        text += ": RDMA over InfiniBand registers far more, and NCCL fails without it"
        yield Finding("locked-memory", "error", text, fix, facts=facts)
    else:
        text += ": enough without InfiniBand"
        yield Finding("locked-memory", "ok", text, facts=facts)


def _processes(machine: Machine) -> Iterator[Finding]:
    soft, _ = machine.limit(resource.RLIMIT_NPROC)
    most = _cgroup_number(machine, "pids.max", "pids/pids.max")
    least = min([value for value in (_finite(soft), most) if value is not None], default=None)
    if least is not None and least < _ENOUGH_PROCESSES:
        fix = "ulimit -u, or the pids limit of the container (docker: --pids-limit), must be raised"
        text = f"{least} processes and threads: workers, loaders and their threads may not fit"
        yield Finding("processes", "warning", text, fix, facts={"processes": least})
    else:
        text = f"{'any number of' if least is None else least} processes and threads"
        yield Finding("processes", "ok", text, facts={"processes": least})


def _address_space(machine: Machine) -> Iterator[Finding]:
    for name, limit, why in (
        ("address-space", resource.RLIMIT_AS, "CUDA reserves more addresses than there is memory, and fails"),
        ("file-size", resource.RLIMIT_FSIZE, "a larger checkpoint cannot be written"),
    ):
        soft, _ = machine.limit(limit)
        if soft != resource.RLIM_INFINITY:
            flag = "-v" if limit == resource.RLIMIT_AS else "-f"
            text, fix = f"limited to {format_bytes(soft)}: {why}", f"ulimit {flag} unlimited before the command"
            yield Finding(name, "warning", text, fix, facts={"limit_bytes": soft})
    if machine.number("proc/sys/vm/overcommit_memory") == 2:
        text = "the kernel hands out no more memory than it has (vm.overcommit_memory=2)"
        fix = "sysctl vm.overcommit_memory=0: CUDA and forked loaders ask for much that they never touch"
        yield Finding("overcommit", "warning", text, fix)


def _shared_memory(machine: Machine) -> Iterator[Finding]:
    try:
        found = machine.statvfs(machine.root / "dev/shm")
    except OSError as error:
        text = f"/dev/shm cannot be used ({error.strerror}): loaders hand batches over in it"
        yield Finding("shared-memory", "error", text, "mount a tmpfs at /dev/shm")
        return
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    facts = {"total_bytes": total, "free_bytes": free}
    if free < _ENOUGH_SHARED_BYTES:
        yield Finding(
            "shared-memory",
            "warning",
            f"{format_bytes(free)} of {format_bytes(total)} free in /dev/shm: loaders hand batches over in it "
            "until it is full",
            "docker: --ipc=host or --shm-size=16g; Kubernetes: an emptyDir with medium Memory at /dev/shm; "
            "else delete what is left there, or set --loader-workers 0",
            facts=facts,
        )
    else:
        yield Finding("shared-memory", "ok", f"{format_bytes(free)} free in /dev/shm", facts=facts)


def _memory(machine: Machine) -> Iterator[Finding]:
    known = _meminfo(machine)
    total, available = known.get("MemTotal"), known.get("MemAvailable")
    if total is None or available is None:
        return
    allowed = _cgroup_number(machine, "memory.max", "memory/memory.limit_in_bytes")
    facts = {"total_bytes": total, "available_bytes": available, "allowed_bytes": allowed}
    if allowed is not None and allowed < total:
        text = f"this job may use {format_bytes(allowed)} of the machine's {format_bytes(total)}; "
        text += "beyond, the kernel kills it"
        yield Finding("memory", "note", text, facts=facts)
    elif available < _LOW_MEMORY * total:
        fix = "end what uses it (top -o %MEM), or choose another machine"
        text = f"{format_bytes(available)} of {format_bytes(total)} memory available"
        yield Finding("memory", "warning", text, fix, facts=facts)
    else:
        text = f"{format_bytes(available)} of {format_bytes(total)} memory available"
        yield Finding("memory", "ok", text, facts=facts)
    swap, free = known.get("SwapTotal", 0), known.get("SwapFree", 0)
    if swap and free < swap / 2:
        fix = "find what is too large for the memory: a worker that swaps keeps all others waiting"
        text = f"{format_bytes(swap - free)} of {format_bytes(swap)} swap is in use"
        yield Finding("swap", "warning", text, fix, facts={"swap_used_bytes": swap - free})


def _cores(machine: Machine) -> Iterator[Finding]:
    cores, all_cores = machine.cores(), os.cpu_count() or machine.cores()
    quota = _core_quota(machine)
    threads = machine.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    facts = {"cores": cores, "all_cores": all_cores, "core_quota": quota, "omp_num_threads": threads or None}
    text = f"{cores} of {counted(all_cores, 'core')}"
    if quota is not None and quota < cores:
        fix = f"set OMP_NUM_THREADS={max(int(quota), 1)}: more threads are stopped for part of every tenth of a second"
        text += f", but a quota of {quota:g}"
        yield Finding("cores", "warning", text, fix, facts=facts)
    elif threads.isdecimal() and int(threads) > cores:
        fix = f"set OMP_NUM_THREADS to {cores} at most, or unset it: stormo divides the cores among its workers"
        text += f", but OMP_NUM_THREADS={threads}"
        yield Finding("cores", "warning", text, fix, facts=facts)
    elif cores == 1 and all_cores > 4:
        fix = "ask the scheduler for more (Slurm: --cpus-per-task): loaders need cores beside the workers"
        yield Finding("cores", "warning", text, fix, facts=facts)
    else:
        text += f", OMP_NUM_THREADS={threads}" if threads else ""
        yield Finding("cores", "ok", text, facts=facts)


def _cgroup_number(machine: Machine, name: str, name_v1: str) -> int | None:
    """The tightest limit of this process's control groups; None where there is none."""
    found = []
    for file in _cgroup_files(machine, name, name_v1):
        number = machine.number(file)
        if number is not None and number < _NO_LIMIT_V1:
            found.append(number)
    return min(found, default=None)


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


def _meminfo(machine: Machine) -> dict[str, int]:
    found = {}
    for line in (machine.text("proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdecimal():
            found[name] = int(words[0]) * 1024
    return found


def _less(value: int, than: int) -> bool:
    return value != resource.RLIM_INFINITY and value < than


def _finite(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _shown(value: int) -> str:
    return "any number of" if value == resource.RLIM_INFINITY else str(value)


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
_LONGEST_SOCKET_PATH = 60  # a socket's path has 107 characters at most, and processes append their own names


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What a folder was measured to do."""

    write_bytes_per_s: float  # with fsync
    read_bytes_per_s: float
    small_s: float  # to write a small file with fsync and to rename it


def check_storage(machine: Machine) -> Iterator[Finding]:
    """The three places that a training writes to or reads from."""
    for name, folder in (("runs", machine.runs_folder), ("data", machine.data_folder), ("temp", machine.temp_folder)):
        machine.tell(str(folder))
        yield from _examine_folder(machine, name, folder)


def _examine_folder(machine: Machine, name: str, asked: Path) -> Iterator[Finding]:
    check = f"storage-{name}"
    try:
        folder = existing(asked.expanduser().absolute())
    except RuntimeError:
        text, fix = f"{asked}: this user has no home folder", "set STORMO_DATA to a folder for data"
        yield Finding(check, "warning", text, fix)
        return
    if (in_the_way := obstacle(asked.expanduser().absolute())) is not None:
        text = f"{asked} cannot be made: {in_the_way} is no folder"
        yield Finding(check, "error", text, "choose another folder, or move that away")
        return
    kind, is_readonly = _mount_of(machine, folder)
    room = machine.statvfs(folder)
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
        scratch = Path(tempfile.mkdtemp(prefix=".stormo-doctor-", dir=folder))
    except OSError as error:
        yield _not_writable(check, f"{what})", name, error, is_readonly=is_readonly, facts=facts)
        return
    try:
        speed = _measure_speed(scratch) if free > _ROOM * _FILE_BYTES else None
    except OSError as error:
        yield _not_writable(check, f"{what})", name, error, is_readonly=is_readonly, facts=facts)
        return
    finally:
        try:
            shutil.rmtree(scratch, ignore_errors=True)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)  # what is left where a signal came in between
    yield from _judge_speed(check, f"{what}, {format_bytes(free)} free)", speed, facts)
    yield from _room(check, name, f"{what})", free, room, facts)
    if name == "temp":
        yield from _temporary(folder, room, machine.environ.get("TMPDIR"))


def _judge_speed(check: str, what: str, speed: Speed | None, facts: dict[str, Fact]) -> Iterator[Finding]:
    if speed is None:
        yield Finding(check, "note", f"{what}: too little room to measure its speed", facts=facts)
        return
    facts |= {
        "write_bytes_per_s": speed.write_bytes_per_s,
        "read_bytes_per_s": speed.read_bytes_per_s,
        "small_file_s": speed.small_s,
    }
    text = f"{what}: writes {format_bytes(speed.write_bytes_per_s)}/s, reads {format_bytes(speed.read_bytes_per_s)}/s, "
    text += f"{speed.small_s * 1000:.1f} ms a small file"
    if check == "storage-runs" and speed.write_bytes_per_s < _SLOW_BYTES_PER_S:
        fix = (
            "write checkpoints in the background (--async-checkpoint) or less often (--checkpoint-every), or choose a "
        )
        fix += "faster file system with --runs-folder"
        text += f"; a checkpoint of 1 GB takes {1e9 / speed.write_bytes_per_s:.0f} s"
        yield Finding(check, "warning", text, fix, facts=facts)
    elif check == "storage-data" and speed.small_s > _SLOW_SMALL_S:
        fix = "keep data in few large files, or copy them to a local disk first (STORMO_DATA, --task.data-folder)"
        yield Finding(check, "warning", text, fix, facts=facts)
    else:
        yield Finding(check, "ok", text, facts=facts)


def _room(
    check: str,
    name: str,
    what: str,
    free: int,
    room: os.statvfs_result,
    facts: dict[str, Fact],
) -> Iterator[Finding]:
    if free < _LOW_BYTES:
        fix = "make room, or choose another folder: --runs-folder, STORMO_DATA, TMPDIR"
        text = f"{what}: {format_bytes(free)} free, less than a few checkpoints of a large model take"
        yield Finding(check, "warning", text, fix, facts=facts)
    if room.f_files and room.f_favail < max(0.01 * room.f_files, 1000):
        fix = "delete small files nobody needs: there can be no more files, however much space is left"
        text = f"{what}: {room.f_favail} of {room.f_files} files left"
        yield Finding(check, "warning", text, fix, facts=facts)
    if name == "runs" and facts["file_system"] in ("tmpfs", "ramfs"):
        fix = "choose a folder on a disk with --runs-folder"
        text = f"{what}: kept in memory, and gone after the next reboot"
        yield Finding(check, "warning", text, fix, facts=facts)


def _temporary(folder: Path, room: os.statvfs_result, named: str | None) -> Iterator[Finding]:
    if named and not os.access(named, os.W_OK | os.X_OK):
        text = f"TMPDIR={named} is no folder that can be written: temporary files go to {folder} instead"
        yield Finding("storage-temp", "warning", text, "make that folder, or unset TMPDIR")
    if room.f_flag & os.ST_NOEXEC:
        fix = "set TMPDIR, TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR to folders from which programs may run"
        text = f"{folder} is mounted noexec: compiled kernels kept there cannot be loaded"
        yield Finding("storage-temp", "warning", text, fix)
    if len(str(folder)) > _LONGEST_SOCKET_PATH:
        text = f"{folder} is a long path: sockets of loader processes may not fit into the 107 characters they have"
        yield Finding("storage-temp", "warning", text, "set TMPDIR to a shorter one, such as /tmp")


def _not_writable(
    check: str,
    what: str,
    name: str,
    error: OSError,
    *,
    is_readonly: bool,
    facts: dict[str, Fact],
) -> Finding:
    why = "mounted read-only" if is_readonly else f"cannot be written ({error.strerror})"
    if name == "data":
        return Finding(check, "note", f"{what}: {why}; fine where the data are there", facts=facts)
    flag = {"runs": "choose another folder with --runs-folder", "temp": "set TMPDIR to a folder that can be written"}
    return Finding(check, "error", f"{what}: {why}", flag[name], facts=facts)


def _mount_of(machine: Machine, folder: Path) -> tuple[str, bool]:
    """The type of the file system that holds a folder, and whether it is mounted read-only."""
    real, best = str(folder.resolve()), ("", "unknown", False)
    for line in (machine.text("proc/self/mounts") or "").splitlines():
        fields = line.split()
        if len(fields) < 4:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[1])  # a space is written as \040
        is_around = real == point or real.startswith(point.rstrip("/") + "/")
        if is_around and len(point) >= len(best[0]):  # of two at one place the later hides the earlier
            best = (point, fields[2], "ro" in fields[3].split(","))
    return best[1], best[2]


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
