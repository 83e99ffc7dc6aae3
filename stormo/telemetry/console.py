"""What the user sees of a run: plain lines in logs and pipes, a live view on a terminal.

The plain epoch line is a fixed format that scripts may parse. The live view is redrawn only when a record comes, at
most ten times a second, without a thread. The cursor is never hidden, so that a kill cannot leave it hidden.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from stormo.telemetry.record import (
    CheckpointSaved,
    DivergenceNoticed,
    EpochDone,
    Notice,
    Record,
    RunEnded,
    RunStarted,
    Sink,
    StepDone,
    ValidationProgress,
)
from stormo.telemetry.runs_folder import ENDS
from stormo.telemetry.text import (
    can_redraw,
    discard,
    encodable,
    format_clock,
    format_duration,
    format_figure,
    format_rate,
    format_share,
    metric_order,
    nobody_reads,
    run_reference,
    steady_console,
    unit_rate,
    write_text,
)

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

_REDRAW_INTERVAL_S = 0.1
_RATE_SMOOTHING = 0.3  # weight of the newest rate in the time left
_INPUT_WAIT_SHOWN_ABOVE = 0.05
_NARROW = 40
_MIN_BAR_WIDTH = 5  # every figure fits at 80 columns
_SHORT_RATES = {"images": "img/s", "tokens": "tok/s"}


def make_console(
    stream: TextIO, *, environ: Mapping[str, str] | None = None, clock: Callable[[], float] = time.monotonic
) -> Sink:
    """The console that suits the stream: live on a terminal, plain lines anywhere else."""
    variables = os.environ if environ is None else environ
    if can_redraw(stream, variables):
        return TerminalConsole(stream, environ=variables, clock=clock)
    return PlainConsole(stream)


class PlainConsole:
    """One line per epoch, flushed at once; stops when the reader has gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_off = False

    def write(self, record: Record) -> None:
        """Print the lines of one record, if it has any."""
        if isinstance(record, RunStarted):
            self._print(*record.explanation, f"run folder: {record.run_folder}")
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
    figures += metric_texts(record.validation)
    return f"Epoch = {record.epoch}: {', '.join(figures)}"


def metric_texts(validation: Mapping[str, float]) -> list[str]:
    """The metrics of a validation, as in the plain line of an epoch."""
    return [f"Validation {n.replace('_', ' ').title()} = {validation[n]:.3f}" for n in metric_order(validation)]


class TerminalConsole:
    """The plan in a panel, a table with one row per epoch, and one live line for the current epoch."""

    def __init__(self, stream: TextIO, *, environ: Mapping[str, str], clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock
        self._console = steady_console(stream, environ)
        self._is_unicode = encodable("━╸─", stream) == "━╸─"
        self._live: Live | None = None
        self._run: RunStarted | None = None
        self._columns: list[_Column] = []
        self._samples_per_s = 0.0  # smoothed
        self._drawn_at_s = -math.inf
        self._checkpoint_path: str | None = None
        self._is_off = False
        # A caller that fails without closing would leave half a line and a redirected stdout.
        atexit.register(self.close)

    def write(self, record: Record) -> None:
        """Show one record."""
        if self._is_off:
            return
        try:
            self._show(record)
        except OSError as error:
            if not nobody_reads(error):
                raise
            self._is_off = True
            discard(self._stream)
            self.close()

    def close(self) -> None:
        """Remove the live line and restore the terminal; may be called again."""
        atexit.unregister(self.close)
        live, self._live = self._live, None
        if live is None:
            return
        try:
            live.stop()
        except OSError as error:
            if not nobody_reads(error):
                raise

    def _show(self, record: Record) -> None:
        match record:
            case RunStarted():
                self._start(record)
            case StepDone():
                self._show_step(record)
            case ValidationProgress():
                self._show_validation(record)
            case EpochDone():
                self._show_epoch(record)
            case Notice():
                self._show_notice(record)
            case DivergenceNoticed():
                self._console.print(self._text(record.text, "bold red"))
            case CheckpointSaved():
                self._checkpoint_path = record.path
            case RunEnded():
                self.close()
                self._show_summary(record.summary)

    def _start(self, record: RunStarted) -> None:
        from rich import box
        from rich.live import Live
        from rich.panel import Panel
        from rich.table import Table

        self._run = record
        title = self._text(f"{record.run_name} · {record.task}", "bold")
        body = Table.grid(padding=(0, 2, 0, 0))  # a long reason wraps within its column
        for line in record.explanation:
            label, _, reason = line.partition("  ")
            body.add_row(self._text(label), self._text(reason.lstrip()))
        self._console.print(
            Panel(body, title=title, title_align="left", box=box.ROUNDED, border_style="dim", expand=False)
        )
        # Output of other code appears above the live line where it shares the stream.
        is_shared = self._stream in (sys.stdout, sys.stderr)
        self._live = Live(
            self._text("waiting for the first steps", "dim"),
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=is_shared,
            redirect_stderr=is_shared,
        )
        self._live.start(refresh=True)

    def _show_step(self, record: StepDone) -> None:
        assert self._run is not None, "a step came before RunStarted"
        if record.samples_per_s > 0 and math.isfinite(record.samples_per_s):
            change = record.samples_per_s - self._samples_per_s
            self._samples_per_s += change * (_RATE_SMOOTHING if self._samples_per_s else 1.0)
        if not self._may_redraw():
            return
        num_steps = record.steps_in_epoch or self._run.steps_per_epoch or 1
        fraction = min(record.step_in_epoch / num_steps, 1.0)
        parts = [
            _Part(text=f"{math.floor(100 * fraction):3d} %", drop_order=1),
            _Part(text=f"{record.step_in_epoch:{len(str(num_steps))}d}/{num_steps}", drop_order=2),
            _Part(text=f"{format_rate(record.units_per_s)} {_short_rate(record.unit)}", drop_order=4),
            _Part(text=f"loss {format_figure(record.loss)}", drop_order=3),
        ]
        if record.mfu is not None and record.unit != "images":
            parts.append(_Part(text=f"MFU {100 * record.mfu:.0f} %", drop_order=2))
        batch = record.global_batch_size or self._run.global_batch_size
        if self._samples_per_s and batch:
            left_s = (num_steps - record.step_in_epoch) * batch / self._samples_per_s
            parts.append(_Part(text=f"ETA {format_clock(left_s)}", drop_order=6))
        if record.input_wait_fraction > _INPUT_WAIT_SHOWN_ABOVE:
            wait = f"wait {100 * record.input_wait_fraction:.0f} %"
            parts.append(_Part(text=wait, drop_order=5, style="yellow"))
        self._draw(f"epoch {record.epoch}/{self._run.epochs}", fraction, parts, "green")

    def _show_validation(self, record: ValidationProgress) -> None:
        if not self._may_redraw():
            return
        fraction = min(record.done / max(record.total, 1), 1.0)
        parts = [
            _Part(text=f"{math.floor(100 * fraction):3d} %", drop_order=1),
            _Part(text=f"{record.done:{len(str(record.total))}d}/{record.total}", drop_order=2),
        ]
        self._draw("validation", fraction, parts, "cyan")

    def _show_epoch(self, record: EpochDone) -> None:
        from rich.text import Text

        assert self._run is not None, "an epoch came before RunStarted"
        if self._live is not None:
            # The bar of a finished epoch must not be drawn again below its row.
            self._live.update(Text(""), refresh=True)
        if not self._columns:
            # The first epoch shows which metrics the task has; the widths stay the same from here on.
            self._columns = _choose_columns(record, self._run.epochs or 0, self._console.width)
            titles = " ".join(column.title.rjust(column.width) for column in self._columns)
            self._console.print(self._text(titles, "bold"), no_wrap=True, crop=True)
            rule = " ".join(("─" if self._is_unicode else "-") * column.width for column in self._columns)
            self._console.print(Text(rule, "dim"), no_wrap=True, crop=True)
        row = " ".join(column.value(record).rjust(column.width) for column in self._columns)
        self._console.print(self._text(row), no_wrap=True, crop=True)

    def _show_notice(self, record: Notice) -> None:
        styles = {"warning": "yellow", "stop": "bold"}
        prefix = "Warning: " if record.kind == "warning" else ""
        self._console.print(self._text(prefix + record.text, styles.get(record.kind, "")))

    def _show_summary(self, summary: Mapping[str, Any]) -> None:
        from rich.table import Table

        grid = Table.grid(padding=(0, 2))
        is_narrow = self._console.width < _NARROW
        for label, value in self._summary_rows(summary):
            if is_narrow:  # the value below its label, as there is no room beside it
                grid.add_row(self._text(label, "dim"))
                grid.add_row(self._text(value))
            else:
                grid.add_row(self._text(label, "dim"), self._text(value))
        grid.columns[0].no_wrap = not is_narrow
        grid.columns[-1].overflow = "fold"
        self._console.print()
        self._console.print(grid)

    def _summary_rows(self, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
        stopped_by = str(summary.get("stopped_by") or "unknown")
        rows = [("end", ENDS.get(stopped_by, stopped_by))]
        unit = str(summary.get("unit", "images"))
        figures: list[tuple[str, str, Callable[[float], str]]] = [
            ("accuracy", "validation_accuracy", lambda value: f"{value:.4f}"),
            ("loss", "validation_loss", format_figure),
            ("training time", "train_time_s", format_duration),
            ("whole time", "wall_time_s", format_duration),
            (unit_rate(unit), f"{unit}_per_s", format_rate),
            ("MFU", "mfu", format_share),
            ("time to target", "time_to_target_s", format_duration),
            ("noise scale", "noise_scale", lambda value: f"{value:,.0f} samples"),
        ]
        rows += [(label, show(summary[key])) for label, key, show in figures if summary.get(key) is not None]
        if self._checkpoint_path is not None:
            rows.append(("checkpoint", self._checkpoint_path))
        if self._run is not None:
            rows.append(("run folder", self._run.run_folder))
            rows.append(("see it with", f"stormo show {run_reference(self._run.run_name, self._run.run_folder)}"))
        return rows

    def _may_redraw(self) -> bool:
        now_s = self._clock()
        if self._live is None or now_s - self._drawn_at_s < _REDRAW_INTERVAL_S:
            return False
        self._drawn_at_s = now_s
        return True

    def _draw(self, label: str, fraction: float, parts: list[_Part], style: str) -> None:
        from rich.text import Text

        assert self._live is not None
        # One column stays free: some terminals wrap when the last one is written.
        room = self._console.width - 1 - len(label) - 1 - _MIN_BAR_WIDTH
        kept = sorted(parts, key=lambda part: part.drop_order)
        while kept and sum(len(part.text) + 2 for part in kept) > room:
            kept.pop(0)
        bar_width = _MIN_BAR_WIDTH + max(room - sum(len(part.text) + 2 for part in kept), 0)
        filled, empty = ("━", "─") if self._is_unicode else ("#", "-")
        num_filled = math.floor(bar_width * fraction)
        line = Text(label + " ", no_wrap=True, overflow="crop")
        line.append(filled * num_filled, style)
        line.append(empty * (bar_width - num_filled), "dim")
        for part in parts:
            if part in kept:
                line.append("  ").append(part.text, part.style)
        self._live.update(line, refresh=True)

    def _text(self, text: str, style: str = "") -> Text:
        from rich.text import Text

        return Text(encodable(text, self._stream), style)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One figure of the live line; the lowest `drop_order` goes first when the line is too long."""

    text: str
    drop_order: int
    style: str = ""


@dataclass(frozen=True, kw_only=True)
class _Column:
    """One column of the epochs' table; the lowest `drop_order` goes first when the terminal is too narrow."""

    title: str
    width: int
    drop_order: int
    value: Callable[[EpochDone], str]


def _choose_columns(first: EpochDone, num_epochs: int, terminal_width: int) -> list[_Column]:
    """The columns for the metrics the task has, as many as fit."""
    epoch_width = max(5, 2 * len(str(num_epochs)) + 1)
    columns = [
        _Column(title="epoch", width=epoch_width, drop_order=9, value=lambda record: f"{record.epoch}/{num_epochs}"),
        _Column(title="train loss", width=10, drop_order=4, value=lambda record: format_figure(record.train_loss)),
    ]
    for name in metric_order(first.validation):
        title, drop_order = {"loss": ("val loss", 7), "accuracy": ("accuracy", 8)}.get(name, (name, 1))
        columns.append(_Column(title=title, width=max(8, len(title)), drop_order=drop_order, value=_metric_value(name)))
    columns += [
        _Column(
            title=unit_rate(first.unit),
            width=max(9, len(unit_rate(first.unit))),
            drop_order=6,
            value=lambda record: format_rate(record.units_per_s),
        ),
        _Column(title="epoch time", width=10, drop_order=5, value=lambda record: format_duration(record.epoch_time_s)),
        _Column(
            title="total time", width=10, drop_order=3, value=lambda record: format_duration(record.cumulative_time_s)
        ),
        _Column(title="lr", width=9, drop_order=2, value=lambda record: f"{record.learning_rate:.3g}"),
    ]
    if first.mfu is not None and first.unit != "images":
        columns.insert(-3, _Column(title="MFU", width=7, drop_order=4, value=_mfu_value))
    while len(columns) > 1 and sum(column.width + 1 for column in columns) - 1 > terminal_width:
        columns.remove(min(columns, key=lambda column: column.drop_order))
    return columns


def _short_rate(unit: str) -> str:
    return _SHORT_RATES.get(unit, unit_rate(unit))


def _mfu_value(record: EpochDone) -> str:
    return "n/a" if record.mfu is None else format_share(record.mfu)


def _metric_value(name: str) -> Callable[[EpochDone], str]:
    return lambda record: format_figure(record.validation[name]) if name in record.validation else "n/a"
