"""Files that are there whole or not at all, and values as JSON knows them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stormo.system.files import create, temporary_name, write_all


def to_json(value: Any) -> Any:
    """The value with tuples as lists, paths as text and non-finite floats as null, which JSON does not know."""
    if isinstance(value, float):
        return float(value) if abs(value) < float("inf") else None  # not-a-number fails the comparison too
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_json(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file as `write_whole` does."""
    write_whole(path, json.dumps(to_json(value), indent=2, allow_nan=False) + "\n")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have what the system refuses inside name this path: of a file that is open it names none."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old or the new content, never a part, even after a power cut."""
    temporary = temporary_name(path)
    try:
        with naming(path), create(temporary) as file:
            write_all(file, text.encode())
            os.fsync(file.fileno())  # before the rename, or the new name could point at an empty file
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder_fd = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder_fd)  # makes the rename itself durable
    finally:
        os.close(folder_fd)
