"""The network: cards and their speed, InfiniBand, the host's own name, and variables that lead traffic astray."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stormo.doctor.finding import Fact, Finding, Level
from stormo.doctor.machine import Machine
from stormo.errors import StormoError, counted
from stormo.launch.address import resolve
from stormo.launch.rank_info import host_name

_SLOW_MBIT = 10_000
_JUMBO_FROM_MBIT = 25_000
_SMALLEST_MTU = 1280  # that IPv6 allows: below, something is wrong
_ACTIVE = "ACTIVE"
_SLOWING = {
    "NCCL_P2P_DISABLE": "GPUs exchange through host memory instead of NVLink or PCIe",
    "NCCL_SHM_DISABLE": "GPUs of one node exchange over the network instead of shared memory",
    "NCCL_IB_DISABLE": "NCCL uses TCP instead of InfiniBand or RoCE",
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
}
_CHOOSING = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Card:
    name: str
    is_up: bool
    is_virtual: bool
    speed_mbit: int | None
    mtu: int | None


def check(
    machine: Machine,
    find: Callable[[str], list[str]] = resolve,
    name: Callable[[], str] = host_name,
) -> Iterator[Finding]:
    """All of it; nothing is sent."""
    cards = _cards(machine)
    yield from _speeds(machine, cards)
    ports = _ports(machine)
    yield from _infiniband(machine, ports)
    yield from _own_name(find, name())
    yield from _chosen_cards(machine, {card.name for card in cards})
    yield from _variables(machine, has_infiniband=any(port.state == _ACTIVE for port in ports))
    yield from _firewall(machine)


def _cards(machine: Machine) -> list[_Card]:
    found = []
    for path in sorted(machine.root.glob("sys/class/net/*")):
        if not path.is_dir():  # /sys/class/net/bonding_masters is a file
            continue
        at = f"sys/class/net/{path.name}"
        speed = machine.number(f"{at}/speed")
        flags = int(machine.text(f"{at}/flags") or "0", 16)
        found.append(
            _Card(
                name=path.name,
                is_up=bool(flags & 1) and machine.text(f"{at}/operstate") != "down",
                is_virtual=(machine.root / "sys/devices/virtual/net" / path.name).exists(),
                speed_mbit=speed if speed is not None and speed > 0 else None,
                mtu=machine.number(f"{at}/mtu"),
            )
        )
    return found


def _speeds(machine: Machine, cards: list[_Card]) -> Iterator[Finding]:
    default = _default_card(machine)
    others = [card for card in cards if card.is_up and card.name != "lo"]
    real = [card for card in others if not card.is_virtual or card.name == default] or others
    if not any(card.name == "lo" and card.is_up for card in cards):
        mend = "bring it up: ip link set lo up; workers of one node meet there"
        yield Finding(check="loopback", level="error", text="the interface lo is not up", mend=mend)
    if not real:
        yield Finding(check="network-card", level="note", text="no network card is up: jobs of one node alone")
    for card in real:
        speed = "speed not told" if card.speed_mbit is None else f"{card.speed_mbit / 1000:g} Gbit/s"
        text = f"{card.name}: {speed}, MTU {card.mtu}" + (", default route" if card.name == default else "")
        facts = {"card": card.name, "speed_mbit_per_s": card.speed_mbit, "mtu": card.mtu}
        if card.mtu is not None and card.mtu < _SMALLEST_MTU:
            mend = f"raise it: ip link set {card.name} mtu 1500"
            yield Finding(check="network-card", level="warning", text=f"{text}: too small", mend=mend, facts=facts)
        elif card.speed_mbit is not None and card.speed_mbit < _SLOW_MBIT:
            text += f": at most {card.speed_mbit / 8:.0f} MB/s of gradients between nodes"
            yield Finding(check="network-card", level="note", text=text, facts=facts)
        elif card.speed_mbit is not None and card.speed_mbit >= _JUMBO_FROM_MBIT and (card.mtu or 9000) < 9000:
            mend = "where switches allow it, an MTU of 9000 costs the processors less; the same on all nodes"
            yield Finding(check="network-card", level="note", text=text, mend=mend, facts=facts)
        else:
            yield Finding(check="network-card", level="ok", text=text, facts=facts)


def _default_card(machine: Machine) -> str | None:
    """The card that the default route leads to."""
    for line in (machine.text("proc/net/route") or "").splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] == "00000000" and fields[7] == "00000000":
            return fields[0]
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Port:
    name: str
    state: str
    physical: str
    rate: str
    gbit: float


def _ports(machine: Machine) -> list[_Port]:
    found = []
    for path in sorted(machine.root.glob("sys/class/infiniband/*/ports/*")):
        at = str(path.relative_to(machine.root))
        rate = machine.text(f"{at}/rate") or ""
        number = re.match(r"[\d.]+", rate)
        found.append(
            _Port(
                name=f"{path.parents[1].name} port {path.name}",
                state=(machine.text(f"{at}/state") or "").rpartition(" ")[2],
                physical=(machine.text(f"{at}/phys_state") or "").partition(": ")[2],
                rate=rate.replace("Gb/sec", "Gbit/s"),
                gbit=float(number[0]) if number else 0.0,
            )
        )
    return found


def _infiniband(machine: Machine, ports: list[_Port]) -> Iterator[Finding]:
    active = [port for port in ports if port.state == _ACTIVE]
    best = max((port.gbit for port in active), default=0.0)
    for port in ports:
        facts: dict[str, Fact] = {"port": port.name, "state": port.state, "gbit_per_s": port.gbit}
        if port.state != _ACTIVE:
            text = f"{port.name}: {port.state or 'no state'} ({port.physical or 'physical state not told'})"
            mend = "see to its cable, its switch and the subnet manager (ibstat, ibdiagnet)"
            level: Level = "note" if active else "warning"  # of many ports some are often left without a cable
            yield Finding(check="infiniband", level=level, text=text, mend=mend, facts=facts)
        elif port.gbit < best:
            text = f"{port.name}: {port.rate}, but another port of this node has {best:g} Gbit/s"
            mend = "look at its cable: a link that trained with fewer lanes slows every exchange"
            yield Finding(check="infiniband", level="warning", text=text, mend=mend, facts=facts)
        else:
            yield Finding(check="infiniband", level="ok", text=f"{port.name}: {port.rate}, active", facts=facts)
    if active and not list(machine.root.glob("dev/infiniband/uverbs*")):
        yield Finding(
            check="infiniband",
            level="warning",
            text=f"{counted(len(active), 'active port')}, but no /dev/infiniband/uverbs*: NCCL falls back on TCP",
            mend="load the module ib_uverbs; in a container give it /dev/infiniband (docker: --device /dev/infiniband)",
        )


def _own_name(find: Callable[[str], list[str]], name: str) -> Iterator[Finding]:
    try:
        numbers = find(name)
    except StormoError:
        text = f"this host's own name, {name}, leads to no address"
        mend = f"enter it in DNS or in /etc/hosts, or give --master-addr a number instead of {name}"
        yield Finding(check="host-name", level="warning", text=text, mend=mend, facts={"host": name})
        return
    facts = {"host": name, "addresses": " ".join(numbers)}
    if all(ipaddress.ip_address(number).is_loopback for number in numbers):
        yield Finding(
            check="host-name",
            level="warning",
            text=f"this host's own name, {name}, leads to {numbers[0]}, where no other machine can come in",
            mend=f"give {name} its outer address in /etc/hosts; until then name node 0 by its number (--master-addr)",
            facts=facts,
        )
    else:
        yield Finding(check="host-name", level="ok", text=f"{name} is {numbers[0]}", facts=facts)


def _chosen_cards(machine: Machine, names: set[str]) -> Iterator[Finding]:
    """Cards that a variable names and that are not there: no worker would find the others."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = machine.environ.get(variable)
        if not value:
            continue
        missing = _missing(value, names, is_nccl=variable.startswith("NCCL"))
        if missing:
            text = f"{variable}={value} names {missing}, which is no network card of this machine"
            mend = f"unset {variable}, or name one of: {', '.join(sorted(names)) or 'none is there'}"
            yield Finding(check="socket-card", level="error", text=text, mend=mend)
        else:
            yield Finding(check="socket-card", level="ok", text=f"{variable}={value}")


def _missing(value: str, names: set[str], *, is_nccl: bool) -> str:
    """What of the value matches no card; NCCL takes beginnings of names, = for whole ones, ^ for all but these."""
    if is_nccl and value.startswith("^"):
        return "" if any(not name.startswith(tuple(value.lstrip("^=").split(","))) for name in names) else value
    is_exact = not is_nccl or value.startswith("=")
    wanted = [entry.partition(":")[0] for entry in value.lstrip("=").split(",") if entry]
    hits = {entry: entry in names if is_exact else any(n.startswith(entry) for n in names) for entry in wanted}
    if is_nccl:  # takes what is there of a list
        return "" if any(hits.values()) else value
    return ", ".join(entry for entry, is_there in hits.items() if not is_there)


def _variables(machine: Machine, *, has_infiniband: bool) -> Iterator[Finding]:
    environ = machine.environ
    for name, effect in _SLOWING.items():
        if environ.get(name, "0") in ("", "0"):
            continue
        is_idle = name == "NCCL_IB_DISABLE" and not has_infiniband
        mend = "" if is_idle else f"unset {name}, unless it works around a fault"
        yield Finding(
            check="variables", level="note" if is_idle else "warning", text=f"{name} is set: {effect}", mend=mend
        )
    chosen = [f"{name}={environ[name]}" for name in _CHOOSING if environ.get(name)]
    if chosen:
        text = f"NCCL's own choice is overruled: {', '.join(chosen)}"
        yield Finding(check="variables", level="note", text=text, mend="unset what was not measured to be faster here")
    if environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        mend = "unset it for real runs"
        text = "TORCH_DISTRIBUTED_DEBUG=DETAIL: every collective is checked between all workers first, which is slow"
        yield Finding(check="variables", level="warning", text=text, mend=mend)
    if (machine.root / "etc/nccl.conf").is_file():
        yield Finding(check="variables", level="note", text="/etc/nccl.conf sets variables of NCCL for all users")


def _firewall(machine: Machine) -> Iterator[Finding]:
    names = {machine.text(str(path.relative_to(machine.root))) for path in machine.root.glob("proc/[0-9]*/comm")}
    found = ["firewalld"] if "firewalld" in names else []
    if re.search(r"^ENABLED=yes", machine.text("etc/ufw/ufw.conf") or "", re.MULTILINE):
        found.append("ufw")
    if found:
        mend = "let nodes of the cluster reach each other on all ports above 1023; stormo doctor --num-nodes tries them"
        text = f"a firewall is on ({', '.join(found)})"
        yield Finding(check="firewall", level="note", text=text, mend=mend)
