"""A few numbers from every worker to every worker, in rounds: written without waiting, read when needed.

The workers of a node write to shared memory, each to its row. No message is sent and no thread is woken, which matters
when workers compute on all cores. A checksum makes sure that a row is read whole, in whatever order a processor makes
writes visible. With several nodes, the first worker of each exchanges the rows of its node, so the number of messages
grows with the nodes, not the workers. Without shared memory, as in separate containers, every worker is a node.

With a lag, a round is read that many rounds after it was posted: a worker can be further ahead of others.
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
from collections import deque
from dataclasses import dataclass
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
_FLOAT, _INTEGER = struct.Struct("=d"), struct.Struct("=q")
_ROW_BYTES = 64  # a cache line
_MEMORY = "/dev/shm"
_PREFIX = "stormo-"
_NAME = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")  # as tempfile makes them
Row = tuple[int, ...]
_NUM_SPINS = 100  # before the first sleep
_SLEEP_SHARE = 0.02  # of the time waited so far: it adds little delay, and a long wait takes little CPU time
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 20e-6, 20e-3
_CHECK_PEERS_S = 0.1


def float_to_int(value: float) -> int:
    """The bits of a float as a number of a row."""
    return _INTEGER.unpack(_FLOAT.pack(value))[0]  # type: ignore[no-any-return]


def int_to_float(number: int) -> float:
    """The float of these bits."""
    return _FLOAT.unpack(_INTEGER.pack(number))[0]  # type: ignore[no-any-return]


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
        lag: how many rounds later than it was posted a round is read.
    """

    def __init__(self, name: str, index: int, size: int, num_workers: int, lag: int = 0) -> None:
        self._index, self.size = index, size
        # Who posts round n has read round n - 1 - lag. So all have posted that, and have read the one 1 + lag before.
        self._num_slots = 2 + 2 * lag
        self._num_tables = 1 + lag  # written when all have posted, and so have read the table 1 + lag before
        self._table_bytes = _TABLE_HEAD.size + num_workers * NUM_VALUES * 8
        self._tables_at = self._num_slots * size * _ROW_BYTES
        self._end = self._tables_at + self._num_tables * self._table_bytes
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
        """Write this worker's row of a round."""
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
        return (number % self._num_slots * self.size + index) * _ROW_BYTES

    def write_table(self, number: int, table: bytes) -> None:
        """Write the rows of all nodes in a round."""
        at = self._table_at(number)
        self._memory[at + _TABLE_HEAD.size : at + self._table_bytes] = table
        self._memory[at : at + _TABLE_HEAD.size] = _TABLE_HEAD.pack(number, _checksum(table, number))

    def table(self, number: int) -> bytes | None:
        """What `write_table` wrote in a round; None until it did."""
        at = self._table_at(number)
        its_round, check = _TABLE_HEAD.unpack(self._memory[at : at + _TABLE_HEAD.size])
        if its_round != number:
            return None
        table = self._memory[at + _TABLE_HEAD.size : at + self._table_bytes]
        return table if check == _checksum(table, number) else None

    def _table_at(self, number: int) -> int:
        return self._tables_at + number % self._num_tables * self._table_bytes

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


@dataclass(slots=True, eq=False)
class _Round:
    """A round that was posted and is not read yet."""

    number: int
    own: Row
    blocks: Tensor | None = None  # the rows of each node, while they are exchanged
    work: dist.Work | None = None
    table: Tensor | None = None  # the rows of all workers, once they are known


class StatusTable:
    """A worker posts its numbers and reads those of all. All workers make it and run the same rounds."""

    def __init__(self, world: World, lag: int = 0) -> None:
        """`lag`: of the rounds before the one that is posted, so many may not be read yet."""
        self._timeout_s = world.timeout.total_seconds()
        self._shared, nodes = _share(world, lag)
        self._is_first = world.rank in [ranks[0] for ranks in nodes]
        most = max(len(ranks) for ranks in nodes)
        self._shape = len(nodes), most, NUM_VALUES
        positions = {
            rank: index * most + local for index, ranks in enumerate(nodes) for local, rank in enumerate(ranks)
        }
        self._rows = torch.tensor([positions[rank] for rank in range(world.size)])  # of the workers, in the blocks
        self._firsts: dist.ProcessGroup | None = None
        if len(nodes) > 1:
            self._firsts = dist.new_group([ranks[0] for ranks in nodes], timeout=world.timeout, backend="gloo")
        self._num_posted = 0
        self._rounds: deque[_Round] = deque()

    @property
    def num_unread(self) -> int:
        """The rounds that were posted and are not read yet."""
        return len(self._rounds)

    def post(self, values: Row) -> None:
        """Post this worker's numbers in a new round."""
        self._num_posted += 1
        self._rounds.append(_Round(self._num_posted, values))
        if self._shared is not None:
            self._shared.write(self._num_posted, values)
        self._exchange()

    def is_complete(self) -> bool:
        """Whether all workers have posted in the oldest round that is not read, so that `read` would not wait."""
        self._exchange()
        oldest = self._rounds[0]
        if oldest.table is None and self._shared is not None:
            if self._firsts is None:
                rows = self._shared.rows(oldest.number)
                oldest.table = None if rows is None else torch.tensor(rows)[self._rows]
            elif not self._is_first:
                table = self._shared.table(oldest.number)
                if table is not None:
                    oldest.table = torch.frombuffer(bytearray(table), dtype=torch.int64).view(-1, NUM_VALUES)
        return oldest.table is not None

    def _exchange(self) -> None:
        """On the first worker of a node: exchange the rows of rounds in which its node is complete, without waiting."""
        if self._firsts is None or not self._is_first:
            return
        for one in self._rounds:
            if one.table is not None:
                continue
            if one.work is None:
                rows = [one.own] if self._shared is None else self._shared.rows(one.number)
                if rows is None:
                    return
                block = torch.zeros(self._shape[1:], dtype=torch.int64)
                block[: len(rows)] = torch.tensor(rows)
                one.blocks = torch.empty(self._shape, dtype=torch.int64)
                one.work = dist.all_gather([*one.blocks], block, group=self._firsts, async_op=True)
            if one.work.is_completed():
                self._receive(one)

    def _receive(self, one: _Round) -> None:
        assert one.work is not None
        assert one.blocks is not None
        one.work.wait()
        one.table = one.blocks.view(-1, NUM_VALUES)[self._rows]
        if self._shared is not None:
            self._shared.write_table(one.number, one.table.numpy().tobytes())

    def read(self) -> Tensor:
        """The numbers of all workers in the oldest round that is not read, a row each. It waits like a collective."""
        began_s = checked_s = time.monotonic()
        num_spins = 0
        while not self.is_complete():
            if self._rounds[0].work is not None:
                self._receive(self._rounds[0])  # waits
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
        table = self._rounds.popleft().table
        assert table is not None
        return table

    def _require_peers(self, waited_s: float) -> None:
        """Raise as Gloo does if another worker has left or does not post in time."""
        if self._has_lost():
            raise PeerMissingError("a worker of this node has ended", PeerLoss())
        if waited_s > self._timeout_s:
            text = f"waited {self._timeout_s:g} s for the workers of this node"
            raise PeerMissingError(text, PeerLoss(waited_s=self._timeout_s))

    def _has_lost(self) -> bool:
        assert self._shared is not None, "a node of one worker does not wait"
        number = self._rounds[0].number
        awaited = [index for index in range(self._shared.size) if self._shared.row(number, index) is None]
        left = [index for index in awaited if self._shared.has_left(index)]
        if any(self._shared.row(number, index) is None for index in left):  # not written just before it left
            return True
        waits_for_first = self._firsts is not None and not self._is_first
        return waits_for_first and self._shared.has_left(0) and self._shared.table(number) is None

    def close(self) -> None:
        """Close it, which the others notice."""
        if self._shared is not None:
            self._shared.close()
            self._shared = None


def _share(world: World, lag: int) -> tuple[SharedMemoryTable | None, list[list[int]]]:
    """Open the memory of this node, and list the ranks of each node. Either all nodes share memory or none."""
    name = ""
    if world.rank_info.local_rank == 0 and world.rank_info.local_size > 1:
        with contextlib.suppress(OSError):
            name = new_table_file()
    try:
        return _open_shared(world, name, lag)
    finally:
        if name:
            path_of(name).unlink(missing_ok=True)


def _open_shared(world: World, name: str, lag: int) -> tuple[SharedMemoryTable | None, list[list[int]]]:
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
            shared = SharedMemoryTable(gathered[mine[0]][2], mine.index(world.rank), len(mine), world.size, lag)
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
