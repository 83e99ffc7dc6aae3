"""The panels of what the nodes sampled: memory, utilisation, temperature and clocks, disk and network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stormo.report.history import History, Line, Places
from stormo.report.panel import Chart, Panel
from stormo.report.series import Series, gathered, uncrowded
from stormo.report.training import event_lines

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
