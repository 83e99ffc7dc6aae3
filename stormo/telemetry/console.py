"""What the user sees of a run: plain lines in logs and pipes, `TerminalConsole` on a terminal.

The plain epoch line is a fixed format that scripts may parse.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from stormo.telemetry.record import DivergenceNoticed, EpochDone, Notice, Record, RunStarted, Sink
from stormo.telemetry.terminal import TerminalConsole
from stormo.telemetry.text import can_redraw, metric_order, write_text


def make_console(
    stream: TextIO, *, environ: Mapping[str, str] | None = None, clock: Callable[[], float] = time.monotonic
) -> Sink:
    """The console that suits the stream: live on a terminal, plain lines anywhere else."""
    variables = os.environ if environ is None else environ
    if can_redraw(stream, variables):
        return TerminalConsole(stream, environ=variables, clock=clock)
    return PlainConsole(stream)


class PlainConsole:
    """One line per epoch, flushed at once; stops when nobody reads any more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_off = False

    def write(self, record: Record) -> None:
        """Print the lines of one record, if it has any."""
        if isinstance(record, RunStarted):
            self._print(*record.explanation)
        elif isinstance(record, EpochDone):
            self._print(epoch_line(record))
        elif isinstance(record, Notice):
            self._print(f"Warning: {record.text}" if record.kind == "warning" else record.text)
        elif isinstance(record, DivergenceNoticed):
            self._print(record.text)

    def close(self) -> None:
        """Do nothing: every line is flushed, and the stream belongs to the caller."""

    def _print(self, *lines: str) -> None:
        for line in lines:
            self._is_off = self._is_off or not write_text(line + "\n", self._stream)


def epoch_line(record: EpochDone) -> str:
    """The fixed plain line of one epoch."""
    figures = [
        f"Cumulative Time = {record.cumulative_time_s:.3f}",
        f"Epoch Time = {record.epoch_time_s:.3f}",
        f"{record.unit.capitalize()}/sec = {record.units_per_s:.2f}",
    ]
    if record.mfu is not None and record.unit != "images":  # the line of images has a fixed format without it
        figures.append(f"MFU = {100 * record.mfu:.1f}%")
    for name in metric_order(record.validation):
        figures.append(f"Validation {name.replace('_', ' ').title()} = {record.validation[name]:.3f}")
    return f"Epoch = {record.epoch}: {', '.join(figures)}"
