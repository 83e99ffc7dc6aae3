"""Memory that the workers of a node share: each has a line in it that it alone writes, and all of them read.

No message is sent and no thread is woken, which matters where workers compute on all cores of their node. A line and
its check are read at once or not at all, whatever order a processor makes its writes visible in.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import struct
import tempfile
import zlib
from pathlib import Path

NUM_VALUES = 3
_LINE = struct.Struct(f"=q{NUM_VALUES}q")  # the round that it belongs to, and what it says
_CHECK = struct.Struct("=I")
_TABLE_HEAD = struct.Struct("=qq")  # the round, and the check
_LINE_BYTES = 64  # of its own cache line
_SLOTS = 2  # a line is kept while a slower worker still reads it
_MEMORY = "/dev/shm"
_PREFIX = "stormo-"
_NAME = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")  # as tempfile makes them
Line = tuple[int, ...]


def new_page() -> str:
    """The name of an empty file in memory. Once all have opened it, it can be removed."""
    descriptor, path = tempfile.mkstemp(prefix=_PREFIX, dir=_folder())
    os.close(descriptor)
    return Path(path).name


def path_of(name: str) -> Path:
    """Where the file of this name is: another worker tells a name, never a path."""
    if not _NAME.fullmatch(name):
        raise FileNotFoundError(name)
    return Path(_folder()) / name


def _folder() -> str:
    return _MEMORY if os.access(_MEMORY, os.W_OK) else tempfile.gettempdir()


class Page:
    """The memory, as one worker of the node has it.

    Args:
        name: of the file, the same on all workers of the node.
        index: of this worker among them.
        size: how many they are.
        num_workers: of all nodes, for whom there is a table in it that the node's first worker writes.
    """

    def __init__(self, name: str, index: int, size: int, num_workers: int) -> None:
        self._index, self.size = index, size
        self._head_at = _SLOTS * size * _LINE_BYTES
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

    def write(self, number: int, values: Line) -> None:
        """Say something in a round; it may be overwritten in the next but one."""
        line = _LINE.pack(number, *values)
        at = self._at(number, self._index)
        self._memory[at : at + _LINE.size + _CHECK.size] = line + _CHECK.pack(zlib.crc32(line))

    def lines(self, number: int) -> list[Line] | None:
        """What all workers of the node have said in a round; None until the last one has."""
        found: list[Line] = []
        for index in range(self.size):
            line = self.line(number, index)
            if line is None:
                return None
            found.append(line)
        return found

    def line(self, number: int, index: int) -> Line | None:
        """What one of them has said in a round, if it has."""
        at = self._at(number, index)
        line = self._memory[at : at + _LINE.size]
        (check,) = _CHECK.unpack(self._memory[at + _LINE.size : at + _LINE.size + _CHECK.size])
        if check != zlib.crc32(line):
            return None
        its_round, *values = _LINE.unpack(line)
        return tuple(values) if its_round == number else None

    def _at(self, number: int, index: int) -> int:
        return (number % _SLOTS * self.size + index) * _LINE_BYTES

    def write_table(self, number: int, table: bytes) -> None:
        """Say to the workers of the node what all workers of all nodes have said in a round."""
        self._memory[self._table_at : self._end] = table
        self._memory[self._head_at : self._table_at] = _TABLE_HEAD.pack(number, _check_of(table, number))

    def table(self, number: int) -> bytes | None:
        """What `write_table` was told in a round; None until it was."""
        its_round, check = _TABLE_HEAD.unpack(self._memory[self._head_at : self._table_at])
        if its_round != number:
            return None
        table = self._memory[self._table_at : self._end]
        return table if check == _check_of(table, number) else None

    def has_left(self, index: int) -> bool:
        """Whether a worker of the node has closed the page, or ended."""
        if index == self._index:
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, index)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, index)
        return True

    def close(self) -> None:
        """Leave the others."""
        self._memory.close()
        os.close(self._file)


def _check_of(table: bytes, number: int) -> int:
    return zlib.crc32(table, number & 0xFFFFFFFF)
