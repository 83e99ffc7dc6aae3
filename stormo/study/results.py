"""The study as files: `scale.csv`, `scale.json` with everything, and `scale.png`."""

from __future__ import annotations

import csv
import importlib.util
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stormo.report.charts import COLOURS
from stormo.study.curve import Curve, Estimate
from stormo.study.fit import Fit
from stormo.study.report_text import LOSSES, paragraph
from stormo.telemetry.folder import write_json, write_whole

_ESTIMATES = (
    *("units_per_s", "speed_up", "efficiency", "j_per_sample", "energy_ratio"),
    *("time_to_target_s", "energy_to_target_j"),
)
# What is drawn over the workers: title, and factor to its unit.
_PLOTS = {
    "speed_up": ("speed-up", 1.0),
    "efficiency": ("efficiency (%)", 100.0),
    "units_per_s": ("speed ({unit}/s)", 1.0),
    "j_per_sample": ("energy (J/{per})", 1.0),
    "time_to_target_s": ("time to the target (s)", 1.0),
    "energy_to_target_j": ("energy to the target (J)", 1.0),
}
_COLOURS = COLOURS["light"]
_CURVE_POINTS = 100

Result = tuple[Curve, Fit | str]


def write_results(folder: Path, results: Sequence[Result], failed: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write every file that can be written; the lines to print about them."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_csv(folder / "scale.csv", [curve for curve, _ in results])
    write_json(folder / "scale.json", {"studies": [_as_json(*result) for result in results], "failed": failed})
    files = f"{folder / 'scale.csv'}, {folder / 'scale.json'}"
    if importlib.util.find_spec("matplotlib") is None:
        return [files, "no scale.png: matplotlib is not installed; get it with: pip install 'stormo[plot]'"]
    draw(folder / "scale.png", results)
    return [f"{files}, {folder / 'scale.png'}"]


def _write_csv(path: Path, curves: Sequence[Curve]) -> None:
    estimates = [f"{name}{end}" for name in _ESTIMATES for end in ("", "_low", "_high")]
    losses = ("whole", *LOSSES)
    with io.StringIO(newline="") as file:
        writer = csv.writer(file)
        names = [*estimates, "num_reached", *(f"lost_{name}" for name in losses), "note"]
        writer.writerow(["mode", "workers", "runs", "unit", *names])
        for curve in curves:
            for point in curve.points:
                row: list[Any] = [curve.mode, point.workers, point.num_repeats, curve.unit]
                for name in _ESTIMATES:
                    one: Estimate | None = getattr(point, name)
                    row += [None] * 3 if one is None else [one.value, one.low, one.high]
                row += [point.num_reached, *(getattr(point.split, name, None) for name in losses), point.note]
                writer.writerow(["" if cell is None else cell for cell in row])
        write_whole(path, file.getvalue())


def _as_json(curve: Curve, fit: Fit | str) -> dict[str, Any]:
    model: dict[str, Any] = {"reason": fit}
    if isinstance(fit, Fit):
        model = {
            "serial_share": asdict(fit.serial_share),
            "communication_s": asdict(fit.communication_s) if fit.communication_s else None,
            "one_worker_s": asdict(fit.one_worker_s),
            "misfit": fit.misfit,
            "degrees": fit.degrees,
            "note": fit.note or None,
        }
    return {
        "mode": curve.mode,
        "unit": curve.unit,
        "energy_per": curve.energy_per,
        "energy_reason": curve.energy_reason or None,
        "points": [asdict(point) for point in curve.points],
        "model": model,
        "paragraph": paragraph(curve, fit),
        "measurements": [asdict(one) for one in curve.measurements],
    }


def draw(path: Path, results: Sequence[Result]) -> None:
    """Every figure of the table over the workers, and the losses; each mode in its colour."""
    from matplotlib.figure import Figure

    curves = [curve for curve, _ in results]
    wants_target = any(point.num_reached for curve in curves for point in curve.points)
    shown = [name for name in _PLOTS if wants_target or not name.endswith(("target_s", "target_j"))]
    num_columns = 4 if wants_target else 3
    figure = Figure(figsize=(4.5 * num_columns, 7.5), layout="constrained")
    axes = list(figure.subplots(2, num_columns).flat)
    for name, plot in zip(shown, axes, strict=False):
        title, factor = _PLOTS[name]
        plot.set(title=title.format(unit=curves[0].unit, per=curves[0].energy_per), xlabel="workers")
        for curve, colour, marker in zip(curves, _COLOURS, "os", strict=False):
            _draw_curve(plot, curve, name, factor, color=colour, marker=marker)
    speed, efficiency = axes[:2]
    _draw_models(speed, results)
    efficiency.axhline(100, color="0.5", linewidth=1)
    ticks = sorted({point.workers for curve in curves for point in curve.points})
    for plot in axes[: len(shown)]:
        if plot.has_data():
            plot.set(xticks=ticks, ylim=(0, 1.1 * plot.dataLim.y1))
            plot.grid(alpha=0.3)
        else:
            plot.text(0.5, 0.5, "not measured", ha="center", transform=plot.transAxes)
            plot.set(xticks=[], yticks=[])
    _draw_losses(axes[len(shown)], curves)
    axes[-1].set_axis_off()
    axes[-1].legend(*speed.get_legend_handles_labels(), loc="upper left")
    figure.savefig(path, dpi=120)


def _draw_curve(plot: Any, curve: Curve, name: str, factor: float, **style: str) -> None:
    known = [(point.workers, one) for point in curve.points if (one := getattr(point, name)) is not None]
    if not known:
        return
    above = [0.0 if one.high is None else factor * (one.high - one.value) for _, one in known]
    below = [0.0 if one.low is None else factor * (one.value - one.low) for _, one in known]
    values = [factor * one.value for _, one in known]
    bars = [below, above] if any(above) else None
    plot.errorbar([workers for workers, _ in known], values, yerr=bars, capsize=4, label=curve.mode, **style)


def _draw_models(plot: Any, results: Sequence[Result]) -> None:
    """The fitted speed-up of each mode, and the ideal one."""
    most = max(point.workers for curve, _ in results for point in curve.points)
    for (curve, fit), colour in zip(results, _COLOURS, strict=False):
        base = curve.base.workers
        if isinstance(fit, Fit) and fit.degrees:
            counts = [*range(base, most, max((most - base) // _CURVE_POINTS, 1)), most]
            fitted = [fit.speed_up(count, base).value for count in counts]
            plot.plot(counts, fitted, color=colour, linestyle=":", label=f"{curve.mode}, model")
    base = min(curve.base.workers for curve, _ in results)
    plot.plot([base, most], [1, most / base], color="0.5", linewidth=1, label="ideal")


def _draw_losses(plot: Any, curves: Sequence[Curve]) -> None:
    """A bar for each number of workers: losses above zero, gains below."""
    bars = [(f"{curve.mode}\n{p.workers}", p.split) for curve in curves for p in curve.points if p.split]
    plot.set(title="lost efficiency (% of the workers' time)", xlabel="workers")
    if not bars:
        plot.text(0.5, 0.5, "nothing to compare", ha="center", transform=plot.transAxes)
        return
    above, below = [0.0] * len(bars), [0.0] * len(bars)
    for (name, text), colour in zip(LOSSES.items(), _COLOURS, strict=False):
        parts = [100 * (getattr(split, name) or 0.0) for _, split in bars]
        is_missing = all(getattr(split, name) is None for _, split in bars)
        bottoms = [high if part >= 0 else low for part, high, low in zip(parts, above, below, strict=True)]
        label = f"{text}: not measured" if is_missing else text
        plot.bar(range(len(bars)), parts, bottom=bottoms, color=colour, label=label, width=0.6)
        above = [high + max(part, 0.0) for part, high in zip(parts, above, strict=True)]
        below = [low + min(part, 0.0) for part, low in zip(parts, below, strict=True)]
    plot.axhline(0, color="0.3", linewidth=1)
    plot.set_xticks(range(len(bars)), [label for label, _ in bars])
    plot.set_xlim(-1, len(bars))
    plot.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=2)
