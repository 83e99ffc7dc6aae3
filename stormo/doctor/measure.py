"""What is measured across a job: each worker's device and host, and how fast data moves between workers.

Leaves torch as it was: generators of its own, no setting changed, and the memory of the device given back.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import platform
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from stormo.doctor.machine import existing, obstacle
from stormo.version import __version__

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo:
    """One worker: where it runs and, of the first one on each node, where the node can be reached."""

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
    outcome: str  # "ok", or a key of `network.OUTCOMES`
    detail: str = ""  # what the system said
    clock_ahead_s: float | None = None  # of the other node's clock
    clock_error_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What one worker found out about its device and its host."""

    rank: int
    name: str  # of the device's model
    kind: str  # "cpu" or "cuda"
    uuid: str = ""
    flops_per_s: float = 0.0
    is_exact: bool = True  # products whose result is known came out right
    digest: str = ""  # of a product of random numbers
    copy_in_bytes_per_s: float = 0.0
    copy_out_bytes_per_s: float = 0.0
    free_bytes: int = 0
    num_threads: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    sees_runs_folder: bool | None = None  # None where it was not asked


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Data sent both ways between two nodes at once, or, where both are the same one, around its workers."""

    a: int
    b: int
    width: int  # workers of each node that took part
    latency_s: float
    bytes_per_s: float  # one way


@dataclass(frozen=True, kw_only=True, slots=True)
class Overall:
    """An all-reduce over all workers."""

    num_ranks: int
    latency_s: float
    bus_bytes_per_s: float  # what each worker sends and receives


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurements:
    """Everything that was measured; what was not reached yet is empty."""

    workers: list[WorkerInfo] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
    inside: list[Link] = field(default_factory=list)
    between: list[Link] = field(default_factory=list)
    overall: Overall | None = None
    runs_folder: str = ""
    runs_folder_free_bytes: int | None = None
    runs_folder_error: str = ""  # why nothing can be written there
    needs_shared_folder: bool = False  # every worker writes its part of a checkpoint


_SEED = 20_240_229
_COPY_BYTES = 32 * 1024 * 1024
_SEEN_WITHIN_S = 2.0  # for a network file system to show a file that another node has just written


def measure_device(device: torch.device, rank: int, budget_s: float) -> Device:
    """Right results, speed and free memory of the device; versions of the host."""
    import torch

    try:
        is_exact = _is_exact(device)
        flops_per_s, repeats, digest = _speed(device, budget_s)
        copy_in, copy_out = _copies(device)
    finally:
        give_back(device)
    return Device(
        rank=rank,
        name=torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        kind=device.type,
        uuid=str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "",
        flops_per_s=flops_per_s,
        is_exact=is_exact and repeats,
        digest=digest,
        copy_in_bytes_per_s=copy_in,
        copy_out_bytes_per_s=copy_out,
        free_bytes=torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available,
        num_threads=torch.get_num_threads(),
        versions=_versions(device),
    )


def give_back(device: torch.device) -> None:
    """Free all memory of the device, so that a run finds it as without these measurements."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()  # a deterministic run asks for workspaces of another size
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _is_exact(device: torch.device) -> bool:
    """Whether products of small whole numbers, which every number format holds, come out as they must."""
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
    """Operations a second, whether the same product gives the same bits again, and a digest of them."""
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

    best_s = best_time_s(call, device, budget_s)
    repeats = not is_gpu or torch.equal(first, out)
    digest = hashlib.sha256(out[:256].float().cpu().numpy().tobytes()).hexdigest()[:16]
    return 2.0 * side**3 * num_calls / best_s, repeats, digest


def _copies(device: torch.device) -> tuple[float, float]:
    """Bytes a second from the host to the device and back; on a CPU, within its memory."""
    import torch

    is_gpu = device.type == "cuda"
    host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=is_gpu).fill_(1)
    there = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device).fill_(1)
    into_s = best_time_s(lambda: there.copy_(host, non_blocking=True), device, 0.0)
    back_s = best_time_s(lambda: host.copy_(there, non_blocking=True), device, 0.0)
    return _COPY_BYTES / into_s, _COPY_BYTES / back_s


def best_time_s(call: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """The shortest time of a call that is repeated for so long, and three times at least."""
    import torch

    deadline, best_s, count = time.perf_counter() + budget_s, float("inf"), 0
    while count < 3 or time.perf_counter() < deadline:
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best_s, count = min(best_s, time.perf_counter() - began), count + 1
    return max(best_s, 1e-9)


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


def write_token(folder: Path) -> Path:
    """A small new file in the folder of runs, or in what there is of the path to it."""
    if (in_the_way := obstacle(folder.absolute())) is not None:
        raise NotADirectoryError(errno.ENOTDIR, f"{in_the_way} is no folder")
    path = existing(folder.absolute()) / f".stormo-preflight-{uuid.uuid4().hex}"
    path.touch()
    return path


def is_seen(path: Path) -> bool:
    """Whether a file that another node has just written is seen here."""
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
    """One worker's view of what its data travels on.

    Args:
        device: of this worker; Gloo moves data of the host.
        budget_s: how long one measurement may take, about.
    """

    def __init__(self, device: torch.device, backend: str, rank: int, budget_s: float) -> None:
        import torch

        self.device = device if backend == "nccl" else torch.device("cpu")
        self._most_bytes = _MOST_BYTES[backend]
        self._rank, self._budget_s = rank, budget_s

    def swap(self, peer: int) -> tuple[float, float]:
        """Seconds for the smallest message, and bytes a second each way, when this worker and a peer swap data."""
        return self.around(sorted((self._rank, peer)))

    def around(self, ranks: list[int]) -> tuple[float, float]:
        """The same where each of these workers sends to the next one and receives from the one before."""
        import torch

        at = ranks.index(self._rank)
        after, before = ranks[(at + 1) % len(ranks)], ranks[at - 1]

        def agree(seconds: float) -> float:
            longest = torch.tensor([seconds], dtype=torch.float64, device=self.device)
            for _ in ranks[1:]:  # passed on until everybody has seen every one
                received = torch.empty_like(longest)
                _shift(longest, after, received, before)
                longest = torch.maximum(longest, received)
            return float(longest)

        return self._climb(lambda sent, received: _shift(sent, after, received, before), agree)

    def all_reduce(self, size: int) -> tuple[float, float]:
        """Seconds for the smallest all-reduce over all workers, and bytes a second that each sends and receives."""
        import torch
        import torch.distributed as dist

        def agree(seconds: float) -> float:
            longest = torch.tensor([seconds], dtype=torch.float64)
            dist.all_reduce(longest, op=dist.ReduceOp.MAX)
            return float(longest)

        latency_s, bytes_per_s = self._climb(lambda sent, _: dist.all_reduce(sent), agree)
        return latency_s, bytes_per_s * 2 * (size - 1) / size

    def _climb(self, step: Callable[[Tensor, Tensor], object], agree: Callable[[float], float]) -> tuple[float, float]:
        """Larger and larger messages until one takes its share of the budget; all that take part climb alike."""
        import torch

        small = torch.zeros(2, 1, device=self.device)
        self._time_s(lambda: step(small[0], small[1]))  # connections are made
        latency_s = min(self._time_s(lambda: step(small[0], small[1])) for _ in range(_NUM_SMALL))
        num_bytes = _FIRST_BYTES
        while True:
            sent, received = torch.zeros(2, num_bytes // 4, device=self.device).unbind()
            taken_s = agree(self._time_s(lambda sent=sent, received=received: step(sent, received)))  # type: ignore[misc]
            if num_bytes * _GROWTH > self._most_bytes or taken_s * _GROWTH * (1 + _NUM_LARGE) > self._budget_s:
                break
            num_bytes *= _GROWTH
        best_s = min(self._time_s(lambda: step(sent, received)) for _ in range(_NUM_LARGE))
        return latency_s, num_bytes / agree(best_s)

    def _time_s(self, call: Callable[[], object]) -> float:
        import torch

        began = time.perf_counter()
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return max(time.perf_counter() - began, 1e-9)


def _shift(sent: Tensor, to: int, received: Tensor, source: int) -> None:
    """Send and receive at the same time."""
    import torch.distributed as dist

    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, received, source)])
    for work in works:
        work.wait()


_ALL_WITH_ALL = 32  # nodes; above, each has partners at distances 1, 2, 4, ... in the ring of all nodes


def partners(node: int, num_nodes: int) -> list[int]:
    """The nodes that a node connects to: all others, or about log2 of them; always node 0, whose clock is the job's."""
    if num_nodes <= _ALL_WITH_ALL:
        return [other for other in range(num_nodes) if other != node]
    steps = [1 << power for power in range(math.ceil(math.log2(num_nodes)))]
    return sorted({(node + step) % num_nodes for step in steps} | {0} - {node})


def disjoint(pairs: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The same pairs in rounds in which no node has two partners."""
    found: list[list[tuple[int, int]]] = []
    for pair in pairs:
        free = next((turn for turn in found if not any(set(pair) & set(other) for other in turn)), None)
        if free is None:
            found.append([pair])
        else:
            free.append(pair)
    return found


def rounds(num_nodes: int, most: int | None = None) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs, as of a tournament: no pair comes twice, and all come unless that is more than `most`.

    With an odd number of nodes one of them rests in each round.
    """
    seats = num_nodes + num_nodes % 2  # an empty seat gives whoever would meet it a rest
    turns = list(range(seats - 1))
    if most is not None and len(turns) > most:  # all rounds of thousands of nodes would be millions of pairs
        turns = [index * len(turns) // most for index in range(most)]
    found = []
    for turn in turns:
        # Seat 0 stays, the others move on by one: everybody meets everybody.
        ring = [0, *(1 + (index + turn) % (seats - 1) for index in range(seats - 1))]
        pairs = [(ring[index], ring[seats - 1 - index]) for index in range(seats // 2)]
        found.append([(min(pair), max(pair)) for pair in pairs if max(pair) < num_nodes])
    return found
