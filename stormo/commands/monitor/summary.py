"""What was seen over the time watched: mean and highest figures of every device, and energy by the counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stormo.commands.monitor.lines import gpu_name
from stormo.energy.meter import Meter, Window
from stormo.energy.probes import Missing
from stormo.errors import counted
from stormo.telemetry.text import format_duration

_J_PER_WH = 3600.0
_KINDS = {"gpu": "GPU", "cpu": "CPU package", "dram": "DRAM zone"}


class Tally:
    """Mean and maximum of one figure; what was not told does not count."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._num = 0
        self.most: float | None = None

    def add(self, value: float | None) -> None:
        """Take one reading."""
        if value is not None:
            self._sum += value
            self._num += 1
            self.most = value if self.most is None else max(self.most, value)

    @property
    def mean(self) -> float | None:
        """The mean of all readings; None where there was none."""
        return self._sum / self._num if self._num else None

    def text(self, unit: str, scale: float = 1.0) -> str:
        """`mean 45 %, highest 60 %`."""
        if self.mean is None or self.most is None:
            return "n/a"
        return f"mean {self.mean * scale:.0f} {unit}, highest {self.most * scale:.0f} {unit}"


class Summary:
    """Adds up samples."""

    def __init__(self) -> None:
        self._num_samples = 0
        self._use: dict[str, Tally] = {}
        self._power_w: dict[str, Tally] = {}

    def add(self, sample: Mapping[str, Any]) -> None:
        """Take one sample."""
        self._num_samples += 1
        self._use.setdefault("CPU", Tally()).add(sample["cpu_fraction"])
        for gpu in sample["gpus"]:
            self._use.setdefault(gpu_name(gpu), Tally()).add(gpu["utilisation"])
            self._power_w.setdefault(gpu_name(gpu), Tally()).add(gpu["power_w"])

    def lines(self, window: Window, meter: Meter) -> list[str]:
        """The lines to end with."""
        lines = [f"watched for {format_duration(window.seconds)}, {counted(self._num_samples, 'sample')}"]
        for device, use in self._use.items():
            power = f"; power {self._power_w[device].text('W')}" if device in self._power_w else ""
            lines.append(f"{device}: use {use.text('%', 100)}{power}")
        return lines + energy_lines(window, meter)


def energy_lines(window: Window, meter: Meter) -> list[str]:
    """The energy of the time watched, what it was read from, and what is not in it and why."""
    missing: Sequence[Missing] = meter.missing
    lines = []
    if meter.sources:
        parts = []
        for kind, word in _KINDS.items():
            of_kind = [source for source in meter.sources if source.kind == kind]
            if of_kind:
                joules = sum(window.joules_by_source[source.id] for source in of_kind)
                methods = " and ".join(sorted({source.method for source in of_kind}))
                parts.append(f"{counted(len(of_kind), word)} {joules:,.0f} J by {methods}")
        total_j = window.measured_j
        lines.append(
            f"energy: {total_j:,.0f} J ± {window.error_j:,.0f} J ({total_j / _J_PER_WH:.3g} Wh): {'; '.join(parts)}"
        )
        lines += [f"energy: {note}" for note in meter.notes]
    lines += [f"energy of {_KINDS.get(each.kind, each.kind)}: n/a: {each.reason}" for each in missing]
    return lines
