"""A few numbers from every worker to every worker, in rounds: written without waiting, read when needed.

The workers of a node write to shared memory, each to its row. No message is sent and no thread is woken, which matters
when workers compute on all cores. A checksum makes sure that a row is read whole, in whatever order a processor makes
writes visible. With several nodes, the first worker of each exchanges the rows of its node, so the number of messages
grows with the nodes, not the workers. Without shared memory, as in separate containers, every worker is a node.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import struct
import tempfile
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from stormo.distributed.store import PeerMissingError
from stormo.launch.torch_errors import PeerLoss

if TYPE_CHECKING:
    from stormo.distributed.world import World

NUM_VALUES = 3
_ROW = struct.Struct(f"=q{NUM_VALUES}q")  # the round, and the values
_CHECK = struct.Struct("=I")
_TABLE_HEAD = struct.Struct("=qq")  # the round, and the check
_ROW_BYTES = 64  # a cache line
_SLOTS = 2  # a row is kept while a slower worker still reads it
_MEMORY = "/dev/shm"
_PREFIX = "stormo-"
_NAME = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")  # as tempfile makes them
Row = tuple[int, ...]
_NUM_SPINS = 100  # before the first sleep
_SLEEP_SHARE = 0.02  # of the time waited so far: it adds little delay, and a long wait takes little CPU time
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 20e-6, 20e-3
_CHECK_PEERS_S = 0.1


def new_table_file() -> str:
    """Make an empty file in memory, and return its name. It can be removed once all have opened it."""
    descriptor, path = tempfile.mkstemp(prefix=_PREFIX, dir=_folder())
    os.close(descriptor)
    return Path(path).name


def path_of(name: str) -> Path:
    """The path of a file. Another worker sends a name, never a path."""
    if not _NAME.fullmatch(name):
        raise FileNotFoundError(name)
    return Path(_folder()) / name


def _folder() -> str:
    return _MEMORY if os.access(_MEMORY, os.W_OK) else tempfile.gettempdir()


class SharedMemoryTable:
    """The shared memory of a node, seen from one of its workers.

    Args:
        name: of the file, the same on all workers of the node.
        index: of this worker among them.
        size: how many they are.
        num_workers: of all nodes; the node's first worker writes a table of all of them.
    """

    def __init__(self, name: str, index: int, size: int, num_workers: int) -> None:
        self._index, self.size = index, size
        self._head_at = _SLOTS * size * _ROW_BYTES
        self._table_at = self._head_at + _TABLE_HEAD.size
        self._end = self._table_at + num_workers * NUM_VALUES * 8
        self._file = os.open(path_of(name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(self._file).st_uid != os.geteuid():
                raise PermissionError(name)
            # Not truncate: a write to missing memory would kill the process.
            os.posix_fallocate(self._file, 0, self._end)
            self._memory = mmap.mmap(self._file, self._end)
            # Held until this process ends in any way, so that the others notice.
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, index)
        except BaseException:
            os.close(self._file)
            raise

    def write(self, number: int, values: Row) -> None:
        """Write this worker's row of a round; it may be overwritten two rounds later."""
        row = _ROW.pack(number, *values)
        at = self._at(number, self._index)
        self._memory[at : at + _ROW.size + _CHECK.size] = row + _CHECK.pack(zlib.crc32(row))

    def rows(self, number: int) -> list[Row] | None:
        """The rows of all workers of the node in a round; None until all are there."""
        found: list[Row] = []
        for index in range(self.size):
            row = self.row(number, index)
            if row is None:
                return None
            found.append(row)
        return found

    def row(self, number: int, index: int) -> Row | None:
        """One row of a round; None until it is there."""
        at = self._at(number, index)
        row = self._memory[at : at + _ROW.size]
        (check,) = _CHECK.unpack(self._memory[at + _ROW.size : at + _ROW.size + _CHECK.size])
        if check != zlib.crc32(row):
            return None
        its_round, *values = _ROW.unpack(row)
        return tuple(values) if its_round == number else None

    def _at(self, number: int, index: int) -> int:
        return (number % _SLOTS * self.size + index) * _ROW_BYTES

    def write_table(self, number: int, table: bytes) -> None:
        """Write the rows of all nodes in a round."""
        self._memory[self._table_at : self._end] = table
        self._memory[self._head_at : self._table_at] = _TABLE_HEAD.pack(number, _checksum(table, number))

    def table(self, number: int) -> bytes | None:
        """What `write_table` wrote in a round; None until it did."""
        its_round, check = _TABLE_HEAD.unpack(self._memory[self._head_at : self._table_at])
        if its_round != number:
            return None
        table = self._memory[self._table_at : self._end]
        return table if check == _checksum(table, number) else None

    def has_left(self, index: int) -> bool:
        """Whether a worker of the node has closed the table, or ended."""
        if index == self._index:
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, index)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, index)
        return True

    def close(self) -> None:
        """Close it, which the others notice."""
        self._memory.close()
        os.close(self._file)


def _checksum(table: bytes, number: int) -> int:
    return zlib.crc32(table, number & 0xFFFFFFFF)


class StatusTable:
    """A worker posts its numbers and reads those of all. All workers make it and run the same rounds."""

    def __init__(self, world: World) -> None:
        self._timeout_s = world.timeout.total_seconds()
        self._shared, nodes = _share(world)
        self._is_first = world.rank in [ranks[0] for ranks in nodes]
        most = max(len(ranks) for ranks in nodes)
        self._blocks = torch.empty(len(nodes), most, NUM_VALUES, dtype=torch.int64)  # the rows of each node
        positions = {
            rank: index * most + local for index, ranks in enumerate(nodes) for local, rank in enumerate(ranks)
        }
        self._rows = torch.tensor([positions[rank] for rank in range(world.size)])  # of the workers, in the blocks
        self._firsts: dist.ProcessGroup | None = None
        if len(nodes) > 1:
            self._firsts = dist.new_group([ranks[0] for ranks in nodes], timeout=world.timeout, backend="gloo")
        self._round = 0
        self._own: Row = (0,) * NUM_VALUES
        self._block: Tensor | None = None  # of this node, while it is sent to the others
        self._work: dist.Work | None = None
        self._table: Tensor | None = None  # of this round, once it is known

    def post(self, values: Row) -> None:
        """Post this worker's numbers in a new round; the last round must have been read."""
        self._round += 1
        self._own, self._table = values, None
        if self._shared is not None:
            self._shared.write(self._round, values)
        if self._firsts is not None:
            self.is_complete()  # sends to other nodes at once, if it can

    def is_complete(self) -> bool:
        """Whether all workers have posted, so that `read` would not wait."""
        if self._table is not None:
            return True
        if self._firsts is not None and not self._is_first:
            return self._take_table()
        if self._work is None:
            rows = [self._own] if self._shared is None else self._shared.rows(self._round)
            if rows is None:
                return False
            if self._firsts is None:
                self._table = torch.tensor(rows)[self._rows]
                return True
            self._block = torch.zeros_like(self._blocks[0])
            self._block[: len(rows)] = torch.tensor(rows)
            # New ones every time: a slower worker may still read the last ones.
            self._blocks = torch.empty_like(self._blocks)
            self._work = dist.all_gather([*self._blocks], self._block, group=self._firsts, async_op=True)
        if self._work is not None and not self._work.is_completed():
            return False
        self._receive()
        return True

    def _take_table(self) -> bool:
        assert self._shared is not None, "a node of one worker has no table"
        table = self._shared.table(self._round)
        if table is not None:
            self._table = torch.frombuffer(bytearray(table), dtype=torch.int64).view(-1, NUM_VALUES)
        return table is not None

    def _receive(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        work.wait()
        self._table = self._blocks.view(-1, NUM_VALUES)[self._rows]
        if self._shared is not None:
            self._shared.write_table(self._round, self._table.numpy().tobytes())

    def read(self) -> Tensor:
        """The numbers of all workers, a row each. It waits as long as a collective."""
        began_s = checked_s = time.monotonic()
        num_spins = 0
        while not self.is_complete():
            if self._work is not None:
                self._receive()  # waits
                break
            num_spins += 1
            if num_spins < _NUM_SPINS:
                os.sched_yield()
                continue
            now_s = time.monotonic()
            time.sleep(min(max(_SLEEP_SHARE * (now_s - began_s), _SHORTEST_SLEEP_S), _LONGEST_SLEEP_S))
            if now_s - checked_s > _CHECK_PEERS_S:
                checked_s = now_s
                self._require_peers(now_s - began_s)
        assert self._table is not None
        return self._table

    def _require_peers(self, waited_s: float) -> None:
        """Raise as Gloo does if another worker has left or does not post in time."""
        if self._has_lost():
            raise PeerMissingError("a worker of this node has ended", PeerLoss())
        if waited_s > self._timeout_s:
            text = f"waited {self._timeout_s:g} s for the workers of this node"
            raise PeerMissingError(text, PeerLoss(waited_s=self._timeout_s))

    def _has_lost(self) -> bool:
        assert self._shared is not None, "a node of one worker does not wait"
        awaited = [index for index in range(self._shared.size) if self._shared.row(self._round, index) is None]
        left = [index for index in awaited if self._shared.has_left(index)]
        if any(self._shared.row(self._round, index) is None for index in left):  # not written just before it left
            return True
        waits_for_first = self._firsts is not None and not self._is_first
        return waits_for_first and self._shared.has_left(0) and self._shared.table(self._round) is None

    def close(self) -> None:
        """Close it, which the others notice."""
        if self._shared is not None:
            self._shared.close()
            self._shared = None


def _share(world: World) -> tuple[SharedMemoryTable | None, list[list[int]]]:
    """Open the memory of this node, and list the ranks of each node. Either all nodes share memory or none."""
    name = ""
    if world.rank_info.local_rank == 0 and world.rank_info.local_size > 1:
        with contextlib.suppress(OSError):
            name = new_table_file()
    try:
        return _open_shared(world, name)
    finally:
        if name:
            path_of(name).unlink(missing_ok=True)


def _open_shared(world: World, name: str) -> tuple[SharedMemoryTable | None, list[list[int]]]:
    node_id = world.rank_info.node_id
    gathered = world.broadcast_object(world.gather_objects([node_id, world.rank_info.local_rank, name]))
    nodes: dict[int, list[int]] = {}
    for rank, (node, _, _) in enumerate(gathered):
        nodes.setdefault(node, []).append(rank)
    for ranks in nodes.values():
        ranks.sort(key=lambda rank: int(gathered[rank][1]))
    mine = nodes[node_id]
    shared = None
    if len(mine) > 1:
        try:
            shared = SharedMemoryTable(gathered[mine[0]][2], mine.index(world.rank), len(mine), world.size)
            shared.write(0, (world.rank, 0, 0))
        except OSError:
            shared = None
    world.barrier()
    seen = [] if shared is None else [row[0] for row in shared.rows(0) or []]
    num_blind = world.sum(torch.tensor([int(len(mine) > 1 and seen != mine)]))
    if not num_blind:
        return shared, list(nodes.values())
    if shared is not None:
        shared.close()
    return None, [[rank] for rank in range(world.size)]
