"""Panels of the machines: power, energy and its ledger, memory, utilisation, temperature, clocks, disk, network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stormo.report.charts import Chart, Panel, Series, Stack, Table, gathered, uncrowded
from stormo.report.history import History, Line, Places
from stormo.report.training import event_lines

if TYPE_CHECKING:
    from stormo.energy.ledger import Bill


_NO_SAMPLES = "No node wrote samples of this: the run is of an older version, or it has just begun."
_GIB = 2.0**30


def machine_panels(histories: Sequence[History]) -> list[Panel]:
    """All panels of this file, in the order of the page."""
    return [_sampled_panel(histories, row) for row in _SAMPLED]


@dataclass(frozen=True)
class Sampled:
    """One figure of the nodes' samples: of every GPU, or of the node itself."""

    owner: str  # "gpus" or "node"
    key: str
    scale: float = 1.0
    name: str = ""  # of the node's own lines

    @property
    def noun(self) -> str:
        """What a crowd of such lines is called."""
        return "GPUs" if self.owner == "gpus" else f"nodes ({self.name})"

    def value(self, holder: Line) -> Any:
        """The figure of a node's or a GPU's sample in the unit of the chart; None where it is not known."""
        figure = holder.get(self.key)
        return figure / self.scale if isinstance(figure, int | float) else None


@dataclass(frozen=True)
class _SampledChart:
    id: str
    title: str
    y_title: str
    figures: Sequence[Sampled]
    top: float | None = None
    from_zero: bool = True


@dataclass(frozen=True)
class _SampledPanel:
    id: str
    title: str
    charts: Sequence[_SampledChart]
    about: str = ""
    extra: Callable[[Sequence[History]], list[Chart]] | None = None


def sampled_series(histories: Sequence[History], figure: Sampled) -> list[Series]:
    """One line for each GPU or node of each run."""
    series: list[Series] = []
    for run, history in enumerate(histories):
        is_one_node = len(history.nodes) == 1
        for node, samples in history.samples.items():
            prefix = "" if is_one_node else f"node {node}: "
            points: dict[str, list[tuple[Places, Any]]] = {}
            for place, sample in samples:
                if figure.owner == "node":
                    points.setdefault(f"{prefix}{figure.name}", []).append((place, figure.value(sample)))
                    continue
                for gpu in sample.get("gpus") or ():
                    points.setdefault(f"{prefix}GPU {gpu.get('index')}", []).append((place, figure.value(gpu)))
            for name, found in points.items():
                series += gathered(run, name, found)
    return series


_PEAK = Sampled("node", "peak_memory_bytes", _GIB)


def _peak_memory(histories: Sequence[History]) -> list[Chart]:
    series = event_lines(histories, "epoch_done", "worker with the most", _PEAK.value, mode="points")
    return [
        Chart(
            id="memory-peak", title="Most memory of a worker", y_title="GiB", series=series, from_zero=True,
            why_empty="No epoch is done yet.",
            note="On a GPU what the worker holds there, otherwise the memory of its process.",
        )
    ]  # fmt: skip


def _sampled_panel(histories: Sequence[History], row: _SampledPanel) -> Panel:
    charts = []
    for chart in row.charts:
        everything: list[Series] = []
        drawn: list[Series] = []
        notes: dict[str, None] = {}
        for figure in chart.figures:  # a crowd is one of like figures
            found = sampled_series(histories, figure)
            shown, note = uncrowded(found, figure.noun)
            everything += found
            drawn += shown
            notes |= {note: None} if note else {}
        charts.append(
            Chart(
                id=chart.id, title=chart.title, y_title=chart.y_title, series=drawn, all_series=everything,
                from_zero=chart.from_zero, top=chart.top, note=" ".join(notes), why_empty=_why_not(histories, chart),
            )
        )  # fmt: skip
    return Panel(
        id=row.id, title=row.title, about=row.about, charts=[*charts, *(row.extra(histories) if row.extra else [])]
    )


def _why_not(histories: Sequence[History], chart: _SampledChart) -> str:
    samples = [sample for history in histories for node in history.samples.values() for _, sample in node]
    if not samples:
        return _NO_SAMPLES
    if all(figure.owner == "gpus" for figure in chart.figures) and not any(line.get("gpus") for line in samples):
        return "These nodes have no GPU."
    return "These machines do not tell it."


_SAMPLED = (
    _SampledPanel(
        "memory",
        "Memory",
        [
            _SampledChart("memory-gpu", "GPU memory", "GiB", [Sampled("gpus", "memory_used_bytes", _GIB)]),
            _SampledChart(
                "memory-node", "Node memory", "GiB", [Sampled("node", "memory_used_bytes", _GIB, "in use")]
            ),
        ],
        extra=_peak_memory,
    ),
    _SampledPanel(
        "utilisation",
        "Utilisation",
        [
            _SampledChart(
                "utilisation-gpu", "GPU utilisation", "%", [Sampled("gpus", "utilisation", 0.01)], 100
            ),
            _SampledChart(
                "utilisation-cpu", "CPU utilisation", "%", [Sampled("node", "cpu_fraction", 0.01, "CPUs")], 100,
            ),
        ],
        about="Of a GPU: share of the time in which some kernel ran, as its driver tells; not how well it is used.",
    ),
    _SampledPanel(
        "temperature",
        "Temperature and clocks",
        [
            _SampledChart(
                "temperature", "Temperature", "°C",
                [Sampled("gpus", "temperature_c"), Sampled("node", "cpu_temperature_c", 1.0, "CPU")], from_zero=False,
            ),
            _SampledChart(
                "clocks", "Clocks", "MHz",
                [Sampled("gpus", "sm_clock_mhz"), Sampled("node", "cpu_clock_mhz", 1.0, "CPU")],
            ),
        ],
    ),
    _SampledPanel(
        "traffic",
        "Disk and network",
        [
            _SampledChart(
                "disk", "Disk", "MB/s",
                [
                    Sampled("node", "disk_read_bytes_per_s", 1e6, "read"),
                    Sampled("node", "disk_write_bytes_per_s", 1e6, "written"),
                ],
            ),
            _SampledChart(
                "network", "Network", "MB/s",
                [
                    Sampled("node", "network_in_bytes_per_s", 1e6, "received"),
                    Sampled("node", "network_out_bytes_per_s", 1e6, "sent"),
                ],
            ),
        ],
    ),
)  # fmt: skip

_MOST_BINS = 20_000
_LEAST_MEASURED = 0.2  # share of a bin; from less no power can be told
_KINDS = {"gpu": "GPUs", "cpu": "CPUs", "dram": "memory (DRAM)"}
_PARTS = {
    "training": "useful training",
    "waiting": "waiting for input and for others",
    "validation": "validation",
    "checkpoint": "checkpoints",
    "recomputed": "lost and computed again",
    "starting": "starting",
    "idle": "idle",
}


def energy_scale(most_j: float) -> tuple[float, str]:
    """The divisor and the unit in which so much energy reads well."""
    for scale, unit in ((1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ")):
        if most_j >= 2 * scale:
            return scale, unit
    return 1.0, "J"


def _bins(
    history: History, node: str, taken: dict[tuple[str, str, int], str]
) -> tuple[dict[str, dict[int, float]], dict[int, float]]:
    """Joules of each kind of part of one node by bin of running time, and the share of each bin that was measured.

    `taken` says which node counts a device of a machine in an attempt: two nodes on one machine read the same.
    """
    bin_s = _bin_s(history)
    joules: dict[str, dict[int, float]] = {}
    measured: dict[int, float] = {}
    kinds: dict[str, str] = {}
    before: Line = {}
    begin, attempt = 0.0, 0
    for line in history.nodes[node]:
        if line.get("kind") == "start":
            attempt += 1
            machine = str(line.get("machine") or line.get("host") or node)
            told = {str(source.get("id")): str(source.get("kind")) for source in line.get("sources") or ()}
            kinds = {key: kind for key, kind in told.items() if taken.setdefault((machine, key, attempt), node) == node}
            before, begin = {}, history.clock.running_s(float(line["time_unix_s"])) / bin_s
        elif line.get("kind") == "energy" and isinstance(line.get("joules"), dict):
            end = history.clock.running_s(float(line["time_unix_s"])) / bin_s
            for source, value in line["joules"].items():
                if source in kinds and isinstance(value, int | float):
                    found = joules.setdefault(kinds[source], {})
                    _spread(found, float(value) - float(before.get(source) or 0.0), begin, end)
            _spread(measured, end - begin, begin, end)
            before, begin = line["joules"], end
    return joules, measured


def _bin_s(history: History) -> float:
    """A second, over which a counter's resolution does not show; more in a run that takes very long."""
    return max(1.0, history.clock.total_s / _MOST_BINS)


def _spread(bins: dict[int, float], joules: float, begin: float, end: float) -> None:
    """Add energy to the bins between two places, to each by its share."""
    if end <= begin:
        bins[int(begin)] = bins.get(int(begin), 0.0) + joules
        return
    for position in range(int(begin), math.ceil(end)):
        share = (min(end, position + 1) - max(begin, position)) / (end - begin)
        bins[position] = bins.get(position, 0.0) + joules * share


def _power_series(run: int, history: History, *, by_kind: bool) -> list[Series]:
    """The power of all nodes: of each kind of part, or of all of them together."""
    bin_s = _bin_s(history)
    joules: dict[str, dict[int, float]] = {}
    measured: dict[int, float] = {}
    taken: dict[tuple[str, str, int], str] = {}
    for node in history.nodes:
        by_node, measured_there = _bins(history, node, taken)
        for position, share in measured_there.items():
            measured[position] = max(share, measured.get(position, 0.0))
        for kind, bins in by_node.items():
            into = joules.setdefault(_KINDS.get(kind, kind) if by_kind else "all nodes", {})
            for position, value in bins.items():
                into[position] = into.get(position, 0.0) + value

    def power_w(bins: dict[int, float], position: int) -> float | None:
        if position not in bins or measured[position] <= _LEAST_MEASURED:
            return None  # a gap: nothing was measured, as between two attempts
        return bins[position] / bin_s / measured[position]

    return [
        line
        for name, bins in sorted(joules.items())
        for line in gathered(
            run,
            name,
            (
                ({"time_s": round((position + 1) * bin_s, 2)}, power_w(bins, position))
                for position in range(min(bins), max(bins) + 1)
            ),
        )
    ]


def power_panel(histories: Sequence[History]) -> Panel:
    """Power by kind of part, energy so far, and the power of each GPU."""
    power: list[Series] = []
    energy: list[Series] = []
    for run, history in enumerate(histories):
        power += _power_series(run, history, by_kind=len(histories) == 1)
        energy += gathered(run, "energy", _cumulative(history))
    if not power:  # the node files are gone, or too short
        power = event_lines(histories, "step_done", "main node", lambda event: event.get("power_w"))
    scale, unit = energy_scale(max((value or 0.0 for line in energy for value in line.y), default=0.0))
    reasons = "; ".join(dict.fromkeys(history.no_bill_reason for history in histories if history.no_bill_reason))
    why = f"There is no measured power: {reasons or 'no counter has been read yet'}."
    devices = sampled_series(histories, Sampled("gpus", "power_w"))
    shown, crowd = uncrowded(devices, "GPUs")
    return Panel(
        id="power",
        title="Power and energy",
        about="Of all nodes together; a mean over each second.",
        charts=[
            Chart(
                id="power", title="Power", y_title="W", series=power, from_zero=True, why_empty=why,
            ),
            Chart(
                id="energy", title="Energy so far", y_title=unit, from_zero=True, why_empty=why,
                series=[replace(line, y=[None if y is None else y / scale for y in line.y]) for line in energy],
            ),
            *(
                [
                    Chart(
                        id="power-gpu", title="Power of each GPU", y_title="W", series=shown, all_series=devices,
                        from_zero=True, note=crowd,
                    )
                ]
                if len(devices) > 1
                else []
            ),
        ],
    )  # fmt: skip


def _cumulative(history: History) -> Iterator[tuple[dict[str, float], float]]:
    """The energy of all nodes so far, as the bill counts it."""
    if history.bill is None:
        return
    joules: dict[int, list[float]] = {}
    ends_s: dict[int, float] = {}
    for stretch in history.bill.stretches:
        end_s = history.clock.running_s(stretch.end_unix_s)
        position = math.ceil(end_s / _bin_s(history))  # nodes do not write at the same moment
        joules.setdefault(position, []).append(stretch.joules)
        ends_s[position] = max(end_s, ends_s.get(position, 0.0))
    total_j = 0.0
    for position in sorted(joules):
        total_j = math.fsum([total_j, *joules[position]])
        yield {"time_s": round(ends_s[position], 2)}, total_j


def ledger_panel(histories: Sequence[History]) -> Panel:
    """Where every joule went: a bar and a table, and the reasons for what is missing."""
    billed = [(history, history.bill) for history in histories if history.bill is not None]
    missing = [_named(histories, history, history.no_bill_reason) for history in histories if history.no_bill_reason]
    notes = missing[:] if billed else []
    notes += [_named(histories, history, reason) for history, bill in billed for reason in bill.reasons]
    notes += [
        _named(histories, history, f"{_PARTS[part]}: too short for its counters to tell to within 5 %")
        for history, bill in billed
        for part in bill.uncertain_parts
    ]
    scale, unit = energy_scale(max((bill.total_j or 0.0 for _, bill in billed), default=0.0))
    names = [name for name in _PARTS if any(bill.parts_j.get(name) for _, bill in billed)]
    return Panel(
        id="ledger",
        title="Energy ledger",
        about="Every measured joule is in exactly one part; ± is the most by which the counters can be wrong.",
        stacks=[
            Stack(
                id="ledger",
                title="Where the energy went",
                x_title=unit,
                bars=[history.label for history, _ in billed],
                parts=[
                    (_PARTS[name], [(bill.parts_j.get(name) or 0.0) / scale for _, bill in billed]) for name in names
                ],
            )
        ]
        if names
        else [],
        tables=[
            Table(
                id="ledger",
                title="Parts of the energy",
                columns=["run", "part", "J", "Wh", "share", "± J"],
                rows=[row for history, bill in billed for row in _ledger_rows(history.label, bill)],
                first_figure=2,
            )
        ]
        if billed
        else [],
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
        yield [
            label,
            name,
            f"{joules:,.1f}",
            f"{joules / 3600:,.3f}",
            f"{100 * joules / total_j:.1f} %" if total_j else "n/a",
            f"{error_j:,.1f}",
        ]
