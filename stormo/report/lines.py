"""JSON-lines files that may still grow: every read takes only what was appended since the one before."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from stormo.errors import StormoError


class JsonLines:
    """The objects of one file in order; a last line that is not finished yet is left for the next read."""

    def __init__(self, path: Path, *, keys: Collection[str] = (), strict: bool = True) -> None:
        self.path = path
        self.num_damaged = 0
        self._keys = keys  # that every object has
        self._strict = strict
        self._forget()

    def read(self) -> list[dict[str, Any]]:
        """All objects so far; none while there is no file."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            self._forget()
            return []
        with file:
            if file.seek(0, 2) < self._end:
                self._forget()  # written anew
            file.seek(self._end)
            new = file.read()
        whole, newline, rest = new.rpartition(b"\n")
        for line in whole.split(b"\n") if newline else ():
            self._num_lines += 1
            self._take(line)
        self._end += len(whole) + len(newline)
        # The last line of a killed run may be whole but for its line break.
        last = self._parse(rest)
        return self._objects if last is None else [*self._objects, last]

    def _forget(self) -> None:
        self._objects: list[dict[str, Any]] = []
        self._end = 0
        self._num_lines = 0
        self.num_damaged = 0

    def _take(self, line: bytes) -> None:
        found = self._parse(line)
        if found is not None:
            self._objects.append(found)
        elif self._strict:
            content = " with ".join(["a JSON object", *([" and ".join(self._keys)] if self._keys else [])])
            raise StormoError(
                f"{self.path}: line {self._num_lines} is not {content}; the file was damaged after it was written."
            )
        elif line.strip():
            self.num_damaged += 1

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        try:
            found = json.loads(line)
        except ValueError:
            return None
        return found if isinstance(found, dict) and all(key in found for key in self._keys) else None
