"""JSON-lines files that may still grow: every read takes only what was appended since the one before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stormo.system.files import MAX_RECORDS_BYTES, BadFileError, lines_of, open_to_read

_HEAD_BYTES = 256  # by which a file that was written anew is told: its first line holds the time


class JsonLines:
    """The objects of one file in order; a last line that is not finished yet is left for the next read.

    Each has a number under `time_unix_s`. A line that is no such object is an error or, where not strict, counted and
    left out.

    Args:
        path: of the file.
        parse: the object of a line; None or a `ValueError` where it is none.
        strict: whether a damaged line is an error.
    """

    def __init__(self, path: Path, parse: Callable[[bytes], dict[str, Any] | None], *, strict: bool = True) -> None:
        self.path = path
        self.num_damaged = 0
        self._parse_line = parse
        self._strict = strict
        self._objects: list[dict[str, Any]] = []
        self._head = b""
        self._end = 0
        self._num_lines = 0

    def read(self) -> list[dict[str, Any]]:
        """All objects so far; none while there is no file."""
        try:
            file = open_to_read(self.path, MAX_RECORDS_BYTES)
        except FileNotFoundError:
            self._forget()
            return []
        with file:
            if file.read(len(self._head)) != self._head or file.seek(0, 2) < self._end:
                self._forget()  # written anew
            if self._end == 0:
                file.seek(0)
                self._head = file.read(_HEAD_BYTES)
            file.seek(self._end)
            rest = b""
            for line in lines_of(file, self.path):
                if not line.endswith(b"\n"):
                    rest = line
                    break
                self._num_lines += 1
                self._end += len(line)
                self._take(line)
        # The last line of a killed run may be whole but for its line break.
        try:
            last = self._parse(rest)
        except ValueError:
            last = None
        return self._objects if last is None else [*self._objects, last]

    def _forget(self) -> None:
        self._objects, self._head = [], b""
        self._end = self._num_lines = self.num_damaged = 0

    def _take(self, line: bytes) -> None:
        why = "it is no JSON object with the time of a record"
        try:
            found = self._parse(line)
        except ValueError as error:
            found, why = None, str(error)
        if found is not None:
            self._objects.append(found)
        elif self._strict:
            number = self._num_lines
            self._forget()  # the next read begins at the first line again, and must not take any twice
            raise BadFileError(self.path, f"line {number} was damaged after it was written ({why})")
        elif line.strip():
            self.num_damaged += 1

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        found = self._parse_line(line)
        return found if found is not None and isinstance(found.get("time_unix_s"), int | float) else None
