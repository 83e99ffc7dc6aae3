"""Panels of the machines: power, energy and its ledger, memory, utilisation, temperature, clocks, disk, network."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stormo.report.charts import Chart, Panel, Series, Stack, Table, make_line, merge_lines
from stormo.report.history import History, Line, Position
from stormo.report.training import event_lines
from stormo.telemetry.text import format_share

if TYPE_CHECKING:
    from stormo.energy.ledger import Bill

_GIB, _MB = 2.0**30, 1e6
_OF_A_SLICE = ("memory_used_bytes", "utilisation")  # figures that a slice of a GPU has for itself
_MAX_BINS = 20_000
_LEAST_MEASURED = 0.2  # share of a bin; less is too little for a power
_KINDS = {"gpu": "GPUs", "cpu": "CPUs", "dram": "memory (DRAM)"}
_PARTS = {
    "training": "useful training",
    "waiting": "waiting for input and for others",
    "validation": "validation",
    "checkpoint": "checkpoints",
    "recomputed": "lost and recomputed",
    "starting": "starting",
    "idle": "idle",
}


@dataclass(frozen=True)
class Sampled:
    """One figure of the nodes' samples: of every GPU, or of the node itself."""

    owner: str  # "gpus" or "node"
    key: str
    scale: float = 1.0
    name: str = ""  # of the node's own line

    def value(self, source: Line) -> Any:
        """The figure in the unit of the chart; None where it is not known."""
        figure = source.get(self.key)
        return figure / self.scale if isinstance(figure, int | float) else None


def sampled_lines(histories: Sequence[History], figure: Sampled) -> list[Series]:
    """One line for each GPU or node of each run."""
    lines: list[Series] = []
    for run, history in enumerate(histories):
        for node, samples in history.samples.items():
            prefix = "" if len(history.nodes) == 1 else f"node {node}: "
            points: dict[str, list[tuple[Position, Any]]] = {}
            for position, sample in samples:
                sources: dict[str, Line] = {figure.name: sample}
                if figure.owner == "gpus":
                    sources = _by_name(sample.get("gpus") or (), figure.key)
                for name, source in sources.items():
                    points.setdefault(f"{prefix}{name}", []).append((position, figure.value(source)))
            for name, found in points.items():
                lines += make_line(run, name, found)
    return lines


def _by_name(gpus: Iterable[Line], key: str) -> dict[str, Line]:
    """The GPUs of a sample; slices of one have their own memory and share all other figures."""
    names, numbers = {}, Counter[Any]()
    for gpu in gpus:
        index = gpu.get("index")
        name = f"GPU {index}"
        if key in _OF_A_SLICE and str(gpu.get("uuid")).startswith("MIG-"):
            name += f" slice {numbers[index]}"
            numbers[index] += 1
        names[name] = gpu
    return names


def _sampled_chart(
    histories: Sequence[History], id: str, title: str, unit: str, *figures: Sampled, top: float | None = None
) -> Chart:
    every: list[Series] = []
    drawn: list[Series] = []
    notes: dict[str, None] = {}
    for figure in figures:
        lines = sampled_lines(histories, figure)
        shown, note = merge_lines(lines, "GPUs" if figure.owner == "gpus" else f"nodes ({figure.name})")
        every, drawn = every + lines, drawn + shown
        notes |= {note: None} if note else {}
    samples = [sample for history in histories for node in history.samples.values() for _, sample in node]
    why = "These machines do not report it."
    if not samples:
        why = "No node has written samples of this."
    elif all(figure.owner == "gpus" for figure in figures) and not any(line.get("gpus") for line in samples):
        why = "These nodes have no GPU."
    return Chart(
        id, title, unit, drawn, all_series=every, from_zero=unit != "°C", top=top, note=" ".join(notes), why_empty=why
    )


def machine_panels(histories: Sequence[History]) -> list[Panel]:
    """Memory, utilisation, temperature and clocks, disk and network."""

    def chart(*row: Any, top: float | None = None) -> Chart:
        return _sampled_chart(histories, *row, top=top)

    def node(key: str, scale: float, name: str) -> Sampled:
        return Sampled("node", key, scale, name)

    peak = Sampled("node", "peak_memory_bytes", _GIB)
    peak_lines = event_lines(histories, "epoch_done", "worker with the most", peak.value, mode="points")
    peak_note = "On a GPU the memory that the worker holds there, otherwise the memory of its process."
    busy = "Of a GPU: share of the time in which a kernel ran, as its driver reports; not how well it is used."
    return [
        Panel(
            "memory",
            "Memory",
            charts=[
                chart("memory-gpu", "GPU memory", "GiB", Sampled("gpus", "memory_used_bytes", _GIB)),
                chart("memory-node", "Node memory", "GiB", node("memory_used_bytes", _GIB, "in use")),
                Chart(
                    "memory-peak", "Peak memory of a worker", "GiB", peak_lines, from_zero=True,
                    why_empty="No epoch is done yet.", note=peak_note,
                ),
            ],
        ),
        Panel(
            "utilisation",
            "Utilisation",
            busy,
            charts=[
                chart("utilisation-gpu", "GPU utilisation", "%", Sampled("gpus", "utilisation", 0.01), top=100),
                chart("utilisation-cpu", "CPU utilisation", "%", node("cpu_fraction", 0.01, "CPUs"), top=100),
            ],
        ),
        Panel(
            "temperature",
            "Temperature and clocks",
            charts=[
                chart(
                    "temperature", "Temperature", "°C",
                    Sampled("gpus", "temperature_c"), node("cpu_temperature_c", 1.0, "CPU"),
                ),
                chart("clocks", "Clocks", "MHz", Sampled("gpus", "sm_clock_mhz"), node("cpu_clock_mhz", 1.0, "CPU")),
            ],
        ),
        Panel(
            "traffic",
            "Disk and network",
            charts=[
                chart(
                    "disk", "Disk", "MB/s",
                    node("disk_read_bytes_per_s", _MB, "read"), node("disk_write_bytes_per_s", _MB, "written"),
                ),
                chart(
                    "network", "Network", "MB/s",
                    node("network_in_bytes_per_s", _MB, "received"), node("network_out_bytes_per_s", _MB, "sent"),
                ),
            ],
        ),
    ]  # fmt: skip


def energy_scale(most_j: float) -> tuple[float, str]:
    """The divisor and the unit for so much energy."""
    for scale, unit in ((1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ")):
        if most_j >= 2 * scale:
            return scale, unit
    return 1.0, "J"


def _bin_s(history: History) -> float:
    """A second, longer than the resolution of the counters; more in a very long run."""
    return max(1.0, history.clock.total_s / _MAX_BINS)


def _add_to_bins(bins: dict[int, float], joules: float, begin: float, end: float) -> None:
    """Add energy to the bins between two positions, to each by its share."""
    if end <= begin:
        bins[int(begin)] = bins.get(int(begin), 0.0) + joules
        return
    for position in range(int(begin), math.ceil(end)):
        share = (min(end, position + 1) - max(begin, position)) / (end - begin)
        bins[position] = bins.get(position, 0.0) + joules * share


def _power_series(run: int, history: History, *, by_kind: bool) -> list[Series]:
    """The power of all nodes, by kind of device or all together."""
    bin_s = _bin_s(history)
    joules: dict[str, dict[int, float]] = {}
    measured: dict[str, dict[int, float]] = {}  # the share of each bin that a node has measured
    starts = [line for lines in history.nodes.values() for line in lines if line.get("kind") == "start"]
    kinds = {str(source.get("id")): str(source.get("kind")) for line in starts for source in line.get("sources") or ()}
    for interval in history.bill.intervals if history.bill is not None else ():
        times = interval.begin_unix_s, interval.end_unix_s
        begin, end = (history.clock.running_s(time_unix_s) / bin_s for time_unix_s in times)
        _add_to_bins(measured.setdefault(interval.node_id, {}), end - begin, begin, end)
        for source_id, drawn_j in interval.sources_j.items():
            kind = kinds.get(source_id, "other")  # of a start that was written after the nodes were read
            name = _KINDS.get(kind, kind) if by_kind else "all nodes"
            _add_to_bins(joules.setdefault(name, {}), drawn_j, begin, end)

    def power_w(bins: dict[int, float], position: int) -> float | None:
        share = max(of_node.get(position, 0.0) for of_node in measured.values())
        if position not in bins or share <= _LEAST_MEASURED:
            return None  # a gap: nothing was measured, as between two attempts
        return bins[position] / bin_s / share

    return [
        line
        for name, bins in sorted(joules.items())
        for line in make_line(
            run,
            name,
            (
                ({"time_s": round((position + 1) * bin_s, 2)}, power_w(bins, position))
                for position in range(min(bins), max(bins) + 1)
            ),
        )
    ]


def power_panel(histories: Sequence[History]) -> Panel:
    """Power by kind of device, energy so far, and the power of each GPU."""
    power: list[Series] = []
    energy: list[Series] = []
    for run, history in enumerate(histories):
        power += _power_series(run, history, by_kind=len(histories) == 1)
        energy += make_line(run, "energy", _cumulative(history))
    if not power:  # the node files are gone, or too short
        power = event_lines(histories, "step_done", "rank 0's node", lambda event: event.get("power_w"))
    scale, unit = energy_scale(max((value or 0.0 for line in energy for value in line.y), default=0.0))
    reasons = "; ".join(dict.fromkeys(history.no_bill_reason for history in histories if history.no_bill_reason))
    why = f"There is no measured power: {reasons or 'no counter has been read yet'}."
    scaled = [replace(line, y=[None if y is None else y / scale for y in line.y]) for line in energy]
    charts = [
        Chart("power", "Power", "W", power, from_zero=True, why_empty=why),
        Chart("energy", "Energy so far", unit, scaled, from_zero=True, why_empty=why),
    ]
    devices = _sampled_chart(histories, "power-gpu", "Power of each GPU", "W", Sampled("gpus", "power_w"))
    if len(devices.all_series) > 1:
        charts.append(devices)
    return Panel("power", "Power and energy", "Of all nodes together; a mean over each second.", charts=charts)


def _cumulative(history: History) -> Iterator[tuple[dict[str, float], float]]:
    """The energy of all nodes so far, from the bill."""
    if history.bill is None:
        return
    joules: dict[int, list[float]] = {}
    ends_s: dict[int, float] = {}
    for interval in history.bill.intervals:
        end_s = history.clock.running_s(interval.end_unix_s)
        position = math.ceil(end_s / _bin_s(history))  # nodes do not write at the same moment
        joules.setdefault(position, []).append(interval.joules)
        ends_s[position] = max(end_s, ends_s.get(position, 0.0))
    total_j = 0.0
    for position in sorted(joules):
        total_j = math.fsum([total_j, *joules[position]])
        yield {"time_s": round(ends_s[position], 2)}, total_j


def ledger_panel(histories: Sequence[History]) -> Panel:
    """Where every joule went: a bar, a table, and the reasons for what is missing."""
    billed = [(history, history.bill) for history in histories if history.bill is not None]
    missing = [_named(histories, history, history.no_bill_reason) for history in histories if history.no_bill_reason]
    notes = missing[:] if billed else []
    notes += [_named(histories, history, reason) for history, bill in billed for reason in bill.reasons]
    notes += [
        _named(histories, history, f"{_PARTS[part]}: too short for its counters to measure within 5 %")
        for history, bill in billed
        for part in bill.uncertain_parts
    ]
    scale, unit = energy_scale(max((bill.total_j or 0.0 for _, bill in billed), default=0.0))
    names = [name for name in _PARTS if any(bill.parts_j.get(name) for _, bill in billed)]
    stack = Stack(
        id="ledger",
        title="Where the energy went",
        x_title=unit,
        bars=[history.label for history, _ in billed],
        parts=[(_PARTS[name], [(bill.parts_j.get(name) or 0.0) / scale for _, bill in billed]) for name in names],
    )
    rows = [row for history, bill in billed for row in _ledger_rows(history.label, bill)]
    columns = ["run", "part", "J", "Wh", "share", "± J"]
    return Panel(
        "ledger",
        "Energy ledger",
        "Every measured joule is in exactly one part; ± is the largest error of the counters.",
        stacks=[stack] if names else [],
        tables=[Table("ledger", "Parts of the energy", columns, rows, first_figure=2)] if billed else [],
        notes=list(dict.fromkeys(notes)),
        why_empty="" if billed else f"There is no bill: {'; '.join(missing)}.",
    )


def _named(histories: Sequence[History], history: History, text: str) -> str:
    return text if len(histories) == 1 else f"{history.label}: {text}"


def _ledger_rows(label: str, bill: Bill) -> Iterator[list[str]]:
    total_j = bill.total_j or 0.0
    parts = [(_PARTS.get(name, name), joules, bill.error_j[name]) for name, joules in bill.parts_j.items()]
    whole = ("all", total_j, bill.total_error_j)
    for name, joules, error_j in [*parts, whole]:
        share = format_share(joules / total_j) if total_j else "n/a"
        yield [label, name, f"{joules:,.1f}", f"{joules / 3600:,.3f}", share, f"{error_j:,.1f}"]
