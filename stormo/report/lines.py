"""JSON-lines files that may still grow: every read takes only what was appended since the one before."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from stormo.errors import StormoError

_HEAD_BYTES = 256  # by which a file that was written anew is told: its first line holds the time


class JsonLines:
    """The objects of one file in order; a last line that is not finished yet is left for the next read.

    Each has a text under `key` and a number under `time_unix_s`. A line that is no such object is an error or, where
    not strict, counted and left out.
    """

    def __init__(self, path: Path, key: str, *, strict: bool = True) -> None:
        self.path = path
        self.num_damaged = 0
        self._key = key
        self._strict = strict
        self._objects: list[dict[str, Any]] = []
        self._head = b""
        self._end = 0
        self._num_lines = 0

    def read(self) -> list[dict[str, Any]]:
        """All objects so far; none while there is no file."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            self._forget()
            return []
        with file:
            if file.read(len(self._head)) != self._head or file.seek(0, 2) < self._end:
                self._forget()  # written anew
            file.seek(self._end)
            new = file.read()
        if self._end == 0:
            self._head = new[:_HEAD_BYTES]
        whole, newline, rest = new.rpartition(b"\n")
        for line in whole.split(b"\n") if newline else ():
            self._num_lines += 1
            self._take(line)
        self._end += len(whole) + len(newline)
        # The last line of a killed run may be whole but for its line break.
        last = self._parse(rest)
        return self._objects if last is None else [*self._objects, last]

    def _forget(self) -> None:
        self._objects, self._head = [], b""
        self._end = self._num_lines = self.num_damaged = 0

    def _take(self, line: bytes) -> None:
        found = self._parse(line)
        if found is not None:
            self._objects.append(found)
        elif self._strict:
            number = self._num_lines
            self._forget()  # the next read begins at the first line again, and must not take any twice
            raise StormoError(
                f"{self.path}: line {number} is not a JSON object with {self._key} and time_unix_s; the file was "
                "damaged after it was written."
            )
        elif line.strip():
            self.num_damaged += 1

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        try:
            found = json.loads(line)
        except ValueError:
            return None
        if not isinstance(found, dict) or not isinstance(found.get(self._key), str):
            return None
        time_unix_s = found.get("time_unix_s")
        return found if isinstance(time_unix_s, int | float) and math.isfinite(time_unix_s) else None
