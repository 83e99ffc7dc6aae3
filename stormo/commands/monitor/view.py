"""A sample as people read it: a table that is renewed in place on a terminal, plain lines anywhere else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TextIO

from stormo.commands.monitor.lines import (
    Sample,
    clocks,
    cpu_details,
    figure,
    memory,
    plain_lines,
    product,
    rate,
    share,
    throttled,
    used_of,
)
from stormo.commands.monitor.table import gpu_label
from stormo.telemetry.text import can_redraw, discard, encodable, nobody_reads, steady_console, write_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live
    from rich.text import Text

_BAR_WIDTH = 10
_PLAIN_BLOCKS = str.maketrans("█▏▎▍▌▋▊▉", "#---####")


class View(Protocol):
    """Shows samples until it is closed."""

    def show(self, sample: Sample) -> bool:
        """Show one sample; False once nobody reads any more."""

    def close(self) -> None:
        """Leave the last sample standing."""


def make_view(stream: TextIO, every_s: float, reasons: Sequence[str]) -> View:
    """The view that suits the stream; `reasons` say why figures are missing."""
    if can_redraw(stream, os.environ):
        return TerminalView(stream, every_s, reasons)
    return PlainView(stream, reasons)


class PlainView:
    """A line for the node and one for every GPU, flushed at once."""

    def __init__(self, stream: TextIO, reasons: Sequence[str]) -> None:
        self._stream = stream
        self._is_read = write_text("".join(f"{reason}\n" for reason in reasons), stream)

    def show(self, sample: Sample) -> bool:
        """Print one sample."""
        if self._is_read:
            self._is_read = write_text("".join(f"{line}\n" for line in plain_lines(sample)), self._stream)
        return self._is_read

    def close(self) -> None:
        """Nothing to do: every line is flushed."""


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    drop_order: int  # what a narrow terminal loses first has the lowest
    value: Callable[[Sample], str]
    is_right: bool = True


_COLUMNS = (
    _Column("GPU", 9, gpu_label, is_right=False),
    _Column("name", 2, product, is_right=False),
    _Column("busy", 1, lambda gpu: bar(gpu["utilisation"]), is_right=False),
    _Column("use", 8, lambda gpu: share(gpu["utilisation"])),
    _Column("memory", 7, memory),
    _Column("power", 6, lambda gpu: used_of(gpu["power_w"], gpu["power_limit_w"], "W")),
    _Column("temp", 5, lambda gpu: figure(gpu["temperature_c"], "°C")),
    _Column("SM/mem MHz", 4, clocks),
)


def bar(fraction: float | None) -> str:
    """A share as a bar of fixed width."""
    if fraction is None:
        return " " * _BAR_WIDTH
    eighths = round(8 * _BAR_WIDTH * min(max(fraction, 0.0), 1.0))
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + " ▏▎▍▌▋▊▉"[rest] * (rest > 0)).ljust(_BAR_WIDTH, "·")


class TerminalView:
    """The newest sample, drawn over the one before."""

    def __init__(self, stream: TextIO, every_s: float, reasons: Sequence[str]) -> None:
        self._stream = stream
        self._every_s = every_s
        self._reasons = tuple(reasons)
        self._console = steady_console(stream, os.environ)
        self._live: Live | None = None

    def show(self, sample: Sample) -> bool:
        """Draw one sample."""
        from rich.live import Live

        try:
            drawn = self._draw(sample)
            if self._live is None:
                self._live = Live(drawn, console=self._console, auto_refresh=False)
                self._live.start(refresh=True)
            else:
                self._live.update(drawn, refresh=True)
        except OSError as error:
            if not nobody_reads(error):
                raise
            discard(self._stream)
            return False
        return True

    def close(self) -> None:
        """Leave the last sample standing; harmless when repeated."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _draw(self, sample: Sample) -> RenderableType:
        from rich.console import Group

        at = time.strftime("%H:%M:%S", time.localtime(sample["time_unix_s"]))
        head = f"{sample['host']} · {at} · every {self._every_s:g} s · Ctrl-C ends"
        parts: list[RenderableType] = [self._text(head, "bold"), self._text("")]
        if sample["gpus"]:
            parts += [self._gpus(sample["gpus"]), *self._slowed(sample["gpus"]), self._text("")]
        parts.append(self._node(sample))
        if self._reasons:
            parts += [self._text(""), *(self._text(reason, "dim") for reason in self._reasons)]
        return Group(*parts)

    def _gpus(self, gpus: Sequence[Sample]) -> RenderableType:
        from rich.table import Table

        cells = {column.title: [column.value(gpu) for gpu in gpus] for column in _COLUMNS}
        columns = list(_COLUMNS)
        while len(columns) > 1 and _width(columns, cells) > self._console.width:
            columns.remove(min(columns, key=lambda column: column.drop_order))
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        for column in columns:
            table.add_column(column.title, justify="right" if column.is_right else "left", no_wrap=True)
        for row, gpu in enumerate(gpus):
            style = "yellow" if gpu["throttled"] else ""
            table.add_row(*(self._text(cells[column.title][row], style) for column in columns))
        return table

    def _slowed(self, gpus: Sequence[Sample]) -> list[Text]:
        held = [gpu for gpu in gpus if gpu["throttled"]]
        return [self._text(f"{gpu_label(gpu)} is slowed by {throttled(gpu)}", "yellow") for gpu in held]

    def _node(self, sample: Sample) -> RenderableType:
        from rich.table import Table

        memory_share = sample["memory_used_bytes"] / sample["memory_total_bytes"]
        disk = f"read {rate(sample['disk_read_bytes_per_s'])}, written {rate(sample['disk_write_bytes_per_s'])}"
        network = f"in {rate(sample['network_in_bytes_per_s'])}, out {rate(sample['network_out_bytes_per_s'])}"
        table = Table.grid(padding=(0, 2, 0, 0))
        use = f"{bar(sample['cpu_fraction'])} {share(sample['cpu_fraction']):>5}  {', '.join(cpu_details(sample))}"
        filled = f"{bar(memory_share)} {share(memory_share):>5}  {memory(sample)}"
        for label, text in (("CPU", use), ("memory", filled), ("disk", disk), ("network", network)):
            table.add_row(self._text(label, "dim"), self._text(text))
        return table

    def _text(self, text: str, style: str = "") -> Text:
        from rich.text import Text

        knows_blocks = encodable("█▏", self._stream) == "█▏"
        return Text(encodable(text if knows_blocks else text.translate(_PLAIN_BLOCKS), self._stream), style=style)


def _width(columns: Sequence[_Column], cells: Mapping[str, Sequence[str]]) -> int:
    widths = [max(len(column.title), *(len(cell) for cell in cells[column.title])) for column in columns]
    return sum(widths) + 2 * len(columns) - 2
