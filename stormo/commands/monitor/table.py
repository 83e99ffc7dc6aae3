"""The figures as CSV, one row for each device and time: the columns are the same on every node.

Whole lines only: the rows of one sample are one write at the end of the file, whatever ends the program.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import stat
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from stormo.errors import SettingError, StormoError

# Column -> key of the node's sample, and of a GPU's; None: it says nothing of the column, which is empty.
COLUMNS: dict[str, tuple[str | None, str | None]] = {
    "time_utc": (None, None),
    "time_unix_s": (None, None),
    "host": (None, None),
    "device": (None, None),
    "uuid": (None, "uuid"),
    "name": (None, "name"),
    "utilisation_fraction": ("cpu_fraction", "utilisation"),
    "memory_used_bytes": ("memory_used_bytes", "memory_used_bytes"),
    "memory_total_bytes": ("memory_total_bytes", "memory_total_bytes"),
    "power_w": ("cpu_power_w", "power_w"),
    "power_limit_w": (None, "power_limit_w"),
    "temperature_c": ("cpu_temperature_c", "temperature_c"),
    "clock_mhz": ("cpu_clock_mhz", "sm_clock_mhz"),
    "memory_clock_mhz": (None, "memory_clock_mhz"),
    "throttled": (None, "throttled"),
    "num_cpus": ("num_cpus", None),
    "load_1": ("load_1", None),
    "disk_read_bytes_per_s": ("disk_read_bytes_per_s", None),
    "disk_write_bytes_per_s": ("disk_write_bytes_per_s", None),
    "network_in_bytes_per_s": ("network_in_bytes_per_s", None),
    "network_out_bytes_per_s": ("network_out_bytes_per_s", None),
}
_DECIMALS = 4
_BLOCK_BYTES = 4096
_NOTHING = "none"  # in a column of words, where empty stands for "not told"


def rows(sample: Mapping[str, Any]) -> list[list[str]]:
    """The node's row, then one for each of its GPUs."""
    time_unix_s = round(sample["time_unix_s"], 3)
    at = datetime.fromtimestamp(time_unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    shared = {"time_utc": at, "time_unix_s": f"{time_unix_s:.3f}", "host": sample["host"]}
    found = []
    for which, device, figures in [(0, "node", sample), *((1, gpu_label(gpu), gpu) for gpu in sample["gpus"])]:
        cells: dict[str, Any] = {**shared, "device": device}
        for column, keys in COLUMNS.items():
            key = keys[which]
            if key is not None:
                cells[column] = figures[key]
        found.append([_cell(cells.get(column)) for column in COLUMNS])
    return found


def gpu_label(gpu: Mapping[str, Any]) -> str:
    """`gpu0`, and `mig0` for a part of it."""
    return f"{'mig' if str(gpu['uuid']).startswith('MIG-') else 'gpu'}{gpu['index']}"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return "; ".join(value) or _NOTHING
    return f"{value:.{_DECIMALS}f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _lines(cells: list[list[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(cells)
    return text.getvalue()


_HEADER = _lines([list(COLUMNS)])


class CsvStream:
    """Writes to standard output."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._write(_HEADER)

    def write(self, sample: Mapping[str, Any]) -> None:
        """Write the rows of one sample."""
        self._write(_lines(rows(sample)))

    def close(self) -> None:
        """Nothing to do: the stream belongs to the caller."""

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class CsvFile:
    """Appends to a file, which is made or has the same columns already."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Opened for reading too, a pipe would never tell that its reader has gone; so it is refused without one.
        mode = os.O_WRONLY | os.O_NONBLOCK if path.is_fifo() else os.O_RDWR | os.O_CREAT
        try:
            self._descriptor = os.open(path, mode | os.O_APPEND | os.O_CLOEXEC, 0o644)
            os.set_blocking(self._descriptor, True)
        except OSError as error:
            raise _cannot(path, f"it cannot be written ({error.strerror})", "name another file") from None
        try:
            self._continue()
        except BaseException:
            os.close(self._descriptor)
            raise

    def _continue(self) -> None:
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            self._append(_HEADER)  # a pipe: nothing to go on from
            return
        with open(os.dup(self._descriptor), "rb") as file:  # noqa: PTH123 - a descriptor has no path
            there = file.readline(len(_HEADER) + 1)  # of any file, however large and without lines
            if not there:
                self._append(_HEADER)
                return
            if there != _HEADER.encode():
                first = there.decode(errors="replace").strip()
                raise _cannot(
                    self._path,
                    f"it is there and begins with {first[:60]!r}, not with the {len(COLUMNS)} columns of this table",
                    "name another file, or one that stormo monitor began",
                )
            end = _end_of_last_line(file, status.st_size)
            if end < status.st_size:  # a full disk or a power failure has cut the last row
                os.ftruncate(self._descriptor, end)

    def write(self, sample: Mapping[str, Any]) -> None:
        """Append the rows of one sample, all or none."""
        self._append(_lines(rows(sample)))

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _append(self, text: str) -> None:
        data = text.encode()
        try:
            written = os.write(self._descriptor, data)
            if written < len(data):
                self._take_back(written)
                raise OSError("the disk is full")
        except OSError as error:
            raise StormoError(
                f"{self._path} cannot be written any more ({error.strerror or error}); what is in it is whole."
            ) from None

    def _take_back(self, num_bytes: int) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - num_bytes)


def _end_of_last_line(file: io.BufferedReader, size_bytes: int) -> int:
    """Where the last whole line ends; there is one, the header."""
    end = size_bytes
    while True:
        start = max(end - _BLOCK_BYTES, 0)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0 or start == 0:
            return start + found + 1
        end = start


def _cannot(path: Path, why: str, instead: str) -> SettingError:
    return SettingError(f"--csv {path} was set", why, instead)
