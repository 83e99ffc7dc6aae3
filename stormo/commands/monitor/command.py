"""The verb `monitor`: reads its options, samples the node at a steady pace, shows, writes, and sums up at the end."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from stormo.commands.monitor.summary import Summary
from stormo.commands.monitor.table import CsvFile, CsvStream, gpu_label
from stormo.commands.monitor.view import View, make_view
from stormo.config.options import Parser
from stormo.energy.meter import own_meter
from stormo.energy.nvml import Device, NvmlUnavailableError, open_nvml
from stormo.energy.vitals import Vitals
from stormo.errors import SettingError
from stormo.telemetry.text import write_text

_SHORTEST_S = 0.1  # drivers renew their figures about ten times a second
_LONGEST_S = 86400.0
_FIRST_S = 0.2  # rates need two readings: so soon after the start the first sample is shown
_ENDING = {signal.SIGINT, signal.SIGTERM}
_WORDS = {"cpu_power_w": "CPU power", "cpu_clock_mhz": "CPU clock", "cpu_temperature_c": "CPU temperature"}


def main(arguments: Sequence[str]) -> int:
    """Watch this node until the count is reached or Ctrl-C is pressed; return the exit code."""
    parsed = _parser().parse_args(arguments)
    every_s, count = _checked_pace(parsed.every), 1 if parsed.once else _checked_count(parsed.count)
    if parsed.csv == "-" and sys.stdout is None:
        raise SettingError("--csv - was set", "the output is closed", "name a file, or leave the output open")
    with _held_signals():  # before any thread is started, which would take them
        _monitor(parsed.csv, every_s, count, has_summary=not parsed.once)
    return 0


def _monitor(csv: str | None, every_s: float, count: int | None, *, has_summary: bool) -> None:
    with ExitStack() as stack:
        writer = _writer(csv, stack)
        devices, reasons = _devices(stack)
        meter, _ = own_meter([device.uuid for device in devices if device.parent_uuid is None], "")
        stack.callback(meter.close)
        vitals = Vitals(devices)
        first = vitals.sample()  # what rates are counted from
        reasons += [f"{_WORDS[key]}: n/a: {reason}" for key, reason in vitals.reasons().items()]
        reasons += _silent(devices, first)
        view = _view(csv, every_s, reasons, stack)
        summary = Summary()

        def take(sample: dict[str, Any]) -> bool:
            """Hand a sample to all who want it; whether anybody still does."""
            summary.add(sample)
            if writer is not None:
                writer.write(sample)
            is_seen = view is not None and view.show(sample)
            return is_seen or writer is not None

        with meter.window() as window:
            _watch(vitals.sample, every_s, count, take)
    out = sys.stderr if csv == "-" else sys.stdout
    if has_summary and out is not None:
        write_text("".join(f"{line}\n" for line in ["", *summary.lines(window, meter)]), out)


def _parser() -> Parser:
    parser = Parser(
        prog="stormo monitor",
        description="Show what the GPUs, processors, memory, disks and network of this node do, beside any program. "
        "Ctrl-C ends it with a summary.",
        allow_abbrev=False,
    )
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between samples (default: 1)")
    parser.add_argument(
        "--csv", metavar="FILE", help="append every sample to FILE as well; - writes to the output alone"
    )
    number = parser.add_mutually_exclusive_group()
    number.add_argument("--count", type=int, metavar="N", help="end after N samples (default: with Ctrl-C)")
    number.add_argument("--once", action="store_true", help="one sample, no summary")
    return parser


def _checked_pace(every_s: float) -> float:
    if _SHORTEST_S <= every_s <= _LONGEST_S:
        return every_s
    why = f"devices renew their figures about every {_SHORTEST_S:g} s"
    if every_s > _LONGEST_S:
        why = f"at least one sample a day = {_LONGEST_S:g} s is taken"
    instead = f"set a number of seconds from {_SHORTEST_S:g} to {_LONGEST_S:g}"
    raise SettingError(f"--every {every_s:g} was set", why, instead)


def _checked_count(count: int | None) -> int | None:
    if count is None or count >= 1:
        return count
    raise SettingError(f"--count {count} was set", "at least one sample is taken", "set it to 1 or more")


def _writer(asked: str | None, stack: ExitStack) -> CsvFile | CsvStream | None:
    if asked is None:
        return None
    writer = CsvStream(sys.stdout) if asked == "-" else CsvFile(Path(asked))
    stack.callback(writer.close)
    return writer


def _view(csv: str | None, every_s: float, reasons: list[str], stack: ExitStack) -> View | None:
    if csv == "-" or sys.stdout is None:  # taken, or closed
        return None
    view = make_view(sys.stdout, every_s, reasons)
    stack.callback(view.close)
    return view


def _devices(stack: ExitStack) -> tuple[list[Device], list[str]]:
    """Every GPU of this node and their MIG instances; without any, why."""
    try:
        nvml = open_nvml()
    except NvmlUnavailableError as error:
        return [], [f"GPU: n/a: {error.reason}"]
    stack.callback(nvml.close)
    devices = [*nvml.devices(), *nvml.instances()]
    return devices, [] if devices else ["GPU: n/a: the driver shows none"]


def _silent(devices: Sequence[Device], sample: dict[str, Any]) -> list[str]:
    """What GPUs do not tell, and why; those of one reason together."""
    found: dict[tuple[str, str], list[str]] = {}
    for device, gpu in zip(devices, sample["gpus"], strict=True):
        for key, value in gpu.items():
            if value is None:
                found.setdefault((key, device.why_not(key)), []).append(gpu_label(gpu))
    return [f"{', '.join(labels)} {key}: n/a: {why}" for (key, why), labels in found.items()]


@contextmanager
def _held_signals() -> Iterator[None]:
    """Keep Ctrl-C and SIGTERM for `_watch`, which asks for them between samples: no row is cut in two.

    SIGTERM ends the program as Ctrl-C does: a shell starts what it runs in the background deaf to Ctrl-C.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        while signal.sigtimedwait(_ENDING, 0) is not None:  # `timeout` sends it twice: to the program and its group
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch(
    sample: Callable[[], dict[str, Any]], every_s: float, count: int | None, take: Callable[[dict[str, Any]], bool]
) -> None:
    """Take samples at a steady pace until there are enough, nobody wants them, or a signal comes."""
    next_s, num_taken = time.monotonic() + min(_FIRST_S, every_s), 0
    while num_taken != count:
        if signal.sigtimedwait(_ENDING, max(next_s - time.monotonic(), 0.0)) is not None:
            return
        if not take(sample()):
            return
        num_taken += 1
        # A moment that has passed already, as after a suspend, is left out.
        next_s += every_s * max(1, math.ceil((time.monotonic() - next_s) / every_s))
