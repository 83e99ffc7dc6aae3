"""The process group and the collectives of a run, and the device of this worker.

With one worker every collective returns at once, and there is no process group.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stormo.config.link import Link
from stormo.config.mesh import Mesh
from stormo.distributed.parallel_dims import DATA, ParallelDims, SubGroup
from stormo.distributed.status_table import StatusTable, float_to_int
from stormo.distributed.store import PeerFailedError, PeerMissingError, Store, is_secondary, within
from stormo.errors import SettingError, StormoError
from stormo.launch.address import interface_towards
from stormo.launch.rank_info import RankInfo
from stormo.launch.torch_errors import PeerLoss

_Result = TypeVar("_Result")
_COALESCED_BYTES = 2**25  # of small tensors that are sent as one message
_LONG_TIMEOUT = timedelta(hours=24)  # a download may be slow; a dead worker ends the job by other means
_RELEASE_S = 0.05
_DEVICE_POLL_S = 0.0002
# NCCL's watchdog first waits four times this long for a dump of its last collectives, which nobody reads here. In these
# 6 s the launcher finds the cause and ends the process; else the watchdog does, with its trace.
_WATCHDOG = {
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1500",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": "0",
}


class World:
    """The workers of a run, seen from one of them."""

    def __init__(
        self,
        rank_info: RankInfo,
        device: torch.device,
        *,
        store: Store | None = None,
        backend: str = "gloo",
        timeout_s: float = 600.0,
        mesh: Mesh | None = None,
        data_axes: Sequence[str] = DATA,
        needs_group: bool = False,
        choose_link: Callable[[], Link | None] | None = None,
    ) -> None:
        self.rank_info = rank_info
        self.rank = rank_info.rank
        self.size = rank_info.world_size
        self.device = device
        self.is_main = rank_info.rank == 0
        self._num_waits = 0
        self._tables: list[StatusTable] = []
        self._vote_tables: dict[int, StatusTable] = {}  # by their lag
        self._choose_link = choose_link  # called by all workers before they join
        self.link: Link | None = None  # what NCCL is told; None for its own settings
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._store = store.shared("world") if store else None
        self._signed = store.signed("world") if store else None
        self._has_group = self.size > 1 or needs_group  # torch's sharding needs one even for a single worker
        self.timeout = timedelta(seconds=timeout_s)
        if self._has_group:
            self._join(backend, self.timeout)
        self.arrange(Mesh(replicate=self.size) if mesh is None else mesh, data_axes)

    def arrange(self, mesh: Mesh, data_axes: Sequence[str] = DATA) -> None:
        """Set the mesh, and the axes along which workers take different samples. All workers call it."""
        self.mesh = mesh
        self._data_axes = tuple(data_axes)
        self.parallel_dims = ParallelDims(mesh, self.rank, self.device, self.timeout)
        self.data = self.parallel_dims.subgroup(*self._data_axes)

    def small_messages(self) -> SubGroup:
        """The workers that take different samples, for small messages during forward and backward. All call it."""
        is_tree = self.link is not None and self.link.small_algo == "tree"
        return self.parallel_dims.small_messages(*self._data_axes, algorithm="Tree" if is_tree else None)

    def _join(self, backend: str, timeout: timedelta) -> None:
        # CPU tensors always use Gloo, so that counters and votes never wait for a GPU.
        backends = "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo"
        if backend == "nccl" and "TORCH_NCCL_DUMP_ON_TIMEOUT" not in os.environ:  # a user who wants the dump gets it
            for name, value in _WATCHDOG.items():
                os.environ.setdefault(name, value)
        # Gloo would listen at the address of the host's name, which is often a loopback address or none.
        interface = (
            "lo"
            if self.rank_info.all_on_this_host
            else interface_towards(self.rank_info.master_addr, self.rank_info.peer)
        )
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if self.rank_info.all_on_this_host:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        if self._choose_link is not None:
            self.link = self._choose_link()
            for name, value in self.link.variables.items() if self.link else ():
                os.environ.setdefault(name, value)
        with within(timeout):
            dist.init_process_group(
                backends,
                store=self._store if self.size > 1 else dist.HashStore(),
                rank=self.rank,
                world_size=self.size,
                timeout=timeout,
                device_id=self.device if backend == "nccl" else None,
            )
        os.register_at_fork(after_in_child=_keep_groups)

    @property
    def samplers(self) -> tuple[int, ...]:
        """One rank for each part of a batch."""
        return self.parallel_dims.ranks(self._data_axes, self.mesh.coordinates(0))

    @property
    def random_stream(self) -> int:
        """The index of this worker's random stream; tensor-parallel peers share one."""
        return self.rank if "tensor" in self._data_axes else self.rank // self.mesh.tensor

    @contextmanager
    def once_per_node(self) -> Iterator[bool]:
        """Yield True in one process of each node; in the others False once it has finished, or raise its error."""
        self._num_waits += 1
        if self._signed is None or self.rank_info.local_size == 1:
            yield True
            return
        is_mine = self.rank_info.local_rank == 0
        with self._one_works(f"fetch/{self._num_waits}/{self.rank_info.node_id}", is_mine):
            yield is_mine

    def on_each_node(self, work: Callable[[], Any]) -> Any:
        """Run on one process of each node; return its JSON-able result on that node, once every node is done."""
        with self.once_per_node() as is_mine:
            result = work() if is_mine else None
        if self._signed is None:
            return result
        # Through the store, which waits longer than a collective.
        key = f"node/{self._num_waits}"
        if is_mine:
            self._signed.put(f"{key}/{self.rank_info.node_id}", result)
            if self._signed.count(f"{key}/done") == self.rank_info.num_nodes:
                self._signed.put(f"{key}/all", "")
        self._signed.get(f"{key}/all", _LONG_TIMEOUT)
        return self._signed.get(f"{key}/{self.rank_info.node_id}", _LONG_TIMEOUT)

    def on_rank_0(self, work: Callable[[], _Result]) -> _Result | None:
        """Run on rank 0 while the others wait as long as it takes; all raise its error."""
        if self.size == 1:
            return work()
        self._num_waits += 1
        with self._one_works(f"main/{self._num_waits}", self.is_main):
            return work() if self.is_main else None

    @contextmanager
    def _one_works(self, key: str, is_mine: bool) -> Iterator[None]:
        """Run the body in one worker; the others then run theirs, or raise its error."""
        assert self._signed is not None
        if not is_mine:
            # Through the store, which waits longer than a collective.
            failure = self._signed.get(key, _LONG_TIMEOUT)
            if failure is not None:
                _raise_of_peer(*failure)
            yield
            return
        try:
            yield
        except BaseException as error:
            # What only says that another worker is gone stays a consequence on the peers.
            if isinstance(error, StormoError) and not is_secondary(error):
                self._signed.put(key, [self.rank, str(error), error.exit_code])
            else:
                self._signed.put(key, [self.rank, f"{type(error).__name__}: {error}", None])
            raise
        self._signed.put(key, None)

    def from_rank_0(self, work: Callable[[], Any]) -> Any:
        """Run on rank 0; return its JSON-able result on all workers, which wait as long as it takes."""
        return self.broadcast_object(self.on_rank_0(work))

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

    def any(self, holds: bool) -> bool:
        """Whether it holds on any worker."""
        return bool(self.max(torch.tensor([float(holds)])).item())

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's values, in place."""
        if self.size > 1:
            dist.broadcast(tensor, src=0)
        return tensor

    def barrier(self) -> None:
        """Wait for all workers."""
        if self.size > 1:
            dist.all_reduce(torch.zeros(1))

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's JSON-able value, on all workers."""
        if self.size == 1:
            return value
        payload = bytearray(json.dumps(value).encode()) if self.is_main else bytearray()
        content = torch.frombuffer(payload, dtype=torch.uint8) if payload else None
        return json.loads(bytes(self.broadcast_vector(content, torch.uint8).numpy()))

    def broadcast_vector(self, vector: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Rank 0's vector of this type, on the CPU of all workers, which need not know its length."""
        if self.size == 1:
            assert vector is not None
            return vector
        length = self.broadcast(torch.tensor([0 if vector is None else len(vector)]))
        received = torch.empty(int(length), dtype=dtype) if vector is None else vector
        return self.broadcast(received) if len(received) else received

    def broadcast_tensors(self, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Rank 0's named tensors, on the CPU of all workers."""
        if self.size == 1:
            assert tensors is not None
            return dict(tensors)
        described = self.broadcast_object(
            [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in (tensors or {}).items()]
        )
        shared: dict[str, Tensor] = {}
        waiting, free_bytes = list[Tensor](), _COALESCED_BYTES
        for name, dtype, shape in described:
            if tensors is not None and self.is_main:
                tensor = tensors[name].detach().cpu().contiguous()
            else:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            shared[name] = tensor
            waiting.append(tensor)
            free_bytes -= tensor.nbytes
            if free_bytes <= 0:
                self._broadcast_coalesced(waiting)
                waiting, free_bytes = [], _COALESCED_BYTES
        self._broadcast_coalesced(waiting)
        return shared

    def _broadcast_coalesced(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast CPU tensors in place, as one message."""
        raw = [tensor.view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
        if len(raw) == 1:
            self.broadcast(raw[0])
        elif raw:
            message = self.broadcast(torch.cat(raw))
            for tensor, received in zip(raw, message.split([len(each) for each in raw]), strict=True):
                tensor.copy_(received)

    def gather_bytes(self, payload: bytes) -> list[bytes] | None:
        """Every worker's bytes, in the order of ranks, on rank 0; None on the others."""
        if self.size == 1:
            return [payload]
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(payload)
        self.sum(lengths)
        if not self.is_main:
            if payload:
                dist.send(torch.frombuffer(bytearray(payload), dtype=torch.uint8), dst=0)
            return None
        # One after the other: a collective would pad all of them to the longest.
        return [payload, *(self._received(rank, int(lengths[rank])) for rank in range(1, self.size))]

    def _received(self, rank: int, length: int) -> bytes:
        content = torch.empty(length, dtype=torch.uint8)
        if length:
            dist.recv(content, src=rank)
        return bytes(content.numpy())

    def scatter_bytes(self, payload_of: Callable[[int], bytes] | None) -> bytes:
        """The bytes that rank 0 makes for this worker, one worker at a time. All workers call it."""
        if not self.is_main:
            length = torch.zeros(1, dtype=torch.int64)
            dist.recv(length, src=0)
            return self._received(0, int(length))
        assert payload_of is not None
        for rank in range(1, self.size):
            payload = payload_of(rank)
            dist.send(torch.tensor([len(payload)]), dst=rank)
            if payload:
                dist.send(torch.frombuffer(bytearray(payload), dtype=torch.uint8), dst=rank)
        return payload_of(0)

    def require_same(self, values: Mapping[str, Any]) -> None:
        """Raise the same error on every worker if a value differs from rank 0's on one of them."""
        gathered = self.gather_objects(dict(values))
        differs: list[str] | None = None
        for rank, theirs in enumerate(gathered or []):
            for name, value in values.items():
                if theirs[name] != value and differs is None:
                    differs = [f"the {name} is {value} on rank 0", f"it is {theirs[name]} on rank {rank}"]
        differs = self.broadcast_object(differs)
        if differs is not None:
            what, why = differs
            raise SettingError(what, why, "set it, or give every node the same devices and settings")

    def gather_objects(self, value: Any) -> list[Any] | None:
        """Every worker's JSON-able value, in the order of ranks, on rank 0; None on the others."""
        gathered = self.gather_bytes(json.dumps(value).encode())
        return None if gathered is None else [json.loads(payload) for payload in gathered]

    def first_object(self, value: Any) -> Any:
        """The JSON-able value of the first worker that has one other than None, on all workers; None if none has."""
        gathered = self.gather_objects(value)
        return self.broadcast_object(next((one for one in gathered or [] if one is not None), None))

    def store_put(self, name: str, value: Any) -> None:
        """Put a JSON-able value into the store, without waiting; does nothing if rank 0 is gone."""
        if self._signed is not None:
            with contextlib.suppress(dist.DistError):
                self._signed.put(f"left/{name}", value)

    def store_get(self, names: Sequence[str], timeout_s: float) -> list[Any]:
        """The values of these names in the store, each None if it is not there within a total time."""
        deadline, found = time.monotonic() + timeout_s, list[Any]()
        for name in names:
            try:
                assert self._signed is not None, "one worker has no store"
                left = timedelta(seconds=max(0.01, deadline - time.monotonic()))
                found.append(self._signed.get(f"left/{name}", left))
            except dist.DistError:
                found.append(None)
        return found

    def status_table(self, lag: int = 0) -> StatusTable:
        """A new table for a few numbers of all workers, read up to `lag` rounds late. All workers call it."""
        self._tables.append(StatusTable(self, lag))
        return self._tables[-1]

    def vote_table(self, lag: int) -> StatusTable:
        """The table for votes with this lag, of which one at a time is in use. All workers call it."""
        if lag not in self._vote_tables:
            self._vote_tables[lag] = self.status_table(lag)
        return self._vote_tables[lag]

    def wait_for_device(self) -> None:
        """Wait until this worker's device has done all that was started."""
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(self.device))
            self.wait_for_event(done)
            torch.cuda.synchronize(self.device)

    def wait_for_event(self, done: torch.cuda.Event) -> None:
        """Wait for the device, and raise as NCCL does if it waits too long for another worker.

        NCCL's watchdog does not see the collectives of a replayed CUDA graph. Between two looks the host sleeps, as
        NCCL's threads need the cores.
        """
        began_s, timeout_s = time.monotonic(), self.timeout.total_seconds()
        while not done.query():
            if self.size > 1 and time.monotonic() - began_s > timeout_s:
                raise PeerMissingError(f"the device waited {timeout_s:g} s", PeerLoss(waited_s=timeout_s))
            time.sleep(_DEVICE_POLL_S)

    def close(self) -> None:
        """Leave the process group."""
        for table in self._tables:
            table.close()
        if self._has_group and dist.is_initialized():
            dist.destroy_process_group()
            # Gloo's threads need the GIL to release their last tensors, and abort if the interpreter ends before that.
            # torch has no call that waits for them.
            time.sleep(_RELEASE_S)


def _raise_of_peer(rank: int, text: str, exit_code: int | None) -> NoReturn:
    """Raise what another worker raised."""
    if exit_code is None:
        raise PeerFailedError(f"rank {rank} failed while this one waited: {text}")
    error = StormoError(text)
    error.exit_code = exit_code
    raise error


def _keep_groups() -> None:
    """Keep a forked process from destroying the groups at its end: it would wait for threads that it does not have.

    torch has no public call for that.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


class AsyncAllReduce:
    """A sum, and the largest of proposed numbers, over all workers: started in a step, read at its end.

    Every worker reads the same outcome at the same step. With a lag it is the outcome of an earlier step: a worker may
    be that far ahead.
    """

    def __init__(self, world: World, lag: int = 0) -> None:
        self._table = world.vote_table(lag) if world.size > 1 else None
        assert self._table is None or not self._table.num_unread
        self._lag = lag
        self._started: deque[tuple[int, float]] = deque()  # what this worker has proposed, not read yet
        self._number, self._total = 0, 0.0  # as last read

    def start(self, number: int, share: float = 0.0) -> None:
        """Propose a number, of which the largest wins, and add a share to the sum."""
        self._started.append((number, share))
        if self._table is not None:
            self._table.post((number, float_to_int(share), 0))

    def outcome(self) -> int:
        """The largest number of the sum started last, or `lag` before it; 0 if there is none."""
        self._finish()
        return self._number

    def total(self) -> float:
        """The sum of all shares of the same one."""
        self._finish()
        return self._total

    def drain(self) -> int:
        """The largest outcome of all that are not read yet. All workers call it at the same step."""
        found = 0
        while self._started:
            self._receive()
            found = max(found, self._number)
        self._number, self._total = 0, 0.0
        return found

    def _finish(self) -> None:
        if len(self._started) > self._lag:
            self._receive()

    def _receive(self) -> None:
        number, share = self._started.popleft()
        if self._table is None:
            self._number, self._total = number, share
            return
        rows = self._table.read()
        self._number = int(rows[:, 0].max())
        # One after the other, in the order of ranks: the same bits on every kind of processor.
        self._total = sum(rows[:, 1].contiguous().view(torch.float64).tolist())
