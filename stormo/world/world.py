"""Who am I, whom do I talk to, on which device: the process group and the collectives of a run.

With one worker every collective returns at once and no process group exists.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stormo.errors import StormoError
from stormo.launch.place import Place

_FETCH_TIMEOUT = timedelta(hours=24)  # a download may be slow; a dead fetcher ends the job by other means


class PeerFailedError(StormoError):
    """Another worker failed in something this one waited for."""


class World:
    """The workers of a run, seen from one of them."""

    def __init__(self, place: Place, device: torch.device, backend: str, timeout_s: float) -> None:
        self.place = place
        self.rank = place.rank
        self.size = place.world_size
        self.device = device
        self.is_main = place.rank == 0
        self.store: dist.Store | None = None
        self._num_fetches = 0
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if self.size > 1:
            self._join(backend, timedelta(seconds=timeout_s))

    def _join(self, backend: str, timeout: timedelta) -> None:
        self.store = open_store(self.place, timeout)
        # Tensors on the CPU always travel by Gloo, so that counters and votes never wait for a GPU.
        backends = "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo"
        dist.init_process_group(
            backends,
            store=dist.PrefixStore("world", self.store),
            rank=self.rank,
            world_size=self.size,
            timeout=timeout,
            device_id=self.device if backend == "nccl" else None,
        )

    @contextmanager
    def once_per_node(self) -> Iterator[bool]:
        """Yield True in one process of each node; the others get False when it has finished, or its error."""
        self._num_fetches += 1
        if self.store is None or self.place.local_size == 1:
            yield True
            return
        key = f"fetch/{self._num_fetches}/{self.place.node_id}"
        if self.place.local_rank == 0:
            try:
                yield True
            except BaseException as error:
                self.store.set(key, f"{type(error).__name__}: {error}")
                raise
            self.store.set(key, "")
            return
        self.store.wait([key], _FETCH_TIMEOUT)
        failure = self.store.get(key).decode()
        if failure:
            raise PeerFailedError(f"rank {self.rank - self.place.local_rank} failed while this one waited: {failure}")
        yield False

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum in place over all workers."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """Largest value in place over all workers."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The main worker's values, in place."""
        if self.size > 1:
            dist.broadcast(tensor, src=0)
        return tensor

    def barrier(self) -> None:
        """Wait for all workers."""
        if self.size > 1:
            dist.all_reduce(torch.zeros(1))

    def share_json(self, value: Any) -> Any:
        """The main worker's JSON-able value, on all workers."""
        if self.size == 1:
            return value
        payload = json.dumps(value).encode() if self.is_main else b""
        length = self.broadcast(torch.tensor([len(payload)]))
        content = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0).byte()
        if not self.is_main:
            content = torch.empty(int(length), dtype=torch.uint8)
        return json.loads(bytes(self.broadcast(content).numpy()))

    def share_tensors(self, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """The main worker's named tensors, on the CPU of all workers."""
        if self.size == 1:
            assert tensors is not None
            return dict(tensors)
        described = self.share_json(
            [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in (tensors or {}).items()]
        )
        shared: dict[str, Tensor] = {}
        for name, dtype, shape in described:
            if tensors is not None and self.is_main:
                tensor = tensors[name].detach().cpu().contiguous()
            else:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            if tensor.numel():
                self.broadcast(tensor.view(-1).view(torch.uint8))
            shared[name] = tensor
        return shared

    def gather_bytes(self, payload: bytes) -> list[bytes] | None:
        """Every worker's bytes, in the order of ranks, on the main worker; None on the others."""
        if self.size == 1:
            return [payload]
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(payload)
        self.sum(lengths)
        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        parts = [torch.empty_like(padded) for _ in range(self.size)] if self.is_main else None
        dist.gather(padded, parts, dst=0)
        if parts is None:
            return None
        return [bytes(part[: int(length)].numpy()) for part, length in zip(parts, lengths, strict=True)]

    def gather_json(self, value: Any) -> list[Any] | None:
        """Every worker's JSON-able value, in the order of ranks, on the main worker; None on the others."""
        gathered = self.gather_bytes(json.dumps(value).encode())
        return None if gathered is None else [json.loads(payload) for payload in gathered]

    def close(self) -> None:
        """Leave the process group."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


class Vote:
    """A number on which all workers agree without waiting: cast at the start of a step, read at its end.

    The exchange runs in the background while the step computes, and every worker reads the same outcome at the
    same step.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._ballot = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def cast(self, number: int) -> None:
        """Propose a number; the largest wins."""
        self._ballot.fill_(number)
        if self._world.size > 1:
            self._work = dist.all_reduce(self._ballot, op=dist.ReduceOp.MAX, async_op=True)

    def outcome(self) -> int:
        """What was agreed in the last cast."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return int(self._ballot)


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


def open_store(place: Place, timeout: timedelta) -> dist.Store:
    """The key-value store through which the workers of a job find one another.

    Rank 0 listens on the master address alone (the loopback one when all workers are on this host), never on every
    interface: torch's own server would, so it is given a socket that is already bound.
    """
    agent_store = place.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if agent_store or not place.is_main:
        store = dist.TCPStore(place.master_addr, place.master_port, is_master=False, timeout=timeout)
    else:
        inherited = os.environ.get("STORMO_STORE_FD")
        descriptor = int(inherited) if inherited else _listen(place.master_addr, place.master_port)
        store = dist.TCPStore(
            place.master_addr,
            place.master_port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"stormo/{attempt}", store)


def _listen(address: str, port: int) -> int:
    family, kind, protocol, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(target)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise StormoError(
            f"rank 0 cannot listen on {address} port {port} ({error.strerror}); "
            "set --master-port to a free port, or --master-addr to an address of the first node."
        ) from None
    return listener.detach()  # the store owns it from here
