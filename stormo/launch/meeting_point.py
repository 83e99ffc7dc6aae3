"""Where the ranks of a job meet in torch's store: in memory that those of one node share, or at a port of rank 0.

torch's own server at a port lets everybody in who can reach it. The memory has no name that another user could open.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from stormo.errors import StormoError
from stormo.launch.address import listen, listening_address
from stormo.launch.local import STORE_FD
from stormo.launch.place import Place

BACKLOG = 4096
_MEMORY = re.compile(r"/proc/\d{1,10}/fd/\d{1,10}")
_HIGHEST_PORT = 65535


@dataclass(frozen=True, kw_only=True, slots=True)
class MeetingPoint:
    """What a rank needs to open the store."""

    memory: int | None = None  # on one node, its descriptor
    listener: int | None = None  # on rank 0 of several nodes, the descriptor of a socket that listens already
    address: str = ""
    port: int = 0

    def described(self) -> dict[str, Any]:
        """What rank 0 tells the other ranks."""
        if self.memory is not None:
            return {"memory": f"/proc/{os.getpid()}/fd/{self.memory}"}
        return {"address": self.address, "port": self.port}


def address_of_rank_0(place: Place) -> str:
    """Where rank 0 listens: by number on its own node, where its name may lead to a loopback address."""
    if place.node_id:
        return place.master_addr
    return listening_address(place.master_addr, all_on_this_host=place.all_on_this_host, peer=place.peer)


def new_memory() -> int:
    """The descriptor of memory for the ranks of one node."""
    return os.memfd_create("stormo-store")


def opened_by_rank_0(place: Place, number: str) -> MeetingPoint:
    """A new one, where a foreign launcher has started the ranks; `number` is the address at which they find rank 0."""
    if place.all_on_this_host:
        return MeetingPoint(memory=new_memory())
    listener = listen(number, 0, backlog=BACKLOG)
    port = int(listener.getsockname()[1])
    return MeetingPoint(listener=listener.detach(), address=number, port=port)


def told_by_rank_0(place: Place, described: Mapping[str, Any]) -> MeetingPoint:
    """That of which rank 0 tells; by the control channel, as what is told here is opened."""
    memory, address, port = (described.get(name) for name in ("memory", "address", "port"))
    if place.all_on_this_host and isinstance(memory, str) and _MEMORY.fullmatch(memory):
        try:
            return MeetingPoint(memory=os.open(memory, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            raise StormoError(
                f"rank {place.rank} cannot open the memory that rank 0 shares with the ranks of this node "
                f"({error.strerror}: {memory}); start all of them in the same container."
            ) from None
    if not place.all_on_this_host and isinstance(address, str) and isinstance(port, int) and 0 < port <= _HIGHEST_PORT:
        return MeetingPoint(address=address, port=port)
    raise StormoError("Rank 0 did not say where the ranks meet; install the same release of stormo on every node.")


def inherited(place: Place, environ: MutableMapping[str, str]) -> MeetingPoint:
    """That of which the agent of this node has told a worker."""
    given = environ.pop(STORE_FD, None)  # a program that this worker starts is no worker
    descriptor = None if given is None else int(given)
    if descriptor is not None:
        os.set_inheritable(descriptor, False)
    if place.all_on_this_host and descriptor is not None:
        return MeetingPoint(memory=descriptor)
    return MeetingPoint(listener=descriptor, address=address_of_rank_0(place), port=place.master_port)
