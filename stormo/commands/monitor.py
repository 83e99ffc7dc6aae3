"""The verb `monitor`: the GPUs, processors, memory, disks and network of this node, live or as CSV.

Samples what the recorder of a run samples (`energy.node_metrics`), beside any program.
"""

from __future__ import annotations

import csv
import io
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stormo.config.options import Parser
from stormo.energy.meter import own_meter
from stormo.energy.node_metrics import NodeMetrics
from stormo.errors import SettingError, StormoError, pluralize
from stormo.system.files import open_to_append, whole_lines_bytes, write_all
from stormo.system.nvml import Device, NvmlUnavailableError, open_nvml
from stormo.telemetry.runs_folder import align
from stormo.telemetry.text import (
    can_redraw,
    discard,
    encodable,
    format_bytes,
    format_duration,
    nobody_reads,
    steady_console,
    write_text,
)

_MIN_S, _MAX_S = 0.1, 86400.0  # drivers renew their figures about ten times a second
_FIRST_S = 0.2  # the first sample is shown so soon: rates need two readings
_ENDING = {signal.SIGINT, signal.SIGTERM}
_NODE_TITLES = {"cpu_power_w": "CPU power", "cpu_clock_mhz": "CPU clock", "cpu_temperature_c": "CPU temperature"}
# Column of the CSV -> key of the node's sample, and of a GPU's; None: the column is empty there.
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
Sample = Mapping[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Watch this node until the count is reached or Ctrl-C is pressed; return the exit code."""
    parsed = make_parser().parse_args(arguments)
    count = 1 if parsed.once else parsed.count
    if not _MIN_S <= parsed.every <= _MAX_S:
        instead = f"set {_MIN_S:g} to {_MAX_S:g} seconds"
        raise SettingError(f"--every {parsed.every:g} was set", "devices do not renew their figures like that", instead)
    if count is not None and count < 1:
        raise SettingError(f"--count {count} was set", "at least one sample is taken", "set it to 1 or more")
    if sys.stdout is None and parsed.csv in (None, "-"):
        raise SettingError("stormo monitor was typed", "its output is closed", "set --csv FILE, or open the output")
    with _held_signals(), ExitStack() as stack:
        write = _csv_writer(parsed.csv, stack) if parsed.csv is not None else None
        devices, reasons = _open_gpus(stack)
        metrics = NodeMetrics(devices)
        first = metrics.sample()  # rates count from here
        reasons += [f"{_NODE_TITLES[key]}: n/a: {reason}" for key, reason in metrics.reasons().items()]
        reasons += _missing(devices, first)
        show = None if parsed.csv == "-" or sys.stdout is None else _view(reasons, stack)
        meter, _ = own_meter([device.uuid for device in devices if device.parent_uuid is None], "")
        stack.callback(meter.close)
        with meter.window() as window:
            num_samples = _watch(metrics.sample, parsed.every, count, [one for one in (write, show) if one is not None])
    out = sys.stderr if parsed.csv == "-" else sys.stdout
    if not parsed.once and out is not None:
        energy = f"{window.measured_j:,.0f} J ± {window.error_j:,.0f} J" if meter.sources else "n/a"
        missing = "".join(f"\nenergy of {one.kind}: n/a: {one.reason}" for one in meter.missing)
        watched = f"watched for {format_duration(window.seconds)}, {pluralize(num_samples, 'sample')}"
        write_text(f"\n{watched}, energy {energy}{missing}\n", out)
    return 0


def make_parser() -> Parser:
    """The options of the verb."""
    description = "Show what the GPUs, processors, memory, disks and network of this node do. Ctrl-C ends it."
    parser = Parser(prog="stormo monitor", description=description, allow_abbrev=False)
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between samples (default: 1)")
    parser.add_argument("--csv", metavar="FILE", help="append every sample to FILE as well; - writes CSV alone")
    number = parser.add_mutually_exclusive_group()
    number.add_argument("--count", type=int, metavar="N", help="end after N samples (default: with Ctrl-C)")
    number.add_argument("--once", action="store_true", help="one sample, no summary")
    return parser


@contextmanager
def _held_signals() -> Iterator[None]:
    """Block Ctrl-C and SIGTERM; `_watch` checks for them between samples."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        while signal.sigtimedwait(_ENDING, 0) is not None:  # `timeout` sends it to the program and to its group
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch(
    sample: Callable[[], Sample], every_s: float, count: int | None, writers: Sequence[Callable[[Sample], bool]]
) -> int:
    """Hand out samples at a steady pace until there are enough, nobody reads them, or a signal comes."""
    next_s, num_samples = time.monotonic() + min(_FIRST_S, every_s), 0
    while num_samples != count:
        if signal.sigtimedwait(_ENDING, max(next_s - time.monotonic(), 0.0)) is not None:
            break
        now = sample()
        num_samples += 1
        if not any([write(now) for write in writers]):  # noqa: C419 - every writer gets it
            break
        # Samples that are overdue, as after a suspend, are left out.
        next_s += every_s * max(1, math.ceil((time.monotonic() - next_s) / every_s))
    return num_samples


def _open_gpus(stack: ExitStack) -> tuple[list[Device], list[str]]:
    """Every GPU of this node and their MIG instances; without any, why."""
    try:
        nvml = open_nvml()
    except NvmlUnavailableError as error:
        return [], [f"GPU: n/a: {error.reason}"]
    stack.callback(nvml.close)
    devices = [*nvml.devices(), *nvml.instances()]
    return devices, [] if devices else ["GPU: n/a: the driver shows none"]


def _missing(devices: Sequence[Device], sample: Sample) -> list[str]:
    """The figures that GPUs do not report, and why."""
    found: dict[str, list[str]] = {}
    for device, gpu in zip(devices, sample["gpus"], strict=True):
        for key in (key for key, value in gpu.items() if value is None):
            found.setdefault(f"{key}: n/a: {device.why_not(key)}", []).append(_label(gpu))
    return [f"{', '.join(labels)} {reason}" for reason, labels in found.items()]


def rows(sample: Sample) -> list[list[str]]:
    """The node's row of the CSV, then one for each of its GPUs."""
    at = datetime.fromtimestamp(round(sample["time_unix_s"], 3), UTC).isoformat(timespec="milliseconds")
    shared = [at.replace("+00:00", "Z"), f"{sample['time_unix_s']:.3f}", sample["host"]]
    devices = [("node", 0, sample), *((_label(gpu), 1, gpu) for gpu in sample["gpus"])]
    keys = list(COLUMNS.values())[4:]
    return [[*shared, label, *(_cell(data.get(key[which] or "")) for key in keys)] for label, which, data in devices]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return "; ".join(value) or "none"
    return f"{value:.4f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _label(gpu: Sample) -> str:
    """`gpu0`, and `mig0-3f2a` for a slice of it, by the beginning of its UUID."""
    uuid = str(gpu["uuid"])
    return f"mig{gpu['index']}-{uuid[4:8]}" if uuid.startswith("MIG-") else f"gpu{gpu['index']}"


def _csv_text(cells: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(cells)
    return text.getvalue()


def _printer(first: str, text: Callable[[Sample], str]) -> Callable[[Sample], bool]:
    """Writes samples to standard output; False once nobody reads it, from when on it leads nowhere."""
    is_read = write_text(first, sys.stdout)

    def write(sample: Sample) -> bool:
        nonlocal is_read
        is_read = is_read and write_text(text(sample), sys.stdout)
        return is_read

    return write


def _csv_writer(name: str, stack: ExitStack) -> Callable[[Sample], bool]:
    """Writes the rows of a sample: to standard output, or in one piece to the end of a file."""
    header = _csv_text([list(COLUMNS)])
    if name == "-":
        return _printer(header, lambda sample: _csv_text(rows(sample)))
    path = Path(name)
    try:
        file = stack.enter_context(open_to_append(path))
        with path.open("rb") as reader:
            there = reader.readline(len(header) + 1).decode(errors="replace")
        if there not in ("", header):
            why = f"it begins with {there.strip()[:60]!r}, not with the {len(COLUMNS)} columns of this table"
            raise SettingError(f"--csv {path} was set", why, "name another file, or one that stormo monitor began")
        file.truncate(whole_lines_bytes(file))  # a full disk or a power failure may have cut the last row
        write_all(file, b"" if there else header.encode())
    except OSError as error:
        why = f"it cannot be written ({error.strerror})"
        raise SettingError(f"--csv {path} was set", why, "name another file") from None

    def write(sample: Sample) -> bool:
        try:
            write_all(file, _csv_text(rows(sample)).encode())
        except OSError as error:
            raise StormoError(f"{path} cannot be written any more ({error.strerror or error}).") from None
        return True

    return write


def lines(sample: Sample) -> list[str]:
    """A sample as people read it: load, disks and network of the node, then a table of the devices."""
    titles = ("device", "name", "use", "memory", "power", "temp", "clock", "slowed by")
    disk = f"read {_rate(sample['disk_read_bytes_per_s'])}, written {_rate(sample['disk_write_bytes_per_s'])}"
    network = f"in {_rate(sample['network_in_bytes_per_s'])}, out {_rate(sample['network_out_bytes_per_s'])}"
    at = time.strftime("%H:%M:%S", time.localtime(sample["time_unix_s"]))
    head = f"{at} {sample['host']}: load {sample['load_1']:.1f}; disk {disk}; network {network}"
    return [head, *align([titles, *map(_shown, rows(sample))], num_text_columns=2)]


def _shown(row: Sequence[str]) -> tuple[str, ...]:
    """A row of the CSV as people read it."""
    cell = dict(zip(COLUMNS, row, strict=True))
    return (
        cell["device"],
        cell["name"].removeprefix("NVIDIA ") or pluralize(int(cell["num_cpus"]), "CPU"),
        _figure(cell["utilisation_fraction"], "%", 100),
        _figure(cell["memory_used_bytes"], "GiB", 2**-30, of=cell["memory_total_bytes"], digits=1),
        _figure(cell["power_w"], "W", of=cell["power_limit_w"]),
        _figure(cell["temperature_c"], "°C"),
        _figure(cell["clock_mhz"], "MHz"),
        cell["throttled"],
    )


def _figure(value: str, unit: str, scale: float = 1.0, *, of: str = "", digits: int = 0) -> str:
    """`512/700 W`: what is used, and of what."""
    numbers = [f"{float(number) * scale:.{digits}f}" for number in (value, of) if number]
    return f"{'/'.join(numbers)} {unit}" if value else "n/a"


def _rate(bytes_per_s: float | None) -> str:
    return "n/a" if bytes_per_s is None else f"{format_bytes(bytes_per_s)}/s"


def _view(reasons: Sequence[str], stack: ExitStack) -> Callable[[Sample], bool]:
    """Shows samples: renewed in place on a terminal, one after the other anywhere else."""
    out = sys.stdout
    if not can_redraw(out, os.environ):
        first = "".join(f"{reason}\n" for reason in reasons)
        return _printer(first, lambda sample: "".join(f"{line}\n" for line in lines(sample)))
    from rich.live import Live
    from rich.text import Text

    live = stack.enter_context(Live(console=steady_console(out, os.environ), auto_refresh=False))

    def draw(sample: Sample) -> bool:
        text = "\n".join([*lines(sample), "", *reasons, "Ctrl-C ends"])
        try:
            live.update(Text(encodable(text, out), no_wrap=True, overflow="ellipsis"), refresh=True)
        except OSError as error:
            if not nobody_reads(error):
                raise
            discard(out)
            return False
        return True

    return draw
