"""The key-value store of the workers of a job, and the errors for a lost peer."""

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
from stormo.launch.rendezvous import BACKLOG, inherited_store_address
from stormo.launch.torch_errors import PeerLoss, is_file_store_timeout, peer_loss

_MOST_BYTES = 1 << 20  # of a value
_CODE_SIZE = 64
_ADDRESS_KEY = "stormo/where"


class PeerFailedError(StormoError):
    """Another worker failed while this one waited for it."""

    def __init__(self, text: str, loss: PeerLoss | None = None) -> None:
        super().__init__(text)
        self.peer_loss = loss or PeerLoss()


class PeerMissingError(dist.DistError):
    """Another worker is gone or late; torch says so only in its text."""

    def __init__(self, text: str, loss: PeerLoss) -> None:
        super().__init__(text)
        self.peer_loss = loss


class Store:
    """torch's store.

    On one node it is a FileStore in memory that only these ranks have. Between nodes it is a TCPStore, which anybody
    who reaches rank 0 can read and write: stormo's own values in it are signed. Rank 0 listens on the master address
    only. torch's server would listen on every interface, so it gets a bound socket.
    """

    def __init__(self, rank_info: RankInfo, timeout_s: float, at: StoreAddress | None = None) -> None:
        """`at` comes from rank 0; without it, the address is in the environment, from the agent of this node."""
        self.timeout = timedelta(seconds=timeout_s)
        at = at or inherited_store_address(rank_info, os.environ)
        self._store = dist.PrefixStore("stormo", self._open(rank_info, at))
        self._key = b"" if at.memory is not None else job_secret(os.environ, at.port)

    def _open(self, rank_info: RankInfo, at: StoreAddress) -> dist.Store:
        if at.memory is not None:
            # FileStore opens the path at every use and at its end: the descriptor is never closed.
            store = dist.FileStore(f"/proc/self/fd/{os.dup(at.memory)}")
            store.set_timeout(self.timeout)
            return store
        if rank_info.is_main:
            descriptor = at.listener
            if descriptor is None:
                number = listening_address(at.address, all_on_this_host=rank_info.all_on_this_host)
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
                f"rank {rank_info.rank} waited {self.timeout.total_seconds():g} s for rank 0 at {at.address} port "
                f"{at.port}, which did not answer; check that every rank was started, and --master-addr, or raise "
                "--timeout."
            ) from None

    def shared(self, prefix: str) -> dist.Store:
        """A part of the store with its own names."""
        return dist.PrefixStore(prefix, self._store)

    def signed(self, prefix: str, *, own_connection: bool = False) -> SignedStore:
        """A part of the store that only workers of this job can write; `own_connection` if a call may hang."""
        shared: Any = self.shared(prefix)
        return SignedStore(shared.clone() if own_connection else shared, prefix, self._key)


class SignedStore:
    """JSON-able values in a store, each signed with its name by a worker of this job."""

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
                self._verified(name, signed)
                for name, signed in zip(names, self._store.multi_get(list(names)), strict=True)
            ]

    def _verified(self, name: str, signed: bytes) -> Any:
        code, text = signed[:_CODE_SIZE], signed[_CODE_SIZE:]
        if len(signed) > _MOST_BYTES or not hmac.compare_digest(code, self._code(name, text)):
            raise StormoError(
                f"somebody who is no worker of this job has written {self._prefix}/{name} into its store; start the "
                "job on a network that others cannot reach (docs/security.md)."
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
    """The store of torchrun's agent at the master port, in which rank 0 writes the address at which it listens.

    It keeps values of earlier rounds, and no variable tells the rounds apart on all nodes. An address at which nobody
    knows the secret of the job is of an earlier round or unauthenticated.
    """

    def __init__(self, rank_info: RankInfo, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        self._store = dist.TCPStore(rank_info.master_addr, rank_info.master_port, is_master=False, timeout=timeout)

    def write(self, text: str) -> None:
        """Write where rank 0 listens."""
        self._store.set(_ADDRESS_KEY, text)

    def read(self) -> str:
        """The last address; empty if there is none or the agent is gone, which soon ends this rank."""
        with contextlib.suppress(dist.DistError):
            if self._store.check([_ADDRESS_KEY]):
                return self._store.get(_ADDRESS_KEY).decode("ascii", "replace")
        return ""


def address_book_of(rank_info: RankInfo, timeout_s: float) -> AddressBook | None:
    """Where the ranks of torchrun find rank 0; None if rank 0 itself listens at the master port."""
    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and rank_info.launcher == "torchrun"
    return AgentAddressBook(rank_info, timeout_s) if is_served and rank_info.world_size > 1 else None


@contextlib.contextmanager
def within(timeout: timedelta) -> Iterator[None]:
    """Raise PeerMissingError if a FileStore times out, as a TCPStore raises DistError."""
    try:
        yield
    except RuntimeError as error:
        if not is_file_store_timeout(error):
            raise
        waited_s = timeout.total_seconds()
        raise PeerMissingError(f"wait timeout after {1000 * waited_s:.0f}ms", PeerLoss(waited_s=waited_s)) from None


def is_secondary(error: BaseException) -> bool:
    """Whether an error only says that another worker is gone, so that it is not the root cause."""
    return peer_loss(error) is not None
