"""Formats figures as users read them, and writes to streams: pipes, logs and terminals."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from stormo.system.files import printable

if TYPE_CHECKING:
    from rich.console import Console


_PLAIN_SIGNS = str.maketrans(
    {"×": "x", "–": "-", "—": "-", "·": "-", "…": "...", "→": "->", "≥": ">=", "≤": "<="}
    | {"±": "+/-", "°": "", "µ": "u"}
)


def run_reference(run_name: str, run_folder: str) -> str:
    """The run on a command line: its name if it is in `runs/`, else its path."""
    is_default_folder = Path(run_folder).resolve() == Path("runs", run_name).resolve()
    return shlex.quote(run_name if is_default_folder else run_folder)


def format_duration(seconds: float) -> str:
    """`0.52 s`, `24.5 s`, `12:34` (minutes), `1:02:03` (hours)."""
    if not math.isfinite(seconds):
        return "n/a"
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    return format_clock(seconds)


def format_time(seconds: float) -> str:
    """`35 µs`, `12.3 ms`, `2 s`."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        value = seconds * factor
        if value >= 0.9995:  # what would be rounded to 1000 of the smaller unit
            return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
    return "0"


def format_clock(seconds: float) -> str:
    """`0:09`, `12:34` (minutes), `1:02:03` (hours)."""
    minutes, rest_s = divmod(round(max(seconds, 0.0)), 60)
    hours, rest_minutes = divmod(minutes, 60)
    return f"{hours}:{rest_minutes:02d}:{rest_s:02d}" if hours else f"{rest_minutes}:{rest_s:02d}"


def format_rate(per_s: float) -> str:
    """`2,423`, and one decimal below a hundred."""
    return f"{per_s:,.0f}" if abs(per_s) >= 99.95 else f"{per_s:.1f}"


def format_bytes(num_bytes: float) -> str:
    """`12 B`, `1.5 kB`, `75.3 GB`: three digits, in powers of ten."""
    for unit, step in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= 0.9995 * step:  # which three digits would round up to the next unit
            figure = f"{num_bytes / step:.3g}" if num_bytes < 999.5 * step else f"{num_bytes / step:.0f}"
            return f"{figure} {unit}"
    return f"{num_bytes:.0f} B"


def format_figure(value: float) -> str:
    """Four decimals; large values in powers of ten, so that a diverging loss keeps its column."""
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.2e}"


def encodable(text: str, stream: TextIO) -> str:
    """The text as the stream can encode it, without control characters."""
    return _encodable(printable(text), stream)


def _encodable(text: str, stream: TextIO) -> str:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_PLAIN_SIGNS).encode(encoding, "replace").decode(encoding)
    return text


def write_text(text: str, stream: TextIO, *, is_coloured: bool = False) -> bool:
    """Write and flush; False once the reader has gone (`| head`), after which the stream leads nowhere.

    `is_coloured` keeps control characters, and is only for text without foreign parts.
    """
    try:
        stream.write(_encodable(text, stream) if is_coloured else encodable(text, stream))
        stream.flush()
    except OSError as error:
        if not nobody_reads(error):
            raise
        discard(stream)
        return False
    return True


def tell(sentence: str) -> None:
    """Print a message of stormo beside the user's output."""
    print(f"stormo: {sentence}", file=sys.stderr, flush=True)  # noqa: T201


def unit_rate(unit: str) -> str:
    """`images/s`, `tokens/s`."""
    return f"{unit}/s"


def format_share(share: float) -> str:
    """`41.3 %`."""
    return f"{100 * share:.1f} %"


def metric_order(validation: Mapping[str, float]) -> list[str]:
    """Loss and accuracy first, then the task's own metrics in its order."""
    known = [name for name in ("loss", "accuracy") if name in validation]
    return known + [name for name in validation if name not in known]


def nobody_reads(error: OSError) -> bool:
    """True for a pipe whose reader ended (`| head`), or a closed terminal."""
    return error.errno in (errno.EPIPE, errno.EIO)


def open_closed_streams() -> None:
    """Open standard streams that were closed (`>&-`) to nowhere, before another file takes their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        null_fd = os.open(os.devnull, os.O_RDWR)
        os.dup2(null_fd, number)
        if null_fd == number:
            os.set_inheritable(number, True)
        else:
            os.close(null_fd)
        setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def discard(stream: TextIO) -> None:
    """Lead a dead stream nowhere; otherwise Python fails when it flushes it at exit."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a file descriptor has nothing to redirect
        null_fd = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null_fd, stream.fileno())
        finally:
            os.close(null_fd)


def can_redraw(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """True where the stream is a terminal that can be redrawn."""
    return stream.isatty() and environ.get("TERM") not in ("dumb", "unknown")


def steady_console(stream: TextIO, environ: Mapping[str, str]) -> Console:
    """A console of rich that leaves the terminal intact when the process is killed."""
    from rich.console import Console

    class SteadyConsole(Console):
        """Never hides the cursor, so that a killed process cannot leave the terminal without one."""

        def show_cursor(self, show: bool = True) -> bool:
            return False

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError(errno.EPIPE, "the reader has gone")  # rich would end the program

    columns = environ.get("COLUMNS", "")
    return SteadyConsole(
        file=stream,
        force_terminal=True,
        width=int(columns) if columns.isdecimal() and int(columns) > 0 else None,
        no_color=bool(environ.get("NO_COLOR")),  # the convention: set and not empty
        highlight=False,
        markup=False,
        emoji=False,
    )
