"""The key-value store through which the workers of a job find one another, and what the loss of a peer looks like."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from stormo.errors import StormoError
from stormo.launch import STORE_FD, Place
from stormo.launch.address import listen, listening_address
from stormo.launch.peer_loss import PeerLoss, peer_loss

_LIFELINE = "lifeline"
_WHERE = "stormo/where"
_LOOK_AGAIN_S = 0.2
_BACKLOG = 4096


class PeerFailedError(StormoError):
    """Another worker failed in something this one waited for."""

    def __init__(self, text: str, loss: PeerLoss | None = None) -> None:
        super().__init__(text)
        self.peer_loss = loss or PeerLoss()


class PeerMissingError(dist.DistError):
    """Another worker is gone, or has not come in time, which torch would say in words alone."""

    def __init__(self, text: str, loss: PeerLoss) -> None:
        super().__init__(text)
        self.peer_loss = loss


class Store:
    """torch's TCPStore, opened as the place says.

    Rank 0 listens on the master address alone (the loopback one when all workers are on this host), never on every
    interface: torch's own server would, so it is given a socket that is already bound.
    """

    def __init__(self, place: Place, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and place.launcher == "torchrun"
        # By number on node 0, whose own name may lead to a loopback address there.
        address = _listening_address(place) if place.node_id == 0 else place.master_addr
        store = self._open_beside(place) if is_served else self._open(place, address, place.master_port)
        self._store = dist.PrefixStore("stormo", store)

    def _open_beside(self, place: Place) -> dist.Store:
        """A store of this round alone; the one that torchrun's agent serves keeps what earlier rounds have left in it.

        No variable tells one round from the next on all nodes, so rank 0 says there where it now listens, and an
        address at which nobody listens any more is an earlier round's.
        """
        deadline = time.monotonic() + self._timeout.total_seconds()
        board = dist.TCPStore(place.master_addr, place.master_port, is_master=False, timeout=self._timeout)
        if place.is_main:
            number = _listening_address(place)
            listener = listen(number, 0, backlog=_BACKLOG)
            port = listener.getsockname()[1]
            store = self._serve(number, port, listener.detach())
            board.set(_WHERE, f"{number} {port}")
            return store
        while time.monotonic() < deadline:
            with contextlib.suppress(dist.DistError):
                board.wait([_WHERE], timedelta(seconds=max(1.0, min(5.0, deadline - time.monotonic()))))
                number, port = board.get(_WHERE).decode().split()
                if _answers(number, int(port)):
                    return self._open(place, number, int(port))
            time.sleep(_LOOK_AGAIN_S)
        raise StormoError(
            f"rank {place.rank} waited {self._timeout.total_seconds():g} s for rank 0 to say where it listens; after "
            "nodes have changed, torch gives workers an address of before unless torchrun is started with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."
        )

    def _serve(self, address: str, port: int, descriptor: int) -> dist.Store:
        return dist.TCPStore(
            address,
            port,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )

    def _open(self, place: Place, address: str, port: int) -> dist.Store:
        if place.is_main:
            inherited = os.environ.pop(STORE_FD, None)  # the agent of the node has bound it
            # The store owns the socket from here.
            descriptor = int(inherited) if inherited else listen(address, port, backlog=_BACKLOG).detach()
            return self._serve(address, port, descriptor)
        try:
            return dist.TCPStore(address, port, is_master=False, timeout=self._timeout)
        except dist.DistError:
            raise StormoError(
                f"rank {place.rank} waited {self._timeout.total_seconds():g} s for rank 0 at {address} port {port}, "
                "which did not answer; check that every rank was started, and --master-addr, or raise --timeout."
            ) from None

    def shared(self, prefix: str) -> dist.Store:
        """A part of the store with names of its own."""
        return dist.PrefixStore(prefix, self._store)

    def publish(self, text: str) -> None:
        """Make rank 0's line known."""
        self._store.set(_LIFELINE, text)

    def lookup(self, timeout_s: float) -> str:
        """Rank 0's line, when it has published it."""
        self._store.wait([_LIFELINE], timedelta(seconds=timeout_s))
        return self._store.get(_LIFELINE).decode()


def _listening_address(place: Place) -> str:
    return listening_address(place.master_addr, all_on_this_host=place.all_on_this_host, peer=place.peer)


def _answers(number: str, port: int) -> bool:
    try:
        socket.create_connection((number, port), timeout=2.0).close()
    except OSError:
        return False
    return True


def is_secondary(error: BaseException) -> bool:
    """Whether an error only says that another worker is gone, and so is not the cause of anything."""
    return peer_loss(error) is not None
