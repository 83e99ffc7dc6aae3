"""Addresses of this machine: listens on exactly one, never on all, and explains every way in which that fails."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import random
import socket

from stormo.errors import SettingError
from stormo.launch.rank_info import host_name

LOOPBACK = "127.0.0.1"
_SOMEWHERE_ELSE = "192.0.2.1"  # reserved for documentation


def listening_address(master_addr: str, *, all_on_this_host: bool, peer: str = "") -> str:
    """The numeric address under which the others reach this machine; loopback if there are no others.

    `peer` names another host, if one is known: the route to it decides.
    """
    if all_on_this_host:
        return LOOPBACK
    numbers = resolve(master_addr)
    if any(ipaddress.ip_address(number).is_unspecified for number in numbers):
        raise SettingError(
            f"--master-addr {master_addr} was set",
            "it stands for all addresses of a machine and stormo listens on one only",
            "set the name or the address under which the other nodes reach node 0",
        )
    reachable = [number for number in numbers if not is_loopback(number)]
    if reachable:
        return reachable[0]
    if master_addr in numbers or master_addr == "localhost":
        return numbers[0]  # set as a number: several nodes on one machine
    # Many systems map their host name to 127.0.1.1, which no other machine reaches.
    return _address_towards_others(master_addr, peer) or numbers[0]


def resolve(name: str) -> list[str]:
    """The numeric addresses of a host name, in the order the system prefers."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise SettingError(
            f"--master-addr {name} was set",
            f"host {host_name()} cannot find its address ({error})",
            "set the name or the address of node 0 as this machine knows it",
        ) from None
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))


def is_loopback(number: str) -> bool:
    """Whether only this machine can reach the numeric address."""
    address = ipaddress.ip_address(number)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def is_loopback_name(name: str) -> bool:
    """Whether a name means the same machine everywhere."""
    return name in ("localhost", "::1") or name.startswith("127.")


def bind(number: str, port: int, *, backlog: int | None = None) -> socket.socket:
    """A socket bound to one numeric address, which listens if it has a backlog; port 0 lets the system choose."""
    bound = socket.socket(family_of(number), socket.SOCK_STREAM)
    try:
        # Connections of a job that just ended may linger on the port; a live listener still keeps it.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((number, port))
        if backlog is not None:
            bound.listen(backlog)
    except OSError:
        bound.close()
        raise
    return bound


def listen(number: str, port: int, *, backlog: int = 128) -> socket.socket:
    """The same, listening; a `SettingError` says why it cannot."""
    try:
        return bind(number, port, backlog=backlog)
    except OSError as error:
        raise cannot_listen(number, port, error) from None


def family_of(number: str) -> socket.AddressFamily:
    """IPv6 or IPv4."""
    return socket.AF_INET6 if ":" in number else socket.AF_INET


def cannot_listen(number: str, port: int, error: OSError) -> SettingError:
    """Why a socket cannot be bound, and what to set instead."""
    if error.errno == errno.EADDRINUSE:
        return SettingError(
            f"--master-port {port} was set",
            f"another process of this machine already listens on {shown(number, port)}",
            f"set --master-port {_free_port(number)} on every node, or end that process",
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return SettingError(
            f"--master-addr is {number} and this is node 0",
            f"that is not an address of host {host_name()}",
            "set --master-addr to an address of node 0 on every node, or --node-id to this machine's own",
        )
    return SettingError(
        f"--master-addr {number} and --master-port {port} were set",
        f"host {host_name()} cannot listen there ({error.strerror})",
        "set another address or port on every node",
    )


def shown(address: str, port: int) -> str:
    """Address and port as people write them."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _free_port(number: str) -> int:
    # Below the range of outgoing connections, so that it is still free when the user has typed it.
    for port in random.sample(range(10_000, 32_768), 50):
        with contextlib.suppress(OSError), socket.socket(family_of(number), socket.SOCK_STREAM) as probe:
            probe.bind((number, port))
            return port
    return 29_500


def _address_towards_others(master_addr: str, peer: str) -> str | None:
    """This host's address by the route to another host, the default route, or its only network; None without any."""
    with contextlib.suppress(SettingError):
        for number in (*(resolve(peer) if peer else ()), _SOMEWHERE_ELSE):
            own = address_towards(number)
            if own is not None and not is_loopback(own):
                return own
    found = [numbers[0] for numbers in _own_addresses().values() if numbers and ":" not in numbers[0]]
    networks = [number for number in found if not is_loopback(number)]
    if len(networks) > 1:
        raise SettingError(
            f"--master-addr {master_addr} was set",
            f"on host {host_name()} it leads to a loopback address, and the others may come to any of "
            + ", ".join(networks),
            "set it to the one under which they reach this host",
        )
    return networks[0] if networks else None


def address_towards(number: str) -> str | None:
    """The address this machine would send from; connecting a datagram socket only looks up the route."""
    with socket.socket(family_of(number), socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((number, 9))
        own = str(probe.getsockname()[0]).partition("%")[0]
        return None if ipaddress.ip_address(own).is_unspecified else own
    return None


def interface_towards(master_addr: str, peer: str = "") -> str | None:
    """The network interface by which this machine reaches the others; None if unknown."""
    own = address_towards(listening_address(master_addr, all_on_this_host=False, peer=peer))
    return next((interface for interface, found in _own_addresses().items() if own in found), None)


def _own_addresses() -> dict[str, list[str]]:
    """The addresses of each network interface, also its secondary ones; those of IPv4 come first."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    with contextlib.suppress(OSError):
        return {
            interface: [one.address.partition("%")[0] for one in found if one.family in families]
            for interface, found in psutil.net_if_addrs().items()
        }
    return {}
