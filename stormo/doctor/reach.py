"""Whether the nodes of a job can open connections to one another, and whether what they send arrives.

Asked before the workers join, where a node that cannot be reached would keep all others waiting. Each node listens on
the address that its workers will use, and greets whoever comes: with its name, its clock, and then with more than one
packet holds, since a path may let small packets pass and drop large ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from stormo.doctor.measured import Attempt, Spot
from stormo.errors import SettingError, StormoError
from stormo.launch import Place
from stormo.launch.address import LOOPBACK, interface_towards, listen, resolve, shown

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


def own_address(place: Place, environ: Mapping[str, str] | None = None) -> str:
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


def require_meeting_point(place: Place, limit_s: float = 5.0) -> None:
    """Refuse to wait for a meeting point that cannot be reached, where it is known to be open already."""
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

    def try_all(self, spots: Sequence[Spot], limit_s: float) -> list[Attempt]:
        """Connect to the speakers of other nodes, all at once."""

        async def attempts() -> list[Attempt]:
            return await asyncio.gather(*(_attempt(self._node, spot, limit_s) for spot in spots))

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


async def _attempt(node: int, spot: Spot, limit_s: float) -> Attempt:
    began = time.monotonic()
    stage, connect_s, clock = "timeout", 0.0, (0.0, 0.0)
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_connection(spot.address, spot.port)
            stage, connect_s = "silent", time.monotonic() - began
            if _parsed(await reader.readline()) != {"node": spot.node, "port": spot.port}:
                return Attempt(node=node, to=spot.node, outcome="stranger")
            clock = min([await _read_clock(reader, writer) for _ in range(_NUM_CLOCK_READINGS)], key=lambda one: one[1])
            stage = "packets"
            writer.write(b"data\n")
            await reader.readexactly(_LARGE_BYTES)
    except TimeoutError:
        return Attempt(node=node, to=spot.node, outcome=stage, detail=f"after {limit_s:g} s")
    except ValueError:  # a line without an end
        return Attempt(node=node, to=spot.node, outcome="stranger")
    except (OSError, EOFError) as error:
        outcome = "refused" if isinstance(error, ConnectionRefusedError) else "failed"
        number = getattr(error, "errno", None)
        detail = os.strerror(number) if number else "it was closed at the other end"
        return Attempt(node=node, to=spot.node, outcome=outcome, detail=detail)
    finally:
        if writer is not None:
            writer.close()
    return Attempt(
        node=node, to=spot.node, outcome="ok", connect_s=connect_s, clock_ahead_s=clock[0], clock_error_s=clock[1]
    )


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
