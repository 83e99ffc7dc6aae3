"""The key-value store in which the workers of a job meet, and the errors for a peer that is gone."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from stormo.errors import StormoError
from stormo.launch import AddressBook, RankInfo, StoreAddress
from stormo.launch.address import listen, listening_address
from stormo.launch.auth import job_secret
from stormo.launch.peer_loss import PeerLoss, is_file_timeout, peer_loss
from stormo.launch.rendezvous import BACKLOG, inherited_store_address

_MOST_BYTES = 1 << 20  # of a value
_CODE_SIZE = 64
_WHERE = "stormo/where"


class PeerFailedError(StormoError):
    """Another worker failed in something that this one waited for."""

    def __init__(self, text: str, loss: PeerLoss | None = None) -> None:
        super().__init__(text)
        self.peer_loss = loss or PeerLoss()


class PeerMissingError(dist.DistError):
    """Another worker is gone, or has not come in time; torch would only say so in its text."""

    def __init__(self, text: str, loss: PeerLoss) -> None:
        super().__init__(text)
        self.peer_loss = loss


class Store:
    """torch's store, opened where the ranks meet.

    On one node it is a FileStore in memory that only these ranks have. Between nodes it is a TCPStore, which anybody
    can read and write who reaches rank 0: what stormo itself reads from it is signed. Rank 0 listens on the master
    address alone. torch's own server would listen on every interface, so it gets a socket that is already bound.
    """

    def __init__(self, place: RankInfo, timeout_s: float, at: StoreAddress | None = None) -> None:
        """`at` is what rank 0 told; without, what the agent of this node has left in the environment."""
        self.timeout = timedelta(seconds=timeout_s)
        at = at or inherited_store_address(place, os.environ)
        self._store = dist.PrefixStore("stormo", self._open(place, at))
        self._key = b"" if at.memory is not None else job_secret(os.environ, at.port)

    def _open(self, place: RankInfo, at: StoreAddress) -> dist.Store:
        if at.memory is not None:
            # FileStore opens the path again at every use and at its end: it gets a descriptor that is never closed.
            store = dist.FileStore(f"/proc/self/fd/{os.dup(at.memory)}")
            store.set_timeout(self.timeout)
            return store
        if place.is_main:
            descriptor = at.listener
            if descriptor is None:
                number = listening_address(at.address, all_on_this_host=place.all_on_this_host)
                descriptor = listen(number, at.port, backlog=BACKLOG).detach()  # the store owns it from here
            return dist.TCPStore(
                at.address,
                at.port,
                is_master=True,
                timeout=self.timeout,
                wait_for_workers=False,
                master_listen_fd=descriptor,
            )
        try:
            return dist.TCPStore(at.address, at.port, is_master=False, timeout=self.timeout)
        except dist.DistError:
            raise StormoError(
                f"rank {place.rank} waited {self.timeout.total_seconds():g} s for rank 0 at {at.address} port "
                f"{at.port}, which did not answer; check that every rank was started, and --master-addr, or raise "
                "--timeout."
            ) from None

    def shared(self, prefix: str) -> dist.Store:
        """A part of the store with names of its own."""
        return dist.PrefixStore(prefix, self._store)

    def signed(self, prefix: str, *, own_connection: bool = False) -> SignedStore:
        """A part of the store that only the workers of this job can write; `own_connection` where a call may hang."""
        shared: Any = self.shared(prefix)
        return SignedStore(shared.clone() if own_connection else shared, prefix, self._key)


class SignedStore:
    """JSON-able values in a store, each signed for its name by a worker of this job."""

    def __init__(self, store: dist.Store, prefix: str, key: bytes) -> None:
        self._store, self._prefix, self._key = store, prefix, key

    def put(self, name: str, value: Any) -> None:
        """Set a value."""
        text = json.dumps(value)
        self._store.set(name, self._code(name, text.encode()).decode() + text)

    def get(self, name: str, timeout: timedelta) -> Any:
        """The value of a name; waits until it is set."""
        return self.get_all([name], timeout)[0]

    def get_all(self, names: Sequence[str], timeout: timedelta) -> list[Any]:
        """The values of these names; waits until all are set."""
        with within(timeout):
            self._store.wait(list(names), timeout)
            return [
                self._checked(name, said) for name, said in zip(names, self._store.multi_get(list(names)), strict=True)
            ]

    def _checked(self, name: str, said: bytes) -> Any:
        code, text = said[:_CODE_SIZE], said[_CODE_SIZE:]
        if len(said) > _MOST_BYTES or not hmac.compare_digest(code, self._code(name, text)):
            raise StormoError(
                f"somebody who is no worker of this job has written {self._prefix}/{name} into the store where its "
                "workers meet; start the job on a network that others cannot reach (docs/security.md)."
            )
        return json.loads(text)

    def has(self, names: Sequence[str]) -> bool:
        """Whether each of these names has a value."""
        return bool(self._store.check(list(names)))

    def count(self, name: str, more: int = 1) -> int:
        """Add to a counter; its new value."""
        return int(self._store.add(name, more))

    def _code(self, name: str, text: bytes) -> bytes:
        return hmac.digest(self._key, f"{self._prefix}/{name}\n".encode() + text, hashlib.sha256).hex().encode()


class AgentAddressBook:
    """The store that torchrun's agent serves at the master port: rank 0 says there at which address it listens.

    It keeps what earlier rounds have left in it, and no variable tells one round from the next on all nodes: an address
    at which nobody knows the secret of the job is an earlier round's, or a stranger's.
    """

    def __init__(self, place: RankInfo, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        self._store = dist.TCPStore(place.master_addr, place.master_port, is_master=False, timeout=timeout)

    def write(self, text: str) -> None:
        """Say where rank 0 listens."""
        self._store.set(_WHERE, text)

    def read(self) -> str:
        """What was said last; empty where nothing was, or the agent is gone, which ends this rank soon."""
        with contextlib.suppress(dist.DistError):
            if self._store.check([_WHERE]):
                return self._store.get(_WHERE).decode("ascii", "replace")
        return ""


def address_book_of(place: RankInfo, timeout_s: float) -> AddressBook | None:
    """Where the ranks of torchrun find rank 0; None where rank 0 itself listens at the master port."""
    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and place.launcher == "torchrun"
    return AgentAddressBook(place, timeout_s) if is_served and place.world_size > 1 else None


@contextlib.contextmanager
def within(timeout: timedelta) -> Iterator[None]:
    """Raise the same where a store in a file gives up as where one at a port does, with the time that was waited."""
    try:
        yield
    except RuntimeError as error:
        if not is_file_timeout(error):
            raise
        waited_s = timeout.total_seconds()
        raise PeerMissingError(f"wait timeout after {1000 * waited_s:.0f}ms", PeerLoss(waited_s=waited_s)) from None


def is_secondary(error: BaseException) -> bool:
    """Whether an error only says that another worker is gone, and so is not the cause of anything."""
    return peer_loss(error) is not None
