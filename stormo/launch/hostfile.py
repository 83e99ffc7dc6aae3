"""Lists of hosts: a host file as Open MPI or MPICH writes it, a plain list, a flag, or what a scheduler has left.

A line names a host, and maybe its slots: `node1 slots=4` or `node1:4`. A host named twice has the slots of both lines,
as in the node file of PBS.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stormo.errors import SettingError, counted
from stormo.launch.environments.slurm import expand_hosts, num_groups
from stormo.launch.place import host_name

_HOST = re.compile(r"(?P<name>[^\s:=,]+)(?::(?P<slots>\d+))?")
_ADDRESS = re.compile(
    r"\[?(?P<name>[0-9A-Fa-f:]*:[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*)\]?"
)  # of IP 6, which holds colons itself
_COUNT = re.compile(r"slots\s*=\s*(\d+)|max[_-]slots\s*=\s*\d+", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedHost:
    """One host of a list."""

    name: str  # as ssh takes it, maybe user@host
    slots: int | None = None  # workers it has room for; None where the list does not say

    @property
    def address(self) -> str:
        """The host without the user who logs in there."""
        return self.name.rpartition("@")[2]


def read_hostfile(path: str) -> tuple[ListedHost, ...]:
    """The hosts of a file, in its order."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SettingError(f"--hostfile {path} was set", f"it cannot be read ({why})", "check the path") from None
    found = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if text:
            found.append(_parse_line(text, f"line {number} of --hostfile {path}"))
    return _merged(found, f"--hostfile {path}")


def parse_hosts(text: str) -> tuple[ListedHost, ...]:
    """The hosts of a flag: `node1,node2`, `node[1-4]` or `node1:4,node2:4`."""
    names = expand_hosts(text, source=f"--hosts {text} was set", instead="set something like --hosts node1,node[2-4]")
    return _merged([_parse_line(name, f"--hosts {text}") for name in names], f"--hosts {text}")


def hosts_of_job(environ: Mapping[str, str]) -> tuple[ListedHost, ...]:
    """The hosts that a scheduler has given to the job in which this runs; none outside of one."""
    if environ.get("SLURM_JOB_NODELIST"):
        name = "SLURM_JOB_NODELIST"  # of a heterogeneous job that of its first group alone
        groups = [environ.get(f"{name}_HET_GROUP_{group}", "") for group in range(num_groups(environ))]
        text = ",".join(filter(None, groups)) or environ[name]
        names = expand_hosts(text, instead="name the hosts with --hosts")
        return tuple(ListedHost(name=host) for host in names)
    if environ.get("PBS_NODEFILE"):
        return read_hostfile(environ["PBS_NODEFILE"])
    return ()


def _parse_line(text: str, source: str) -> ListedHost:
    name, rest = (*text.split(maxsplit=1), "")[:2]
    match = _ADDRESS.fullmatch(name) or _HOST.fullmatch(name)
    if match is None or match["name"].startswith("-"):  # which ssh would take for an option
        raise _bad_line(source, text)
    slots = match.groupdict().get("slots")
    left = rest
    for count in _COUNT.finditer(rest):
        slots = count[1] or slots
        left = left.replace(count[0], "")
    if left.strip():
        raise _bad_line(source, text)
    if slots is not None and int(slots) < 1:
        raise SettingError(f"{text!r} is in {source}", "a host needs at least one slot", "leave the host out")
    return ListedHost(name=match["name"], slots=None if slots is None else int(slots))


def _bad_line(source: str, text: str) -> SettingError:
    return SettingError(f"{text!r} is in {source}", "it does not name a host", "write node1, node1 slots=4 or node1:4")


def _merged(hosts: Iterable[ListedHost], source: str) -> tuple[ListedHost, ...]:
    merged: dict[str, ListedHost] = {}
    for host in hosts:
        before = merged.get(host.name)
        slots = host.slots if before is None else (before.slots or 1) + (host.slots or 1)
        merged[host.name] = ListedHost(name=host.name, slots=slots)
    if not merged:
        raise SettingError(f"{source} was set", "it names no host", "name one host a line, or use --hosts")
    return tuple(merged.values())


def all_here(hosts: Iterable[ListedHost]) -> bool:
    """Whether all of them are this machine, as far as their names tell."""
    return all(_is_here(host.address) for host in hosts)


def is_loopback_name(name: str) -> bool:
    """Whether a name means, on every machine, that machine itself."""
    return name in ("localhost", "::1") or name.startswith("127.")


def _is_here(name: str) -> bool:
    if _ADDRESS.fullmatch(name) or re.fullmatch(r"[\d.]+", name):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET6 if ":" in name else socket.AF_INET) as probe:
            probe.bind((name, 0))  # only an address of this machine can be bound
            return True
        return False
    return name == "localhost" or name.partition(".")[0] == host_name().partition(".")[0]


def slots_of(hosts: Sequence[ListedHost], num_workers: int | None) -> int | None:
    """Workers on each host: as set, or the slots if all have equally many; None where neither is said."""
    known = [host for host in hosts if host.slots is not None]
    if num_workers is not None:
        for host in known:
            if host.slots is not None and host.slots < num_workers:
                raise SettingError(
                    f"--num-gpus {num_workers} was set",
                    f"host {host.name} is listed with {counted(host.slots, 'slot')}",
                    f"set --num-gpus {host.slots}, or list it with slots={num_workers}",
                )
        return num_workers
    if len({host.slots for host in hosts}) > 1:
        first, other = hosts[0], next(host for host in hosts if host.slots != hosts[0].slots)
        raise SettingError(
            f"the hosts {first.name} and {other.name} are listed with {_said(first)} and {_said(other)}",
            "every host starts equally many workers",
            "set --num-gpus to what each has room for, or list the same slots",
        )
    return known[0].slots if known else None


def _said(host: ListedHost) -> str:
    return "no slots" if host.slots is None else f"slots={host.slots}"
