"""Measures a job: each worker's device, whether its nodes reach one another, and the speed of the links between them.

Leaves torch as it was: private generators, no setting changed, and the memory of the device freed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hashlib
import ipaddress
import json
import math
import os
import platform
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from stormo.doctor.machine import existing, obstacle
from stormo.errors import SettingError, StormoError
from stormo.launch import RankInfo
from stormo.launch.address import LOOPBACK, interface_towards, listen, resolve, shown
from stormo.version import __version__

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo:
    """One worker: its host and, for the first of each node, the address of its probe server."""

    rank: int
    node: int
    local_rank: int
    host: str
    address: str = ""
    port: int = 0

    @property
    def leads_node(self) -> bool:
        """Whether it is the first of its node."""
        return self.local_rank == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One node's attempt to connect to another."""

    node: int
    to: int
    outcome: str  # "ok", or a key of `OUTCOMES`
    detail: str = ""  # the system's error


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One worker's device and host."""

    rank: int
    name: str  # of the device's model
    kind: str  # "cpu" or "cuda"
    uuid: str = ""
    flops_per_s: float = 0.0
    is_exact: bool = True  # products of known result were right
    digest: str = ""  # of a product of random numbers
    free_bytes: int = 0
    num_threads: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    sees_runs_folder: bool | None = None  # None where it was not checked


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The exchange between two nodes, both ways at once; with a == b, in a ring of the node's workers."""

    a: int
    b: int
    width: int  # workers of each node that took part
    latency_s: float
    bytes_per_s: float  # one way


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduce:
    """An all-reduce over all workers."""

    num_ranks: int
    latency_s: float
    bus_bytes_per_s: float  # what each worker sends and receives


@dataclass(kw_only=True, slots=True)
class Measurements:
    """Everything measured so far."""

    workers: list[WorkerInfo] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
    inside: list[Link] = field(default_factory=list)
    between: list[Link] = field(default_factory=list)
    all_reduce: AllReduce | None = None
    runs_folder: str = ""
    runs_folder_free_bytes: int | None = None
    runs_folder_error: str = ""  # why it cannot be written
    needs_shared_folder: bool = False  # every worker writes its shard of a checkpoint


_SEED = 20_240_229
_SEEN_WITHIN_S = 2.0  # for a network file system to show a file that another node has just written


def measure_device(device: torch.device, rank: int, budget_s: float) -> Device:
    """Exactness, speed and free memory of the device; versions of the host."""
    import torch

    from stormo.distributed.devices import device_uuid

    try:
        is_exact = _is_exact(device)
        flops_per_s, repeats, digest = _speed(device, budget_s)
    finally:
        free_memory(device)
    return Device(
        rank=rank,
        name=torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        kind=device.type,
        uuid=device_uuid(device.index) if device.type == "cuda" else "",
        flops_per_s=flops_per_s,
        is_exact=is_exact and repeats,
        digest=digest,
        free_bytes=torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available,
        num_threads=torch.get_num_threads(),
        versions=_versions(device),
    )


def free_memory(device: torch.device) -> None:
    """Free all memory of the device, so that a run starts as without these measurements."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()  # a deterministic run asks for workspaces of another size
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _is_exact(device: torch.device) -> bool:
    """Whether products of small integers, which every dtype represents exactly, are right."""
    import torch

    shapes = [(torch.float32, 512, 512, 4)]
    if device.type == "cuda":
        shapes = [(torch.float32, 2048, 2048, 4), (_half(device), 4096, 64, 2)]
    generator = torch.Generator().manual_seed(_SEED)
    for dtype, side, inner, largest in shapes:
        left = torch.randint(-largest, largest + 1, (side, inner), generator=generator)
        right = torch.randint(-largest, largest + 1, (inner, side), generator=generator)
        product = (left.to(device, dtype) @ right.to(device, dtype)).double()
        rows, columns = left @ right.sum(1), left.sum(0) @ right
        if not torch.equal(product.sum(1).cpu().long(), rows) or not torch.equal(product.sum(0).cpu().long(), columns):
            return False
    return True


def _speed(device: torch.device, budget_s: float) -> tuple[float, bool, str]:
    """FLOP/s, whether the same product gives the same bits again, and a digest of them."""
    import torch

    is_gpu = device.type == "cuda"
    side = 8192 if is_gpu and torch.cuda.mem_get_info(device)[0] > 4 << 30 else 768
    generator = torch.Generator(device).manual_seed(_SEED)
    dtype = _half(device) if is_gpu else torch.float32
    left, right = (torch.randn(side, side, generator=generator, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty(side, side, device=device, dtype=dtype)
    torch.mm(left, right, out=out)  # libraries are loaded, clocks rise
    first = out.clone()
    num_calls = 10 if is_gpu else 1

    def call() -> None:
        for _ in range(num_calls):
            torch.mm(left, right, out=out)

    best_s = _best_time_s(call, device, budget_s)
    repeats = not is_gpu or torch.equal(first, out)
    digest = hashlib.sha256(out[:256].float().cpu().numpy().tobytes()).hexdigest()[:16]
    return 2.0 * side**3 * num_calls / best_s, repeats, digest


def _best_time_s(call: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """The shortest time of a call that is repeated for the budget, at least three times."""
    deadline, times_s = time.perf_counter() + budget_s, list[float]()
    while len(times_s) < 3 or time.perf_counter() < deadline:
        times_s.append(_time_s(call, device))
    return min(times_s)


def _time_s(call: Callable[[], object], device: torch.device) -> float:
    """The time of a call, with what it starts on the device."""
    import torch

    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return max(time.perf_counter() - began, 1e-9)


def _half(device: torch.device) -> torch.dtype:
    import torch

    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def _processor() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
    return f"{platform.machine()} processor"


def _versions(device: torch.device) -> dict[str, str]:
    import torch

    found = {"stormo": __version__, "torch": torch.__version__, "Python": platform.python_version()}
    if device.type == "cuda":
        found |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
        with contextlib.suppress(OSError):
            found["NVIDIA driver"] = Path("/sys/module/nvidia/version").read_text(encoding="utf-8").strip()
    return found


def write_probe_file(folder: Path) -> Path:
    """Make a small file in the folder of runs, or in its nearest existing parent."""
    if (file := obstacle(folder.absolute())) is not None:
        raise NotADirectoryError(errno.ENOTDIR, f"{file} is no folder")
    path = existing(folder.absolute()) / f".stormo-preflight-{uuid.uuid4().hex}"
    path.touch()
    return path


def is_visible(path: Path) -> bool:
    """Whether a file that another node has just written is visible here."""
    deadline = time.monotonic() + _SEEN_WITHIN_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


_FIRST_BYTES, _GROWTH = 64 * 1024, 8
_MOST_BYTES = {"gloo": 32 * 1024 * 1024, "nccl": 256 * 1024 * 1024}
_NUM_SMALL, _NUM_LARGE = 20, 3


class LinkTimer:
    """Times the exchange of one worker with others.

    Args:
        device: of this worker; Gloo moves data of the host.
        budget_s: about how long one measurement may take.
    """

    def __init__(self, device: torch.device, backend: str, rank: int, budget_s: float) -> None:
        import torch

        self.device = device if backend == "nccl" else torch.device("cpu")
        self._most_bytes = _MOST_BYTES[backend]
        self._rank, self._budget_s = rank, budget_s

    def ring(self, ranks: list[int]) -> tuple[float, float]:
        """Latency of the smallest message, and bytes per second that each of these workers sends to the next."""
        import torch

        at = ranks.index(self._rank)
        after, before = ranks[(at + 1) % len(ranks)], ranks[at - 1]

        def agree(seconds: float) -> float:
            longest = torch.tensor([seconds], dtype=torch.float64, device=self.device)
            for _ in ranks[1:]:  # a maximum around the ring
                received = torch.empty_like(longest)
                _shift(longest, after, received, before)
                longest = torch.maximum(longest, received)
            return float(longest)

        return self._time_sizes(lambda sent, received: _shift(sent, after, received, before), agree)

    def all_reduce(self, size: int) -> tuple[float, float]:
        """Latency of the smallest all-reduce over all workers, and bytes per second that each sends and receives."""
        import torch
        import torch.distributed as dist

        def agree(seconds: float) -> float:
            longest = torch.tensor([seconds], dtype=torch.float64)
            dist.all_reduce(longest, op=dist.ReduceOp.MAX)
            return float(longest)

        latency_s, bytes_per_s = self._time_sizes(lambda sent, _: dist.all_reduce(sent), agree)
        return latency_s, bytes_per_s * 2 * (size - 1) / size

    def _time_sizes(
        self, step: Callable[[Tensor, Tensor], object], agree: Callable[[float], float]
    ) -> tuple[float, float]:
        """Time larger and larger messages until one takes its share of the budget; all workers agree on the sizes."""
        import torch

        small = torch.zeros(2, 1, device=self.device)
        _time_s(lambda: step(small[0], small[1]), self.device)  # connections are made
        latency_s = min(_time_s(lambda: step(small[0], small[1]), self.device) for _ in range(_NUM_SMALL))
        num_bytes = _FIRST_BYTES
        while True:
            sent, received = torch.zeros(2, num_bytes // 4, device=self.device).unbind()
            taken_s = agree(_time_s(functools.partial(step, sent, received), self.device))
            if num_bytes * _GROWTH > self._most_bytes or taken_s * _GROWTH * (1 + _NUM_LARGE) > self._budget_s:
                break
            num_bytes *= _GROWTH
        best_s = min(_time_s(lambda: step(sent, received), self.device) for _ in range(_NUM_LARGE))
        return latency_s, num_bytes / agree(best_s)


def _shift(sent: Tensor, to: int, received: Tensor, source: int) -> None:
    """Send and receive at the same time."""
    import torch.distributed as dist

    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, received, source)])
    for work in works:
        work.wait()


_ALL_WITH_ALL = 32  # nodes; above, each has partners at distances 1, 2, 4, ... in the ring of all nodes


def partners(node: int, num_nodes: int) -> list[int]:
    """The nodes that a node connects to: all others, or about log2 of them."""
    if num_nodes <= _ALL_WITH_ALL:
        return [other for other in range(num_nodes) if other != node]
    steps = [1 << power for power in range(math.ceil(math.log2(num_nodes)))]
    return sorted((node + step) % num_nodes for step in steps)


def disjoint(pairs: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The same pairs in rounds in which each node has at most one partner."""
    found: list[list[tuple[int, int]]] = []
    for pair in pairs:
        free = next((turn for turn in found if not any(set(pair) & set(other) for other in turn)), None)
        if free is None:
            found.append([pair])
        else:
            free.append(pair)
    return found


def rounds(num_nodes: int, most: int | None = None) -> list[list[tuple[int, int]]]:
    """Round-robin tournament: rounds of disjoint pairs, every pair once, or evenly spaced `most` rounds of them."""
    seats = num_nodes + num_nodes % 2  # an odd number of nodes has an empty seat
    turns = list(range(seats - 1))
    if most is not None and len(turns) > most:  # thousands of nodes have millions of pairs
        turns = [index * len(turns) // most for index in range(most)]
    found = []
    for turn in turns:
        # Seat 0 stays, the others rotate by one.
        ring = [0, *(1 + (index + turn) % (seats - 1) for index in range(seats - 1))]
        pairs = [(ring[index], ring[seats - 1 - index]) for index in range(seats // 2)]
        found.append([(min(pair), max(pair)) for pair in pairs if max(pair) < num_nodes])
    return found


OUTCOMES = {
    "timeout": "the connection timed out",
    "refused": "the connection was refused",
    "failed": "no connection can be made",
    "silent": "a connection was opened, but nothing was received",
    "wrong_peer": "another program answered there",
    "packets": "small packets pass, but large ones do not",
}
OPEN_PORTS = (
    "open all TCP ports between the nodes in their firewalls, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME "
    "to the interface of a network that joins them"
)
_IP = (socket.AF_INET, socket.AF_INET6)
_LARGE_BYTES = 256 * 1024
_BACKLOG = 4096


def own_address(rank_info: RankInfo, environ: Mapping[str, str] | None = None) -> str:
    """The numeric address at which the other nodes reach this node's workers."""
    if rank_info.all_on_this_host:
        return LOOPBACK
    environ = os.environ if environ is None else environ
    named = environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    interface = named or interface_towards(rank_info.master_addr, rank_info.peer)
    if interface is None:
        return resolve(rank_info.host)[0]  # as Gloo itself would
    found = psutil.net_if_addrs().get(interface, [])
    if named and not found:
        raise SettingError(
            f"GLOO_SOCKET_IFNAME={named} is set",
            f"host {rank_info.host} has no such interface (it has {', '.join(sorted(psutil.net_if_addrs()))})",
            "unset it, or name one of these",
        )
    numbers = [each.address.partition("%")[0] for family in _IP for each in found if each.family == family]
    usable = [number for number in numbers if not ipaddress.ip_address(number).is_link_local]
    return next(iter(usable or numbers), LOOPBACK)


def require_rendezvous(rank_info: RankInfo) -> None:
    """Raise if node 0's rendezvous, which stormo's launcher has opened by now, cannot be reached."""
    if rank_info.launcher != "local" or rank_info.node_id == 0:
        return
    try:
        socket.create_connection((rank_info.master_addr, rank_info.master_port), timeout=5.0).close()
    except OSError as error:
        why = OUTCOMES["timeout"] if isinstance(error, TimeoutError) else error.strerror or str(error)
        where = shown(rank_info.master_addr, rank_info.master_port)
        raise StormoError(
            f"preflight: node 0 cannot be reached at {where} from node {rank_info.node_id} ({rank_info.host}): {why}; "
            f"{OPEN_PORTS}."
        ) from None


class ProbeServer:
    """Answers the probes of other nodes in a background thread, on the address that the workers will use.

    It answers with its node, then with more data than one packet holds: a path may drop large packets only.
    """

    def __init__(self, node: int, address: str) -> None:
        self._node = node
        self._listener = listen(address, 0, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.address, self.port = address, int(self._listener.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._run, name="stormo-probe-server", daemon=True)
        self._thread.start()

    def connect_all(self, workers: Sequence[WorkerInfo], limit_s: float) -> list[Attempt]:
        """Probe the first workers of other nodes, all at once."""

        async def attempts() -> list[Attempt]:
            return await asyncio.gather(*(_attempt(self._node, worker, limit_s) for worker in workers))

        return asyncio.run_coroutine_threadsafe(attempts(), self._loop).result()

    def close(self) -> None:
        """Close the port and end the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(asyncio.start_server(self._answer, sock=self._listener))
        self._loop.run_forever()
        self._server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            writer.write(_greeting(self._node, self.port))
            if await reader.readline():
                writer.write(bytes(_LARGE_BYTES))
                await writer.drain()
        writer.close()


async def _attempt(node: int, worker: WorkerInfo, limit_s: float) -> Attempt:
    stage = "timeout"
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_connection(worker.address, worker.port)
            stage = "silent"
            if await reader.readline() != _greeting(worker.node, worker.port):
                return Attempt(node=node, to=worker.node, outcome="wrong_peer")
            stage = "packets"
            writer.write(b"data\n")
            await reader.readexactly(_LARGE_BYTES)
    except TimeoutError:
        return Attempt(node=node, to=worker.node, outcome=stage, detail=f"after {limit_s:g} s")
    except ValueError:  # a line longer than the buffer
        return Attempt(node=node, to=worker.node, outcome="wrong_peer")
    except (OSError, EOFError) as error:
        outcome = "refused" if isinstance(error, ConnectionRefusedError) else "failed"
        number = getattr(error, "errno", None)
        detail = os.strerror(number) if number else "the peer closed it"
        return Attempt(node=node, to=worker.node, outcome=outcome, detail=detail)
    finally:
        if writer is not None:
            writer.close()
    return Attempt(node=node, to=worker.node, outcome="ok")


def _greeting(node: int, port: int) -> bytes:
    return json.dumps({"node": node, "port": port}).encode() + b"\n"
