"""A few numbers from every worker to every worker, in rounds: written without waiting, read when they are needed.

Workers of a node write to shared memory, each to a row of its own. No message is sent and no thread is woken, which
matters where workers compute on all cores. A row and its checksum are read at once or not at all, whatever order a
processor makes its writes visible in. With several nodes, the first worker of each exchanges the rows of its node with
the others', so that the number of messages grows with the nodes and not with the workers. Where a node's workers share
no memory, as in containers of their own, every worker stands for itself.
"""

from __future__ import annotations

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
from stormo.launch.peer_loss import PeerLoss

if TYPE_CHECKING:
    from stormo.distributed.world import World

NUM_VALUES = 3
_ROW = struct.Struct(f"=q{NUM_VALUES}q")  # the round, and the values
_CHECK = struct.Struct("=I")
_TABLE_HEAD = struct.Struct("=qq")  # the round, and the check
_ROW_BYTES = 64  # a cache line of its own
_SLOTS = 2  # a row is kept while a slower worker still reads it
_MEMORY = "/dev/shm"
_PREFIX = "stormo-"
_NAME = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")  # as tempfile makes them
Row = tuple[int, ...]
_EAGER_LOOKS = 100  # before the first sleep
_SLEEP_SHARE = 0.02  # of what was waited already: hardly later for it, and hardly ever awake in a long wait
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 20e-6, 20e-3
_LOOK_AFTER_OTHERS_S = 0.1


def new_table_file() -> str:
    """Make an empty file in memory; its name. Once all have opened it, it can be removed."""
    descriptor, path = tempfile.mkstemp(prefix=_PREFIX, dir=_folder())
    os.close(descriptor)
    return Path(path).name


def path_of(name: str) -> Path:
    """The path of the file of this name: another worker tells a name, never a path."""
    if not _NAME.fullmatch(name):
        raise FileNotFoundError(name)
    return Path(_folder()) / name


def _folder() -> str:
    return _MEMORY if os.access(_MEMORY, os.W_OK) else tempfile.gettempdir()


class SharedMemoryTable:
    """The shared memory of a node, as one of its workers has it.

    Args:
        name: of the file, the same on all workers of the node.
        index: of this worker among them.
        size: how many they are.
        num_workers: of all nodes; the node's first worker writes a table of them all.
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
            # Not just a size: a write to memory that is not there would end the process by a signal.
            os.posix_fallocate(self._file, 0, self._end)
            self._memory = mmap.mmap(self._file, self._end)
            # Held until this process ends, in whatever way: so the others see that it has.
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, index)
        except BaseException:
            os.close(self._file)
            raise

    def write(self, number: int, values: Row) -> None:
        """Write this worker's row of a round; it may be overwritten in the next but one."""
        row = _ROW.pack(number, *values)
        at = self._at(number, self._index)
        self._memory[at : at + _ROW.size + _CHECK.size] = row + _CHECK.pack(zlib.crc32(row))

    def rows(self, number: int) -> list[Row] | None:
        """The rows of all workers of the node in a round; None until the last one is there."""
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
        """Give the workers of the node the rows of all nodes in a round."""
        self._memory[self._table_at : self._end] = table
        self._memory[self._head_at : self._table_at] = _TABLE_HEAD.pack(number, _check_of(table, number))

    def table(self, number: int) -> bytes | None:
        """What `write_table` wrote in a round; None until it did."""
        its_round, check = _TABLE_HEAD.unpack(self._memory[self._head_at : self._table_at])
        if its_round != number:
            return None
        table = self._memory[self._table_at : self._end]
        return table if check == _check_of(table, number) else None

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
        """Close it; the others see that."""
        self._memory.close()
        os.close(self._file)


def _check_of(table: bytes, number: int) -> int:
    return zlib.crc32(table, number & 0xFFFFFFFF)


class StatusTable:
    """Where a worker posts its numbers and reads those of all. All workers make it, and go through the same rounds."""

    def __init__(self, world: World) -> None:
        self._timeout_s = world.timeout.total_seconds()
        self._shared, nodes = _share(world)
        self._is_first = world.rank in [ranks[0] for ranks in nodes]
        most = max(len(ranks) for ranks in nodes)
        self._blocks = torch.empty(len(nodes), most, NUM_VALUES, dtype=torch.int64)  # the rows of each node
        places = {rank: index * most + local for index, ranks in enumerate(nodes) for local, rank in enumerate(ranks)}
        self._rows = torch.tensor([places[rank] for rank in range(world.size)])  # of the workers, in the blocks
        self._firsts: dist.ProcessGroup | None = None
        if len(nodes) > 1:
            self._firsts = dist.new_group([ranks[0] for ranks in nodes], timeout=world.timeout, backend="gloo")
        self._round = 0
        self._own: Row = (0,) * NUM_VALUES
        self._block: Tensor | None = None  # of this node, while it is on its way to the others
        self._work: dist.Work | None = None
        self._table: Tensor | None = None  # of this round, once it is known

    def post(self, values: Row) -> None:
        """Post this worker's numbers in a new round; the last round must have been read."""
        self._round += 1
        self._own, self._table = values, None
        if self._shared is not None:
            self._shared.write(self._round, values)
        if self._firsts is not None:
            self.is_complete()  # what goes to other nodes leaves at once, where it can

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
            # New ones every time: the last exchange may still be read from by a slower worker.
            self._blocks = torch.empty_like(self._blocks)
            self._work = dist.all_gather([*self._blocks], self._block, group=self._firsts, async_op=True)
        if self._work is not None and not self._work.is_completed():
            return False
        self._receive()
        return True

    def _take_table(self) -> bool:
        assert self._shared is not None, "a worker alone is the first"
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
        """The numbers of all workers, a row each; waits for them as long as a collective would."""
        began_s = looked_s = time.monotonic()
        num_looks = 0
        while not self.is_complete():
            if self._work is not None:
                self._receive()  # waits
                break
            num_looks += 1
            if num_looks < _EAGER_LOOKS:
                os.sched_yield()
                continue
            now_s = time.monotonic()
            time.sleep(min(max(_SLEEP_SHARE * (now_s - began_s), _SHORTEST_SLEEP_S), _LONGEST_SLEEP_S))
            if now_s - looked_s > _LOOK_AFTER_OTHERS_S:
                looked_s = now_s
                self._require_others(now_s - began_s)
        assert self._table is not None
        return self._table

    def _require_others(self, waited_s: float) -> None:
        """Raise what Gloo would where another worker has left, or does not come."""
        if self._has_lost():
            raise PeerMissingError("a worker of this node has ended", PeerLoss())
        if waited_s > self._timeout_s:
            text = f"waited {self._timeout_s:g} s for the workers of this node"
            raise PeerMissingError(text, PeerLoss(waited_s=self._timeout_s))

    def _has_lost(self) -> bool:
        assert self._shared is not None, "a worker alone waits for none of its node"
        awaited = [index for index in range(self._shared.size) if self._shared.row(self._round, index) is None]
        left = [index for index in awaited if self._shared.has_left(index)]
        if any(self._shared.row(self._round, index) is None for index in left):  # not written just before it left
            return True
        waits_for_first = self._firsts is not None and not self._is_first
        return waits_for_first and self._shared.has_left(0) and self._shared.table(self._round) is None

    def close(self) -> None:
        """Close it; the others see that."""
        if self._shared is not None:
            self._shared.close()
            self._shared = None


def _share(world: World) -> tuple[SharedMemoryTable | None, list[list[int]]]:
    """Open the memory of this node; and the ranks that share one, for each. Either all nodes have one, or none has."""
    place = world.place
    name = ""
    if place.local_rank == 0 and place.local_size > 1:
        try:
            name = new_table_file()
        except OSError:
            name = ""  # not to be opened
    try:
        return _open_shared(world, name)
    finally:
        if name:
            path_of(name).unlink(missing_ok=True)


def _open_shared(world: World, name: str) -> tuple[SharedMemoryTable | None, list[list[int]]]:
    place = world.place
    told = world.broadcast_object(world.gather_objects([place.node_id, place.local_rank, name]))
    nodes: dict[int, list[int]] = {}
    for rank, (node, _, _) in enumerate(told):
        nodes.setdefault(node, []).append(rank)
    for ranks in nodes.values():
        ranks.sort(key=lambda rank: int(told[rank][1]))
    mine = nodes[place.node_id]
    shared = None
    if len(mine) > 1:
        try:
            shared = SharedMemoryTable(told[mine[0]][2], mine.index(world.rank), len(mine), world.size)
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
