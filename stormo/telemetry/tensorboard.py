"""Writes TensorBoard event files without TensorBoard: TFRecord framing around hand-encoded protobuf messages.

Formats: tensorflow's `record_writer.h` (length, masked CRC-32C, data, masked CRC-32C) and `event.proto`.
Scalars and images: no histograms or text.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path

from stormo.system.files import make_folder, open_to_append
from stormo.telemetry.folder import name_in_errors
from stormo.telemetry.media import png_size
from stormo.telemetry.record import DivergenceNoticed, EpochDone, Record, RunEnded, RunStarted, StepDone, ValueLogged

_CRC32C_POLYNOMIAL = 0x82F63B78  # Castagnoli, bits reversed
_CRC_MASK_DELTA = 0xA282EAD8
_SESSION_START = 1  # SessionLog.SessionStatus.START

# Protobuf wire types.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def _crc32c_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        remainder = byte
        for _ in range(8):
            remainder = (remainder >> 1) ^ (_CRC32C_POLYNOMIAL if remainder & 1 else 0)
        table.append(remainder)
    return tuple(table)


_CRC32C_TABLE = _crc32c_table()


class TensorBoardFile:
    """Writes the scalars of a run into a new event file, opened when the run starts or resumes."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._clock = clock
        self._file: FileIO | None = None
        self._num_opened = 0

    def write(self, record: Record) -> None:
        """Write the scalars of one record."""
        if isinstance(record, RunStarted):
            self._open(record.resumed_at_step)
        elif isinstance(record, ValueLogged) and record.file is not None:
            png = (self._folder.parent / record.file).read_bytes()
            self._write_summary(record.step, [_image(record.name, png)])
        elif isinstance(record, StepDone | EpochDone | ValueLogged):
            scalars = scalars_of(record)
            self._write_summary(record.step, [_scalar(tag, value) for tag, value in scalars.items()])
        elif isinstance(record, DivergenceNoticed) and record.rolled_back_to_step is not None:
            self._open(record.rolled_back_to_step)  # later steps are discarded, as by a resume
        elif isinstance(record, RunEnded):
            self.close()

    def close(self) -> None:
        """Close the event file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, resumed_at_step: int | None) -> None:
        self.close()
        make_folder(self._folder)
        now_unix_s = self._clock()
        # TensorBoard reads the files of a folder in the order of their names, hence the time first.
        name = f"events.out.tfevents.{int(now_unix_s):010d}.{socket.gethostname()}.{os.getpid()}.{self._num_opened}"
        self._file = open_to_append(self._folder / name)
        self._num_opened += 1
        # Only in files of version 2 does TensorBoard look at the session log below.
        self._write_event(0, _field(3, _BYTES, b"brain.Event:2"), time_unix_s=now_unix_s)
        # TensorBoard discards every point of the older files from the step of a session start onwards.
        # The point of the resumed step itself is still good, so the first discarded one is its successor.
        first_new_step = 0 if resumed_at_step is None else resumed_at_step + 1
        session_log = _field(1, _VARINT, _varint(_SESSION_START))
        self._write_event(first_new_step, _field(7, _BYTES, session_log), time_unix_s=now_unix_s)

    def _write_summary(self, step: int, values: Sequence[bytes]) -> None:
        summary = b"".join(_field(1, _BYTES, value) for value in values)
        self._write_event(step, _field(5, _BYTES, summary), time_unix_s=self._clock())

    def _write_event(self, step: int, content: bytes, *, time_unix_s: float) -> None:
        assert self._file is not None, "a record came before RunStarted or after RunEnded"
        event = _field(1, _FIXED64, struct.pack("<d", time_unix_s)) + _field(2, _VARINT, _varint(step)) + content
        with name_in_errors(self._folder):
            self._file.write(frame(event))  # unbuffered, as TensorBoard follows a running run


def frame(data: bytes) -> bytes:
    """One TFRecord: the length and the data, each followed by its masked checksum."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked(crc32c(length))) + data + struct.pack("<I", _masked(crc32c(data)))


def crc32c(data: bytes) -> int:
    """The CRC-32C (Castagnoli) checksum of RFC 3720."""
    remainder = 0xFFFFFFFF
    for byte in data:
        remainder = (remainder >> 8) ^ _CRC32C_TABLE[(remainder ^ byte) & 0xFF]
    return remainder ^ 0xFFFFFFFF


def _masked(checksum: int) -> int:
    """TFRecord's rotation, which keeps the checksum of data that contains checksums from being trivial."""
    return (((checksum >> 15) | (checksum << 17)) + _CRC_MASK_DELTA) & 0xFFFFFFFF


def _varint(number: int) -> bytes:
    assert number >= 0, "negative numbers have another encoding, which no field here needs"
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _field(number: int, wire_type: int, value: bytes) -> bytes:
    length = _varint(len(value)) if wire_type == _BYTES else b""
    return _varint(number << 3 | wire_type) + length + value


def _scalar(tag: str, value: float) -> bytes:
    """A `Summary.Value` with its `simple_value`."""
    try:
        simple_value = struct.pack("<f", value)
    except OverflowError:  # beyond single precision: what a conversion in C would give
        simple_value = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _field(1, _BYTES, tag.encode()) + _field(2, _FIXED32, simple_value)


def _image(tag: str, png: bytes) -> bytes:
    """A `Summary.Value` with its `image`."""
    width, height = png_size(png)
    sizes = _field(1, _VARINT, _varint(height)) + _field(2, _VARINT, _varint(width))
    return _field(1, _BYTES, tag.encode()) + _field(4, _BYTES, sizes + _field(4, _BYTES, png))


def scalars_of(record: StepDone | EpochDone | ValueLogged) -> dict[str, float]:
    """The figures of a record that were measured, by the names that every tool shows."""
    scalars: dict[str, float | None]
    match record:
        case ValueLogged():
            scalars = {record.name: record.value}
        case StepDone():
            scalars = {
                "train/loss": record.loss,
                "train/learning_rate": record.learning_rate,
                f"train/{record.unit}_per_second": record.units_per_s,
                "train/input_wait_fraction": record.input_wait_fraction,
                "train/mfu": record.mfu,
                "train/noise_scale": record.noise_scale,
                "train/power_w": record.power_w,
            }
        case EpochDone():
            scalars = {
                **{f"validation/{name}": value for name, value in record.validation.items()},
                "epoch/number": record.epoch,
                "epoch/train_loss": record.train_loss,
                f"epoch/{record.unit}_per_second": record.units_per_s,
                "epoch/input_wait_fraction": record.input_wait_fraction,
                "epoch/training_time_s": record.epoch_time_s,
                "epoch/validation_time_s": record.validation_time_s,
                "epoch/mfu": record.mfu,
                "epoch/peak_memory_bytes": record.peak_memory_bytes,
                "epoch/peak_reserved_memory_bytes": record.peak_reserved_memory_bytes,
                "epoch/energy_j": record.energy_j,
                "epoch/power_w": record.power_w,
            }
    return {tag: value for tag, value in scalars.items() if value is not None}
