"""The key-value store through which the workers of a job find one another, and what the loss of a peer looks like."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from stormo.errors import StormoError
from stormo.launch import STORE_FD, Place
from stormo.launch.address import listen, listening_address

_LIFELINE = "lifeline"
_BACKLOG = 4096


class PeerFailedError(StormoError):
    """Another worker failed in something this one waited for."""


class Store:
    """torch's TCPStore, opened as the place says.

    Rank 0 listens on the master address alone (the loopback one when all workers are on this host), never on every
    interface: torch's own server would, so it is given a socket that is already bound.
    """

    def __init__(self, place: Place, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        # A torchrun agent serves a store already; attempts after a restart must not read the keys of the one before.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and place.launcher == "torchrun"
        self._store = dist.PrefixStore(f"stormo/{attempt}", self._open(place, serves=place.is_main and not is_served))

    def _open(self, place: Place, *, serves: bool) -> dist.Store:
        address, port = place.master_addr, place.master_port
        if serves:
            inherited = os.environ.pop(STORE_FD, None)  # the agent of the node has bound it
            if inherited:
                descriptor = int(inherited)
            else:
                number = listening_address(address, all_on_this_host=place.all_on_this_host)
                descriptor = listen(number, port, backlog=_BACKLOG).detach()  # the store owns it from here
            return dist.TCPStore(
                address,
                port,
                is_master=True,
                timeout=self._timeout,
                wait_for_workers=False,
                master_listen_fd=descriptor,
            )
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


_PEER_IS_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Socket closed",
    "no error",  # Gloo, when a pair was closed under it
    "NCCL communicator was aborted",
    "remote process exited",
)


def is_secondary(error: BaseException) -> bool:
    """Whether an error only says that another worker is gone, and so is not the cause of anything."""
    if isinstance(error, PeerFailedError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _PEER_IS_GONE)
