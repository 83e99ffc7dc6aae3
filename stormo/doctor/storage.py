"""File systems: where runs, data and temporary files go, and how fast a file like a checkpoint is written there.

Writes at most 64 MB and a few small files into a folder of its own, for two seconds at most, and deletes them.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stormo.doctor.finding import Fact, Finding
from stormo.doctor.folders import existing, obstacle
from stormo.doctor.machine import Machine
from stormo.telemetry.text import format_bytes

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


def check(machine: Machine) -> Iterator[Finding]:
    """The three places that a training writes to or reads from."""
    for name, folder in (("runs", machine.runs_folder), ("data", machine.data_folder), ("temp", machine.temp_folder)):
        machine.tell(str(folder))
        yield from _examine(machine, name, folder)


def _examine(machine: Machine, name: str, asked: Path) -> Iterator[Finding]:
    check = f"storage-{name}"
    try:
        folder = existing(asked.expanduser().absolute())
    except RuntimeError:
        text, mend = f"{asked}: this user has no home folder", "set STORMO_DATA to a folder for data"
        yield Finding(check=check, level="warning", text=text, mend=mend)
        return
    if (in_the_way := obstacle(asked.expanduser().absolute())) is not None:
        text = f"{asked} cannot be made: {in_the_way} is no folder"
        yield Finding(check=check, level="error", text=text, mend="choose another folder, or move that away")
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
        speed = _measure(scratch) if free > _ROOM * _FILE_BYTES else None
    except OSError as error:
        yield _not_writable(check, f"{what})", name, error, is_readonly=is_readonly, facts=facts)
        return
    finally:
        try:
            shutil.rmtree(scratch, ignore_errors=True)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)  # what is left where a signal came in between
    yield from _judge(check, f"{what}, {format_bytes(free)} free)", speed, facts)
    yield from _room(check, name, f"{what})", free, room, facts)
    if name == "temp":
        yield from _temporary(folder, room, machine.environ.get("TMPDIR"))


def _judge(check: str, what: str, speed: Speed | None, facts: dict[str, Fact]) -> Iterator[Finding]:
    if speed is None:
        yield Finding(check=check, level="note", text=f"{what}: too little room to measure its speed", facts=facts)
        return
    facts |= {
        "write_bytes_per_s": speed.write_bytes_per_s,
        "read_bytes_per_s": speed.read_bytes_per_s,
        "small_file_s": speed.small_s,
    }
    text = f"{what}: writes {format_bytes(speed.write_bytes_per_s)}/s, reads {format_bytes(speed.read_bytes_per_s)}/s, "
    text += f"{speed.small_s * 1000:.1f} ms a small file"
    if check == "storage-runs" and speed.write_bytes_per_s < _SLOW_BYTES_PER_S:
        mend = (
            "write checkpoints in the background (--async-checkpoint) or less often (--checkpoint-every), or choose a "
        )
        mend += "faster file system with --runs-folder"
        text += f"; a checkpoint of 1 GB takes {1e9 / speed.write_bytes_per_s:.0f} s"
        yield Finding(check=check, level="warning", text=text, mend=mend, facts=facts)
    elif check == "storage-data" and speed.small_s > _SLOW_SMALL_S:
        mend = "keep data in few large files, or copy them to a local disk first (STORMO_DATA, --task.data-folder)"
        yield Finding(check=check, level="warning", text=text, mend=mend, facts=facts)
    else:
        yield Finding(check=check, level="ok", text=text, facts=facts)


def _room(
    check: str,
    name: str,
    what: str,
    free: int,
    room: os.statvfs_result,
    facts: dict[str, Fact],
) -> Iterator[Finding]:
    if free < _LOW_BYTES:
        mend = "make room, or choose another folder: --runs-folder, STORMO_DATA, TMPDIR"
        text = f"{what}: {format_bytes(free)} free, less than a few checkpoints of a large model take"
        yield Finding(check=check, level="warning", text=text, mend=mend, facts=facts)
    if room.f_files and room.f_favail < max(0.01 * room.f_files, 1000):
        mend = "delete small files nobody needs: there can be no more files, however much space is left"
        text = f"{what}: {room.f_favail} of {room.f_files} files left"
        yield Finding(check=check, level="warning", text=text, mend=mend, facts=facts)
    if name == "runs" and facts["file_system"] in ("tmpfs", "ramfs"):
        mend = "choose a folder on a disk with --runs-folder"
        text = f"{what}: kept in memory, and gone after the next reboot"
        yield Finding(check=check, level="warning", text=text, mend=mend, facts=facts)


def _temporary(folder: Path, room: os.statvfs_result, named: str | None) -> Iterator[Finding]:
    if named and not os.access(named, os.W_OK | os.X_OK):
        text = f"TMPDIR={named} is no folder that can be written: temporary files go to {folder} instead"
        yield Finding(check="storage-temp", level="warning", text=text, mend="make that folder, or unset TMPDIR")
    if room.f_flag & os.ST_NOEXEC:
        mend = "set TMPDIR, TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR to folders from which programs may run"
        text = f"{folder} is mounted noexec: compiled kernels kept there cannot be loaded"
        yield Finding(check="storage-temp", level="warning", text=text, mend=mend)
    if len(str(folder)) > _LONGEST_SOCKET_PATH:
        text = f"{folder} is a long path: sockets of loader processes may not fit into the 107 characters they have"
        yield Finding(
            check="storage-temp", level="warning", text=text, mend="set TMPDIR to a shorter one, such as /tmp"
        )


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
        return Finding(check=check, level="note", text=f"{what}: {why}; fine where the data are there", facts=facts)
    flag = {"runs": "choose another folder with --runs-folder", "temp": "set TMPDIR to a folder that can be written"}
    return Finding(check=check, level="error", text=f"{what}: {why}", mend=flag[name], facts=facts)


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


def _measure(folder: Path) -> Speed:
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
