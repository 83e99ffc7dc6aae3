"""The study as files: `scale.csv` for tables, `scale.json` with everything, `scale.png` to look at."""

from __future__ import annotations

import csv
import importlib.util
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stormo.study.curve import Curve, Estimate, Point
from stormo.study.fit import Fit
from stormo.study.text import paragraph
from stormo.telemetry.folder import write_json, write_whole

_ESTIMATES = (
    "units_per_s",
    "speed_up",
    "efficiency",
    "j_per_sample",
    "energy_ratio",
    "time_to_target_s",
    "energy_to_target_j",
)
# What is drawn over the workers: its title, and the factor to its unit.
_TITLES = {
    "speed_up": ("speed-up", 1.0),
    "efficiency": ("efficiency (%)", 100.0),
    "units_per_s": ("speed ({unit}/s)", 1.0),
    "j_per_sample": ("energy (J/{per})", 1.0),
    "time_to_target_s": ("time to the target (s)", 1.0),
    "energy_to_target_j": ("energy to the target (J)", 1.0),
}
_LOSSES = {
    "communication": "communication",
    "input": "input wait",
    "imbalance": "imbalance",
    "rest": "smaller kernels and the rest",
}
# Okabe and Ito's colours, which the colour-blind can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7")
_CURVE_POINTS = 100

Answer = tuple[Curve, Fit | str]


def write_results(folder: Path, answers: Sequence[Answer], failed: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write every file that can be written; a sentence for each, or for why there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_csv(folder / "scale.csv", [curve for curve, _ in answers])
    write_json(folder / "scale.json", {"studies": [_as_json(*answer) for answer in answers], "failed": failed})
    told = [f"{folder / 'scale.csv'}, {folder / 'scale.json'}"]
    if importlib.util.find_spec("matplotlib") is None:
        return [*told, "no scale.png: matplotlib is not installed; get it with: pip install 'stormo[plot]'"]
    draw(folder / "scale.png", answers)
    return [f"{told[0]}, {folder / 'scale.png'}"]


def _write_csv(path: Path, curves: Sequence[Curve]) -> None:
    names = [f"{name}{end}" for name in _ESTIMATES for end in ("", "_low", "_high")]
    losses = [f"lost_{name}" for name in ("whole", *_LOSSES)]
    with io.StringIO(newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["mode", "workers", "runs", "unit", *names, "num_reached", *losses, "note"])
        for curve in curves:
            for point in curve.points:
                figures = [figure for name in _ESTIMATES for figure in _three(getattr(point, name))]
                split = [getattr(point.split, name, None) for name in ("whole", *_LOSSES)]
                row = [curve.mode, point.workers, point.num_repeats, curve.unit, *figures, point.num_reached, *split]
                row.append(point.note)
                writer.writerow(["" if cell is None else cell for cell in row])
        write_whole(path, file.getvalue())


def _three(one: Estimate | None) -> tuple[float | None, float | None, float | None]:
    return (None, None, None) if one is None else (one.value, one.low, one.high)


def _as_json(curve: Curve, fit: Fit | str) -> dict[str, Any]:
    return {
        "mode": curve.mode,
        "unit": curve.unit,
        "energy_per": curve.energy_per,
        "energy_reason": curve.energy_reason or None,
        "points": [asdict(point) for point in curve.points],
        "model": _model(fit),
        "paragraph": paragraph(curve, fit),
        "measurements": [asdict(one) for one in curve.measurements],
    }


def _model(fit: Fit | str) -> dict[str, Any]:
    if isinstance(fit, str):
        return {"reason": fit}
    return {
        "serial_share": asdict(fit.serial_share),
        "communication_s": asdict(fit.communication_s) if fit.communication_s else None,
        "one_worker_s": asdict(fit.one_worker_s),
        "misfit": fit.misfit,
        "degrees": fit.degrees,
        "note": fit.note or None,
    }


def draw(path: Path, answers: Sequence[Answer]) -> None:
    """Every figure of the table over the workers, and the losses; each mode in its colour."""
    from matplotlib.figure import Figure

    curves = [curve for curve, _ in answers]
    wants_target = any(point.num_reached for curve in curves for point in curve.points)
    shown = [name for name in _TITLES if wants_target or not name.endswith(("target_s", "target_j"))]
    num_columns = 4 if wants_target else 3
    figure = Figure(figsize=(4.5 * num_columns, 7.5), layout="constrained")
    planes = list(figure.subplots(2, num_columns).flat)
    for name, axes in zip(shown, planes, strict=False):
        title, factor = _TITLES[name]
        axes.set(title=title.format(unit=curves[0].unit, per=curves[0].energy_per), xlabel="workers")
        for curve, colour, marker in zip(curves, _COLOURS, "os", strict=False):
            _plot(axes, curve, name, factor, color=colour, marker=marker)
    speed, efficiency = planes[:2]
    _draw_models(speed, answers)
    efficiency.axhline(100, color="0.5", linewidth=1)
    ticks = sorted({point.workers for curve in curves for point in curve.points})
    for axes in planes[: len(shown)]:
        if axes.has_data():
            axes.set(xticks=ticks, ylim=(0, 1.1 * axes.dataLim.y1))
            axes.grid(alpha=0.3)
        else:
            axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
            axes.set(xticks=[], yticks=[])
    _draw_losses(planes[len(shown)], curves)
    planes[-1].set_axis_off()
    planes[-1].legend(*speed.get_legend_handles_labels(), loc="upper left")
    figure.savefig(path, dpi=120)


def _draw_models(axes: Any, answers: Sequence[Answer]) -> None:
    """The fitted speed-up of each mode, and the ideal one."""
    most = max(point.workers for curve, _ in answers for point in curve.points)
    for (curve, fit), colour in zip(answers, _COLOURS, strict=False):
        base = curve.base.workers
        if isinstance(fit, Fit) and fit.degrees:
            counts = [*range(base, most, max((most - base) // _CURVE_POINTS, 1)), most]
            fitted = [fit.speed_up(count, base).value for count in counts]
            axes.plot(counts, fitted, color=colour, linestyle=":", label=f"{curve.mode}, model")
    base = min(curve.base.workers for curve, _ in answers)
    axes.plot([base, most], [1, most / base], color="0.5", linewidth=1, label="ideal")


def _plot(axes: Any, curve: Curve, name: str, factor: float, **style: str) -> None:
    known: list[tuple[Point, Estimate]] = [(p, one) for p in curve.points if (one := getattr(p, name)) is not None]
    if not known:
        return
    values = [factor * one.value for _, one in known]
    above = [0.0 if one.high is None else factor * (one.high - one.value) for _, one in known]
    below = [0.0 if one.low is None else factor * (one.value - one.low) for _, one in known]
    workers = [point.workers for point, _ in known]
    axes.errorbar(workers, values, yerr=[below, above] if any(above) else None, capsize=4, label=curve.mode, **style)


def _draw_losses(axes: Any, curves: Sequence[Curve]) -> None:
    """One bar for each number of workers: the parts above and, where they are gains, below zero."""
    bars = [
        (f"{curve.mode}\n{point.workers}", point.split) for curve in curves for point in curve.points if point.split
    ]
    axes.set(title="lost efficiency (% of the workers' time)", xlabel="workers")
    if not bars:
        axes.text(0.5, 0.5, "nothing to compare", ha="center", transform=axes.transAxes)
        return
    above, below = [0.0] * len(bars), [0.0] * len(bars)
    for (name, words), colour in zip(_LOSSES.items(), _COLOURS, strict=False):
        parts = [100 * (getattr(split, name) or 0.0) for _, split in bars]
        is_missing = all(getattr(split, name) is None for _, split in bars)
        label = f"{words}: not measured" if is_missing else words
        bottoms = [high if part >= 0 else low for part, high, low in zip(parts, above, below, strict=True)]
        axes.bar(range(len(bars)), parts, bottom=bottoms, color=colour, label=label, width=0.6)
        above = [high + max(part, 0.0) for part, high in zip(parts, above, strict=True)]
        below = [low + min(part, 0.0) for part, low in zip(parts, below, strict=True)]
    axes.axhline(0, color="0.3", linewidth=1)
    axes.set_xticks(range(len(bars)), [label for label, _ in bars])
    axes.set_xlim(-1, len(bars))
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=2)
