"""The figures of a sample in words, and a sample as plain lines."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from stormo.commands.monitor.table import gpu_label
from stormo.errors import counted

_GIB = 1 << 30
_UNKNOWN = "n/a"
Sample = Mapping[str, Any]


def share(value: float | None) -> str:
    """`97 %`."""
    return _UNKNOWN if value is None else f"{100 * value:.0f} %"


def used_of(used: float | None, total: float | None, unit: str, scale: float = 1, decimals: int = 0) -> str:
    """`512/700 W`: what is used of what there is."""
    if used is None:
        return _UNKNOWN
    whole = "" if total is None else f"/{total / scale:.{decimals}f}"
    return f"{used / scale:.{decimals}f}{whole} {unit}"


def rate(bytes_per_s: float | None) -> str:
    """`1.5 MB/s`."""
    if bytes_per_s is None:
        return _UNKNOWN
    for unit, scale in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= scale * 0.9995:
            return f"{bytes_per_s / scale:.1f} {unit}"
    return f"{bytes_per_s:.0f} B/s"


def figure(value: float | None, unit: str) -> str:
    """`61 °C`."""
    return _UNKNOWN if value is None else f"{value:.0f} {unit}"


def clocks(gpu: Sample) -> str:
    """`1980/3201`: of its processors and of its memory, in MHz."""
    known = [f"{clock:.0f}" for clock in (gpu["sm_clock_mhz"], gpu["memory_clock_mhz"]) if clock is not None]
    return "/".join(known) or _UNKNOWN


def throttled(gpu: Sample) -> str:
    """What slows the GPU down."""
    reasons = gpu["throttled"]
    return _UNKNOWN if reasons is None else " and ".join(reasons) or "nothing"


def gpu_name(gpu: Sample) -> str:
    """`gpu0 H200`."""
    return f"{gpu_label(gpu)} {product(gpu)}"


def product(gpu: Sample) -> str:
    """`H200`: the maker's name says nothing among devices of one maker."""
    return str(gpu["name"]).removeprefix("NVIDIA ")


def memory(device: Sample) -> str:
    """`20.1/140.4 GiB`."""
    return used_of(device["memory_used_bytes"], device["memory_total_bytes"], "GiB", _GIB, 1)


def cpu_details(sample: Sample) -> list[str]:
    """What is known of the processors besides their use."""
    load = f"load {sample['load_1']:.1f}"
    figures = [
        (sample["cpu_clock_mhz"], "MHz"),
        (sample["cpu_temperature_c"], "°C"),
        (sample["cpu_power_w"], "W"),
    ]
    return [
        counted(sample["num_cpus"], "CPU"),
        load,
        *(figure(value, unit) for value, unit in figures if value is not None),
    ]


def plain_lines(sample: Sample) -> list[str]:
    """One sample as lines: the time, the device, its figures."""
    at = time.strftime("%H:%M:%S", time.localtime(sample["time_unix_s"]))
    node = [
        f"CPU {share(sample['cpu_fraction'])}",
        *cpu_details(sample),
        f"memory {memory(sample)}",
        f"disk read {rate(sample['disk_read_bytes_per_s'])}, written {rate(sample['disk_write_bytes_per_s'])}",
        f"network in {rate(sample['network_in_bytes_per_s'])}, out {rate(sample['network_out_bytes_per_s'])}",
    ]
    lines = [f"{at} {sample['host']}: {', '.join(node)}"]
    for gpu in sample["gpus"]:
        figures = [
            share(gpu["utilisation"]),
            f"memory {memory(gpu)}",
            f"power {used_of(gpu['power_w'], gpu['power_limit_w'], 'W')}",
            figure(gpu["temperature_c"], "°C"),
            f"{clocks(gpu)} MHz",
            f"slowed by {throttled(gpu)}",
        ]
        lines.append(f"{at} {gpu_name(gpu)}: {', '.join(figures)}")
    return lines
