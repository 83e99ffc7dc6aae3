"""The network: cards, InfiniBand, names and variables of one machine; and whether the nodes of a job reach one another.

Nodes try their connections before the workers join, where a node that cannot be reached would keep all others waiting.
Each node listens on the address that its workers will use. It greets whoever comes with its name, its clock, and then
with more than one packet holds: a path may let small packets pass and drop large ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from stormo.doctor.finding import Fact, Finding, Level
from stormo.doctor.machine import Machine
from stormo.doctor.measure import Attempt, WorkerInfo
from stormo.errors import SettingError, StormoError, counted
from stormo.launch import RankInfo
from stormo.launch.address import LOOPBACK, interface_towards, listen, resolve, shown
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
        fix = "bring it up: ip link set lo up; workers of one node meet there"
        yield Finding("loopback", "error", "the interface lo is not up", fix)
    if not real:
        yield Finding("network-card", "note", "no network card is up: jobs of one node alone")
    for card in real:
        speed = "speed not told" if card.speed_mbit is None else f"{card.speed_mbit / 1000:g} Gbit/s"
        text = f"{card.name}: {speed}, MTU {card.mtu}" + (", default route" if card.name == default else "")
        facts = {"card": card.name, "speed_mbit_per_s": card.speed_mbit, "mtu": card.mtu}
        if card.mtu is not None and card.mtu < _SMALLEST_MTU:
            fix = f"raise it: ip link set {card.name} mtu 1500"
            yield Finding("network-card", "warning", f"{text}: too small", fix, facts=facts)
        elif card.speed_mbit is not None and card.speed_mbit < _SLOW_MBIT:
            text += f": at most {card.speed_mbit / 8:.0f} MB/s of gradients between nodes"
            yield Finding("network-card", "note", text, facts=facts)
        elif card.speed_mbit is not None and card.speed_mbit >= _JUMBO_FROM_MBIT and (card.mtu or 9000) < 9000:
            fix = "where switches allow it, an MTU of 9000 costs the processors less; the same on all nodes"
            yield Finding("network-card", "note", text, fix, facts=facts)
        else:
            yield Finding("network-card", "ok", text, facts=facts)


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
            fix = "see to its cable, its switch and the subnet manager (ibstat, ibdiagnet)"
            level: Level = "note" if active else "warning"  # of many ports some are often left without a cable
            yield Finding("infiniband", level, text, fix, facts=facts)
        elif port.gbit < best:
            text = f"{port.name}: {port.rate}, but another port of this node has {best:g} Gbit/s"
            fix = "look at its cable: a link that trained with fewer lanes slows every exchange"
            yield Finding("infiniband", "warning", text, fix, facts=facts)
        else:
            yield Finding("infiniband", "ok", f"{port.name}: {port.rate}, active", facts=facts)
    if active and not list(machine.root.glob("dev/infiniband/uverbs*")):
        yield Finding(
            "infiniband",
            "warning",
            f"{counted(len(active), 'active port')}, but no /dev/infiniband/uverbs*: NCCL falls back on TCP",
            "load the module ib_uverbs; in a container give it /dev/infiniband (docker: --device /dev/infiniband)",
        )


def _own_name(find: Callable[[str], list[str]], name: str) -> Iterator[Finding]:
    try:
        numbers = find(name)
    except StormoError:
        text = f"this host's own name, {name}, leads to no address"
        fix = f"enter it in DNS or in /etc/hosts, or give --master-addr a number instead of {name}"
        yield Finding("host-name", "warning", text, fix, facts={"host": name})
        return
    facts = {"host": name, "addresses": " ".join(numbers)}
    if all(ipaddress.ip_address(number).is_loopback for number in numbers):
        yield Finding(
            "host-name",
            "warning",
            f"this host's own name, {name}, leads to {numbers[0]}, where no other machine can come in",
            f"give {name} its outer address in /etc/hosts; until then name node 0 by its number (--master-addr)",
            facts=facts,
        )
    else:
        yield Finding("host-name", "ok", f"{name} is {numbers[0]}", facts=facts)


def _chosen_cards(machine: Machine, names: set[str]) -> Iterator[Finding]:
    """Cards that a variable names and that are not there: no worker would find the others."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = machine.environ.get(variable)
        if not value:
            continue
        missing = _missing(value, names, is_nccl=variable.startswith("NCCL"))
        if missing:
            text = f"{variable}={value} names {missing}, which is no network card of this machine"
            fix = f"unset {variable}, or name one of: {', '.join(sorted(names)) or 'none is there'}"
            yield Finding("socket-card", "error", text, fix)
        else:
            yield Finding("socket-card", "ok", f"{variable}={value}")


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
        fix = "" if is_idle else f"unset {name}, unless it works around a fault"
        yield Finding("variables", "note" if is_idle else "warning", f"{name} is set: {effect}", fix)
    chosen = [f"{name}={environ[name]}" for name in _CHOOSING if environ.get(name)]
    if chosen:
        text = f"NCCL's own choice is overruled: {', '.join(chosen)}"
        yield Finding("variables", "note", text, "unset what was not measured to be faster here")
    if environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        fix = "unset it for real runs"
        text = "TORCH_DISTRIBUTED_DEBUG=DETAIL: every collective is checked between all workers first, which is slow"
        yield Finding("variables", "warning", text, fix)
    if (machine.root / "etc/nccl.conf").is_file():
        yield Finding("variables", "note", "/etc/nccl.conf sets variables of NCCL for all users")


def _firewall(machine: Machine) -> Iterator[Finding]:
    names = {machine.text(str(path.relative_to(machine.root))) for path in machine.root.glob("proc/[0-9]*/comm")}
    found = ["firewalld"] if "firewalld" in names else []
    if re.search(r"^ENABLED=yes", machine.text("etc/ufw/ufw.conf") or "", re.MULTILINE):
        found.append("ufw")
    if found:
        fix = "let nodes of the cluster reach each other on all ports above 1023; stormo doctor --num-nodes tries them"
        text = f"a firewall is on ({', '.join(found)})"
        yield Finding("firewall", "note", text, fix)


OUTCOMES = {
    "timeout": "the connection timed out",
    "refused": "the connection was refused",
    "failed": "no connection can be made",
    "silent": "a connection was opened, but nothing came over it",
    "stranger": "something else answered there",
    "packets": "small packets pass, but large ones do not",
}
OPEN_PORTS = (
    "open all TCP ports between the nodes in their firewalls, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME "
    "to the interface of a network that joins them"
)
_IP = (socket.AF_INET, socket.AF_INET6)
_LARGE_BYTES = 256 * 1024
_NUM_CLOCK_READINGS = 5
_BACKLOG = 4096


def own_address(place: RankInfo, environ: Mapping[str, str] | None = None) -> str:
    """The numeric address under which the other nodes will find this one's workers."""
    if place.all_on_this_host:
        return LOOPBACK
    environ = os.environ if environ is None else environ
    named = environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    interface = named or interface_towards(place.master_addr, place.peer)
    if interface is None:
        return resolve(place.host)[0]  # as Gloo itself would
    found = psutil.net_if_addrs().get(interface, [])
    if named and not found:
        raise SettingError(
            f"GLOO_SOCKET_IFNAME={named} is set",
            f"host {place.host} has no such interface (it has {', '.join(sorted(psutil.net_if_addrs()))})",
            "unset it, or name one of these",
        )
    families = {family: [each.address.partition("%")[0] for each in found if each.family == family] for family in _IP}
    numbers = [number for family in _IP for number in families[family]]
    usable = [number for number in numbers if not ipaddress.ip_address(number).is_link_local]
    return next(iter(usable or numbers), LOOPBACK)


def require_rendezvous(place: RankInfo, limit_s: float = 5.0) -> None:
    """Refuse to wait for a rendezvous that cannot be reached, where it is known to be open already."""
    if place.launcher != "local" or place.node_id == 0:
        return
    try:
        socket.create_connection((place.master_addr, place.master_port), limit_s).close()
    except OSError as error:
        why = OUTCOMES["timeout"] if isinstance(error, TimeoutError) else error.strerror or str(error)
        where = shown(place.master_addr, place.master_port)
        raise StormoError(
            f"preflight: node 0 cannot be reached at {where} from node {place.node_id} ({place.host}): {why}; "
            f"{OPEN_PORTS}."
        ) from None


class Greeter:
    """Listens on one address and, in a thread of its own, greets whoever comes until it is closed."""

    def __init__(self, node: int, address: str) -> None:
        self._node = node
        self._listener = listen(address, 0, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.address, self.port = address, int(self._listener.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._run, name="stormo-greeter", daemon=True)
        self._thread.start()

    def try_all(self, workers: Sequence[WorkerInfo], limit_s: float) -> list[Attempt]:
        """Connect to the leaders of other nodes, all at once."""

        async def attempts() -> list[Attempt]:
            return await asyncio.gather(*(_attempt(self._node, worker, limit_s) for worker in workers))

        return asyncio.run_coroutine_threadsafe(attempts(), self._loop).result()

    def close(self) -> None:
        """Let go of the port and the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(asyncio.start_server(self._greet, sock=self._listener))
        self._loop.run_forever()
        self._server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            writer.write(_line({"node": self._node, "port": self.port}))
            while word := await reader.readline():
                writer.write(_line({"time": time.time()}) if word == b"time\n" else bytes(_LARGE_BYTES))
                await writer.drain()
        writer.close()


async def _attempt(node: int, worker: WorkerInfo, limit_s: float) -> Attempt:
    stage, clock = "timeout", (0.0, 0.0)
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_connection(worker.address, worker.port)
            stage = "silent"
            if _parsed(await reader.readline()) != {"node": worker.node, "port": worker.port}:
                return Attempt(node=node, to=worker.node, outcome="stranger")
            clock = min([await _read_clock(reader, writer) for _ in range(_NUM_CLOCK_READINGS)], key=lambda one: one[1])
            stage = "packets"
            writer.write(b"data\n")
            await reader.readexactly(_LARGE_BYTES)
    except TimeoutError:
        return Attempt(node=node, to=worker.node, outcome=stage, detail=f"after {limit_s:g} s")
    except ValueError:  # a line without an end
        return Attempt(node=node, to=worker.node, outcome="stranger")
    except (OSError, EOFError) as error:
        outcome = "refused" if isinstance(error, ConnectionRefusedError) else "failed"
        number = getattr(error, "errno", None)
        detail = os.strerror(number) if number else "it was closed at the other end"
        return Attempt(node=node, to=worker.node, outcome=outcome, detail=detail)
    finally:
        if writer is not None:
            writer.close()
    return Attempt(node=node, to=worker.node, outcome="ok", clock_ahead_s=clock[0], clock_error_s=clock[1])


async def _read_clock(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[float, float]:
    """How far the other's clock is ahead, and by how much that may be off: half of the way there and back."""
    sent = time.time()
    writer.write(b"time\n")
    theirs = _parsed(await reader.readline()).get("time", float("nan"))
    came = time.time()
    return theirs - (sent + came) / 2, (came - sent) / 2


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _parsed(line: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        found = json.loads(line)
        if isinstance(found, dict):
            return found
    return {}
