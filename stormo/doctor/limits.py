"""What this process may have: files, locked memory, shared memory, processes, memory and cores of its share."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from stormo.doctor.finding import Finding, Level
from stormo.doctor.machine import Machine
from stormo.errors import counted
from stormo.telemetry.text import format_bytes

_ENOUGH_FILES = 4096
_ENOUGH_PROCESSES = 4096
_ENOUGH_SHARED_BYTES = 1 << 30  # Docker gives 64 MiB, which a few loader processes fill
_LOW_MEMORY = 0.1  # of what there is
_NO_LIMIT_V1 = 1 << 60  # version 1 of cgroups writes a huge number for "no limit"


def check(machine: Machine) -> Iterator[Finding]:
    """Each limit, and what would run into it."""
    yield from _open_files(machine)
    yield from _locked_memory(machine)
    yield from _processes(machine)
    yield from _address_space(machine)
    yield from _shared_memory(machine)
    yield from _memory(machine)
    yield from _cores(machine)
    yield from _governor(machine)


def _open_files(machine: Machine) -> Iterator[Finding]:
    soft, hard = machine.limit(resource.RLIMIT_NOFILE)
    facts = {"open_files": _finite(soft), "open_files_hard": _finite(hard)}
    if _less(soft, _ENOUGH_FILES):
        can = f"up to {hard}" if hard != resource.RLIM_INFINITY else "as many as wanted"
        mend = f"ulimit -n {_ENOUGH_FILES} before the command" if not _less(hard, _ENOUGH_FILES) else ""
        mend = mend or "an administrator raises nofile in /etc/security/limits.conf (Slurm: LimitNOFILE of slurmd)"
        level: Level = "warning" if _less(soft, 1024) else "note"
        text = f"{soft} open files a process ({can} on demand): loaders with many workers need more"
        yield Finding(check="open-files", level=level, text=text, mend=mend, facts=facts)
    else:
        yield Finding(check="open-files", level="ok", text=f"{_shown(soft)} open files a process", facts=facts)


def _locked_memory(machine: Machine) -> Iterator[Finding]:
    soft, _ = machine.limit(resource.RLIMIT_MEMLOCK)
    facts = {"locked_bytes": _finite(soft)}
    if soft == resource.RLIM_INFINITY:
        yield Finding(check="locked-memory", level="ok", text="no limit on locked memory", facts=facts)
        return
    text = f"{format_bytes(soft)} of locked memory"
    if any(machine.root.glob("sys/class/infiniband/*")):
        mend = (
            "ulimit -l unlimited; an administrator sets memlock unlimited in limits.conf (Slurm: LimitMEMLOCK=infinity)"
        )
        text += ": RDMA over InfiniBand registers far more, and NCCL fails without it"
        yield Finding(check="locked-memory", level="error", text=text, mend=mend, facts=facts)
    else:
        text += ": enough without InfiniBand"
        yield Finding(check="locked-memory", level="ok", text=text, facts=facts)


def _processes(machine: Machine) -> Iterator[Finding]:
    soft, _ = machine.limit(resource.RLIMIT_NPROC)
    most = _cgroup_number(machine, "pids.max", "pids/pids.max")
    least = min([value for value in (_finite(soft), most) if value is not None], default=None)
    if least is not None and least < _ENOUGH_PROCESSES:
        mend = "ulimit -u, or the pids limit of the container (docker: --pids-limit), must be raised"
        text = f"{least} processes and threads: workers, loaders and their threads may not fit"
        yield Finding(check="processes", level="warning", text=text, mend=mend, facts={"processes": least})
    else:
        text = f"{'any number of' if least is None else least} processes and threads"
        yield Finding(check="processes", level="ok", text=text, facts={"processes": least})


def _address_space(machine: Machine) -> Iterator[Finding]:
    for name, limit, why in (
        ("address-space", resource.RLIMIT_AS, "CUDA reserves more addresses than there is memory, and fails"),
        ("file-size", resource.RLIMIT_FSIZE, "a larger checkpoint cannot be written"),
    ):
        soft, _ = machine.limit(limit)
        if soft != resource.RLIM_INFINITY:
            flag = "-v" if limit == resource.RLIMIT_AS else "-f"
            text, mend = f"limited to {format_bytes(soft)}: {why}", f"ulimit {flag} unlimited before the command"
            yield Finding(check=name, level="warning", text=text, mend=mend, facts={"limit_bytes": soft})
    if machine.number("proc/sys/vm/overcommit_memory") == 2:
        text = "the kernel hands out no more memory than it has (vm.overcommit_memory=2)"
        mend = "sysctl vm.overcommit_memory=0: CUDA and forked loaders ask for much that they never touch"
        yield Finding(check="overcommit", level="warning", text=text, mend=mend)


def _shared_memory(machine: Machine) -> Iterator[Finding]:
    try:
        found = machine.statvfs(machine.root / "dev/shm")
    except OSError as error:
        text = f"/dev/shm cannot be used ({error.strerror}): loaders hand batches over in it"
        yield Finding(check="shared-memory", level="error", text=text, mend="mount a tmpfs at /dev/shm")
        return
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    facts = {"total_bytes": total, "free_bytes": free}
    if free < _ENOUGH_SHARED_BYTES:
        yield Finding(
            check="shared-memory",
            level="warning",
            text=f"{format_bytes(free)} of {format_bytes(total)} free in /dev/shm: loaders hand batches over in it "
            "until it is full",
            mend="docker: --ipc=host or --shm-size=16g; Kubernetes: an emptyDir with medium Memory at /dev/shm; "
            "else delete what is left there, or set --loader-workers 0",
            facts=facts,
        )
    else:
        yield Finding(check="shared-memory", level="ok", text=f"{format_bytes(free)} free in /dev/shm", facts=facts)


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
        yield Finding(check="memory", level="note", text=text, facts=facts)
    elif available < _LOW_MEMORY * total:
        mend = "end what uses it (top -o %MEM), or choose another machine"
        text = f"{format_bytes(available)} of {format_bytes(total)} memory available"
        yield Finding(check="memory", level="warning", text=text, mend=mend, facts=facts)
    else:
        text = f"{format_bytes(available)} of {format_bytes(total)} memory available"
        yield Finding(check="memory", level="ok", text=text, facts=facts)
    swap, free = known.get("SwapTotal", 0), known.get("SwapFree", 0)
    if swap and free < swap / 2:
        mend = "find what is too large for the memory: a worker that swaps keeps all others waiting"
        text = f"{format_bytes(swap - free)} of {format_bytes(swap)} swap is in use"
        yield Finding(check="swap", level="warning", text=text, mend=mend, facts={"swap_used_bytes": swap - free})


def _cores(machine: Machine) -> Iterator[Finding]:
    cores, all_cores = machine.cores(), os.cpu_count() or machine.cores()
    quota = _core_quota(machine)
    threads = machine.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    facts = {"cores": cores, "all_cores": all_cores, "core_quota": quota, "omp_num_threads": threads or None}
    text = f"{cores} of {counted(all_cores, 'core')}"
    if quota is not None and quota < cores:
        mend = f"set OMP_NUM_THREADS={max(int(quota), 1)}: more threads are stopped for part of every tenth of a second"
        text += f", but a quota of {quota:g}"
        yield Finding(check="cores", level="warning", text=text, mend=mend, facts=facts)
    elif threads.isdecimal() and int(threads) > cores:
        mend = f"set OMP_NUM_THREADS to {cores} at most, or unset it: stormo divides the cores among its workers"
        text += f", but OMP_NUM_THREADS={threads}"
        yield Finding(check="cores", level="warning", text=text, mend=mend, facts=facts)
    elif cores == 1 and all_cores > 4:
        mend = "ask the scheduler for more (Slurm: --cpus-per-task): loaders need cores beside the workers"
        yield Finding(check="cores", level="warning", text=text, mend=mend, facts=facts)
    else:
        text += f", OMP_NUM_THREADS={threads}" if threads else ""
        yield Finding(check="cores", level="ok", text=text, facts=facts)


def _governor(machine: Machine) -> Iterator[Finding]:
    at = "sys/devices/system/cpu/cpufreq/policy0"
    governor, driver = machine.text(f"{at}/scaling_governor"), machine.text(f"{at}/scaling_driver") or ""
    # intel_pstate's and amd_pstate's "powersave" follows the load; that of others stays at the lowest clock.
    if governor == "powersave" and "pstate" not in driver:
        mend = "cpupower frequency-set -g performance (as root)"
        text = f"the governor powersave keeps the processors at their lowest clock ({driver or 'driver not told'})"
        yield Finding(check="governor", level="warning", text=text, mend=mend, facts={"governor": governor})
    elif governor:
        text = f"governor {governor}" + (f" of {driver}" if driver else "")
        yield Finding(check="governor", level="ok", text=text, facts={"governor": governor})


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
