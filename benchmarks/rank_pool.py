"""A pool of ranks for benchmarks that look inside the workers of many small runs: each has imported torch once.

`RankPool().run(function, size, *arguments)` calls `function(world, *arguments)` in `size` processes that share a Gloo
group, and returns what they return, in the order of ranks. The function is one of a module. Each rank may get variables
of its own. Where these show it a GPU, the ranks share an NCCL group instead.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

from benchmarks.command import free_port

MAX_THREADS = 120  # of a rank: torch keeps some for every group that it has made, and thousands slow it down
_PRELOAD = ["torch", "torch._dynamo", "stormo.parallel.table", "benchmarks.strategy_worker"]
_GRACE_S = 3.0  # for the others to report, once a rank has failed
_JOIN_S = 5.0  # for a rank to end


class RankFailedError(Exception):
    """A function has raised in a rank; the text is the traceback of the first that did."""


class RankPool:
    """Starts ranks when they are first needed, keeps them, and renews those that hold too many threads."""

    def __init__(self, timeout_s: float = 300.0, environments: Sequence[Mapping[str, str]] = ()) -> None:
        self._timeout_s = timeout_s
        self._environments = environments
        self._members: list[tuple[Any, Connection]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def run(self, function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
        """Call the function in `size` ranks; the error of the first rank that fails is raised."""
        while len(self._members) < size:
            environment = self._environments[len(self._members)] if self._environments else None
            self._members.append(_start(environment))
        port = free_port()
        for rank in range(size):
            self._members[rank][1].send((rank, size, port, self._timeout_s, function, arguments))
        answers = self._answers(size)
        max_threads = MAX_THREADS * (4 if self._environments else 1)  # those that import torch again cost more
        if max(num_threads for _, num_threads in answers) > max_threads:
            self.close()
        return [result for result, _ in answers]

    def _answers(self, size: int) -> list[tuple[Any, int]]:
        awaited = {connection: rank for rank, (_, connection) in enumerate(self._members[:size])}
        answers: dict[int, tuple[Any, int]] = {}
        failures: list[str] = []
        while awaited:
            ready = wait(list(awaited), _GRACE_S if failures else self._timeout_s)
            if not ready and not failures:
                failures.append(f"ranks {sorted(awaited.values())} did not answer within {self._timeout_s:g} s")
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = awaited.pop(connection)
                try:
                    is_good, answer, num_threads = connection.recv()
                except EOFError:
                    is_good, answer, num_threads = False, f"rank {rank} ended without an answer", 0
                if is_good:
                    answers[rank] = answer, num_threads
                else:
                    failures.append(answer)
        if failures:
            self.close()  # the others may wait for the failed one, and keep what they have of its group
            raise RankFailedError(failures[0])
        return [answers[rank] for rank in range(size)]

    def close(self) -> None:
        """End all ranks."""
        for _, connection in self._members:
            connection.close()
        for process, _ in self._members:
            process.join(_JOIN_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._members = []


def _start(environment: Mapping[str, str] | None) -> tuple[Any, Connection]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch when the server imports it
    context: Any = multiprocessing.get_context("forkserver" if environment is None else "spawn")
    if environment is None:
        context.set_forkserver_preload(_PRELOAD)
    ours, theirs = multiprocessing.Pipe()
    process = context.Process(target=_serve, args=(theirs, environment), daemon=True)
    process.start()
    theirs.close()  # only the rank holds it, so that its end is seen
    return process, ours


def _serve(connection: Connection, environment: Mapping[str, str] | None) -> None:
    import gc

    environment = environment or {}
    os.environ.update(environment)  # before CUDA and NCCL read it

    import torch

    torch.set_num_threads(1)
    gc.freeze()  # what all modules hold is passed over by every later collection
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        rank, size, port, timeout_s, function, arguments = job
        try:
            world = _join(rank, size, port, timeout_s, "cuda:0" if "CUDA_VISIBLE_DEVICES" in environment else "cpu")
            answer = function(world, *arguments)
            world.close()
        except BaseException:
            # Sent before this rank leaves its group, of which the others will complain.
            with contextlib.suppress(OSError):
                connection.send((False, traceback.format_exc(), 0))
            return
        torch.set_default_dtype(torch.float32)
        with contextlib.suppress(OSError):  # the pool is closed: another rank has failed
            connection.send((True, answer, len(os.listdir("/proc/self/task"))))  # noqa: PTH208


def _join(rank: int, size: int, port: int, timeout_s: float, device: str) -> Any:
    import torch

    from stormo.distributed.store import Store
    from stormo.distributed.world import World
    from stormo.launch import RankInfo

    rank_info = RankInfo(
        launcher="local" if size > 1 else "alone",
        rank=rank,
        world_size=size,
        local_rank=rank,
        local_size=size,
        node_id=0,
        num_nodes=1,
        master_addr="127.0.0.1",
        master_port=port,
        host="localhost",
    )
    store = Store(rank_info, timeout_s) if size > 1 else None
    backend = "gloo" if device == "cpu" else "nccl"
    return World(rank_info, torch.device(device), store=store, backend=backend, timeout_s=timeout_s, needs_group=True)
