"""A pool of worker ranks, shared by all tests: importing torch anew for each test would take most of the time.

`run_ranks(function, size, *arguments)` calls `function(world, *arguments)` in `size` processes that share a Gloo
process group, and returns their results in the order of ranks. The function must be importable (module level).
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.command import free_port
from tests.forked import fork

MAX_THREADS = 120  # of a rank: torch keeps some for every group that it has made, and thousands slow it down


class RankFailedError(Exception):
    """A function raised in a rank; its traceback is the text."""


def _serve(connection: Connection) -> None:
    import gc
    import warnings

    import torch

    warnings.simplefilter("error")
    torch.set_num_threads(1)
    gc.freeze()  # what all modules hold is passed over by every later collection
    while True:
        job = connection.recv()
        if job is None:
            return
        answer: tuple[bool, Any]
        try:
            answer = True, _join_and_call(*job)
        except BaseException:
            answer = False, traceback.format_exc()
        connection.send((*answer, sum(1 for _ in Path("/proc/self/task").iterdir())))


def _join_and_call(rank: int, size: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    import torch

    from stormo.distributed.store import Store
    from stormo.distributed.world import World
    from stormo.launch import RankInfo

    place = RankInfo(
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
    torch.manual_seed(0)
    store = Store(place, 60.0) if size > 1 else None
    world = World(place, torch.device("cpu"), store=store, backend="gloo", timeout_s=60.0)
    try:
        return function(world, *arguments)
    finally:
        world.close()
        torch.set_default_dtype(torch.float32)


class Pool:
    """Starts ranks when they are first needed and keeps them."""

    def __init__(self) -> None:
        self._members: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
        """Call the function in `size` ranks; raise the first rank's error, if any, with its traceback."""
        while len(self._members) < size:
            ours, theirs = multiprocessing.Pipe()
            self._members.append((fork(_serve, (theirs,), is_daemon=True), ours))
        port = free_port()
        try:
            for rank in range(size):
                self._members[rank][1].send((rank, size, port, function, arguments))
            answers = [self._answer_of(rank) for rank in range(size)]
        except BaseException:
            self.close()  # an answer that comes later must not be taken for one of the next call
            raise
        failures = [text for is_good, text, _ in answers if not is_good]
        if failures:
            self.close()  # what a failed rank still holds of its process group could block it in the next call
            raise RankFailedError("\n".join(failures))
        if max(num_threads for _, _, num_threads in answers) > MAX_THREADS:
            self.close()
        return [result for _, result, _ in answers]

    def _answer_of(self, rank: int) -> Any:
        connection = self._members[rank][1]
        if not connection.poll(120):
            raise TimeoutError(f"rank {rank} did not answer within 120 s")
        return connection.recv()

    def close(self) -> None:
        """End all ranks."""
        for process, connection in self._members:
            process.kill()
            process.join()
            connection.close()
        self._members = []
