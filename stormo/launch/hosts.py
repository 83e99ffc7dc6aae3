"""`--launcher ssh`: which hosts, and this command started on each of them from here.

A host file is as Open MPI or MPICH writes it. A line names a host, and maybe its slots: `node1 slots=4` or `node1:4`. A
host named twice has the slots of both lines, as in the node file of PBS.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stormo.config.options import without_flags
from stormo.config.schema import CALL_ONLY, TrainConfig
from stormo.errors import SettingError, pluralize
from stormo.launch.address import family_of, is_loopback_name
from stormo.launch.auth import VARIABLE, new_secret
from stormo.launch.environments.slurm import expand_hosts, num_groups
from stormo.launch.rank_info import derived_port, host_name
from stormo.launch.ssh import HostCommand, run_on_hosts
from stormo.system.process import stormo_command

# The variables that the workers on other hosts get too: those of numerical and network libraries, but not the GPU
# numbers of this host.
_PASSED_ON = ("CUDA_", "FI_", "GLOO_", "MKL_", "NCCL_", "OMP_", "PYTHON", "TORCH", "TRITON_", "UCX_")
_PASSED_ON_WHOLE = ("LD_LIBRARY_PATH", "HF_HOME")
_OF_THIS_HOST = ("CUDA_VISIBLE_DEVICES",)
_PASS = "STORMO_PASS"  # and what the user lists there
_HOST = re.compile(r"(?P<name>[^\s:=,]+)(?::(?P<slots>\d+))?")
_ADDRESS = re.compile(r"\[?(?P<name>[0-9A-Fa-f:]*:[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*)\]?")  # IPv6, which holds colons
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
    """The hosts that a scheduler gave to this job; none outside of one."""
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
    """Whether all of them are this machine, by their names."""
    return all(_is_here(host.address) for host in hosts)


def _is_here(name: str) -> bool:
    if _ADDRESS.fullmatch(name) or re.fullmatch(r"[\d.]+", name):
        with contextlib.suppress(OSError), socket.socket(family_of(name)) as probe:
            probe.bind((name, 0))  # only an address of this machine can be bound
            return True
        return False
    return name == "localhost" or name.partition(".")[0] == host_name().partition(".")[0]


def slots_of(hosts: Sequence[ListedHost], num_workers: int | None) -> int | None:
    """Workers on each host: as set, or the slots if all have equally many; None where neither is known."""
    known = [host for host in hosts if host.slots is not None]
    if num_workers is not None:
        for host in known:
            if host.slots is not None and host.slots < num_workers:
                raise SettingError(
                    f"--num-gpus {num_workers} was set",
                    f"host {host.name} is listed with {pluralize(host.slots, 'slot')}",
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


def hosts_of(config: TrainConfig) -> tuple[ListedHost, ...]:
    """The hosts on which to start this command; none where it is for this node alone."""
    workers = config.workers
    if workers.launcher == "auto":
        given = next((name for name in CALL_ONLY[1:] if getattr(workers, name)), None)
        if given is not None and "launcher" not in config.given:
            flag = f"--{given.replace('_', '-')}"
            raise SettingError(f"{flag} was set without --launcher", "it is for ssh", "set --launcher ssh")
        return ()
    if workers.hosts and workers.hostfile:
        raise SettingError("--hosts and --hostfile were set", "one of them names the hosts", "leave one of them out")
    if workers.hosts:
        hosts = parse_hosts(workers.hosts)
    else:
        hosts = read_hostfile(workers.hostfile) if workers.hostfile else hosts_of_job(os.environ)
    if not hosts:
        raise SettingError(
            f"--launcher {workers.launcher} was set", "no host was named", "set --hosts node1,node2 or --hostfile FILE"
        )
    _check_hosts(config, hosts)
    return hosts


def _check_hosts(config: TrainConfig, hosts: tuple[ListedHost, ...]) -> None:
    workers = config.workers
    if "node_id" in config.given:
        raise SettingError(
            f"--node-id {workers.node_id} was set with --launcher {workers.launcher}",
            "every host gets its own",
            "leave it out",
        )
    if "num_nodes" in config.given and workers.num_nodes != len(hosts):
        raise SettingError(
            f"--num-nodes {workers.num_nodes} was set",
            f"{pluralize(len(hosts), 'host')} {'is' if len(hosts) == 1 else 'are'} named",
            "leave it out",
        )
    if "master_addr" not in config.given and is_loopback_name(hosts[0].address) and not all_here(hosts):
        raise SettingError(
            f"the first of {len(hosts)} hosts was named {hosts[0].address}",
            "the others would look for it on themselves",
            "name it as they know it, or set --master-addr",
        )


def on_hosts(config: TrainConfig, hosts: tuple[ListedHost, ...]) -> TrainConfig:
    """The settings as the hosts will see them."""
    if not hosts:
        return config
    num_gpus = slots_of(hosts, config.workers.num_gpus)
    return replace(config, workers=replace(config.workers, num_nodes=len(hosts), num_gpus=num_gpus))


def start_on_hosts(config: TrainConfig, hosts: tuple[ListedHost, ...], verb: str, arguments: Sequence[str]) -> int:
    """Run this command on all hosts; the exit code of the whole."""
    workers = config.workers
    address = workers.master_addr if "master_addr" in config.given else hosts[0].address
    port = workers.master_port or derived_port(f"{hosts[0].name} {os.getpid()} {os.times().elapsed}")
    rest = list(arguments)
    at = rest.index("--") if "--" in rest else len(rest)  # what follows is a script's own
    anew = {*CALL_ONLY, "num_nodes", "num_gpus", "master_addr", "master_port"}  # for this call alone, or for each host
    flags = {f"--{name.replace('_', '-')}": int(name != "print_commands") for name in anew}
    own, theirs = without_flags(rest[:at], flags), rest[at:]
    if config.command.config is not None:
        own += ["--launcher", "auto"]  # the file may say otherwise
    command = [*stormo_command(verb), *own]
    num_gpus = slots_of(hosts, workers.num_gpus)
    added = [] if num_gpus is None else ["--num-gpus", str(num_gpus)]
    added += ["--master-addr", address, "--master-port", str(port), "--num-nodes", str(len(hosts))]
    environ = {name: os.environ[name] for name in _passed_on()}
    commands = [
        HostCommand(
            host=host.name,
            command=(*command, *added, "--node-id", str(node_id), *theirs),
            folder=str(Path.cwd()),
            environ=environ,
        )
        for node_id, host in enumerate(hosts)
    ]
    if workers.print_commands:
        for one in commands:
            print(f"# on {one.host}\n{one.by_hand()}")  # noqa: T201
        return 0
    shared = {VARIABLE: os.environ.get(VARIABLE) or new_secret()}  # through ssh's input, which other users cannot see
    return run_on_hosts([replace(one, environ={**one.environ, **shared}) for one in commands], os.environ)


def _passed_on() -> list[str]:
    more = {*_PASSED_ON_WHOLE, *os.environ.get(_PASS, "").replace(" ", "").split(",")}
    usual = {name for name in os.environ if name.startswith(_PASSED_ON) and name not in _OF_THIS_HOST}
    return sorted(name for name in os.environ if name in usual | more)
