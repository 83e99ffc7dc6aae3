"""Appends JSON lines to a file whole: what a kill or a full disk cut short is taken away before the next ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from stormo.system.files import open_to_append, whole_lines_bytes, write_all


class LineFile:
    """A file with one writer at a time, opened with the first lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: FileIO | None = None
        self._size_bytes: int | None = None  # of the lines that were written whole

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write the lines; after an `OSError` none of them counts, and they may be handed in again."""
        # Whatever a sensor gives is written, as text if need be.
        data = b"".join(json.dumps(line, allow_nan=False, default=str).encode() + b"\n" for line in lines)
        try:
            if self._file is None:
                self._file = self._open()
            write_all(self._file, data)
        except OSError:
            self.close()
            raise
        self._size_bytes = (self._size_bytes or 0) + len(data)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> FileIO:
        opened = open_to_append(self.path)
        try:
            if self._size_bytes is None:
                self._size_bytes = whole_lines_bytes(opened)
            opened.truncate(self._size_bytes)
        except OSError:
            opened.close()
            raise
        return opened
