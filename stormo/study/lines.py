"""The study as text: the table, bars of the speed-up, where the efficiency went, the model, the paragraph."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from stormo.errors import counted
from stormo.study.curve import Curve, Point
from stormo.study.estimate import Estimate
from stormo.study.fit import Fit
from stormo.study.verdict import figure, paragraph
from stormo.telemetry.text import format_rate

WIDTH = 100
_BAR_WIDTH = 50
_MISSING = "n/a"


def report_lines(curve: Curve, fit: Fit | str, *, plain: bool) -> list[str]:
    """Everything about one mode; `plain` uses no sign beyond ASCII in the bars."""
    wants_target = any(point.time_to_target_s is not None for point in curve.points)
    sections = [
        [_TITLES[curve.mode]],
        _aligned(_table(curve, wants_target=wants_target)),
        _remarks(curve),
        _bars(curve, plain=plain),
        _splits(curve),
        _model(fit),
        textwrap.wrap(paragraph(curve, fit), WIDTH),
    ]
    lines: list[str] = []
    for section in sections:
        if section:
            lines += [*section, ""]
    return lines


_TITLES = {
    "strong": "Strong scaling: the same global batch at every number of workers",
    "weak": "Weak scaling: the same batch for each worker",
}


def _table(curve: Curve, *, wants_target: bool) -> list[list[str]]:
    columns: list[tuple[str, Callable[[Point], str]]] = [
        ("workers", lambda point: str(point.workers)),
        ("runs", lambda point: str(point.num_repeats)),
        (f"{curve.unit}/s", lambda point: _ranged(point.units_per_s, format_rate)),
        ("speed-up", lambda point: _ranged(point.speed_up, _two)),
        ("efficiency", lambda point: _ranged(point.efficiency.times(100.0), _one, " %")),
        (f"J/{curve.energy_per}", lambda point: _ranged(point.j_per_sample, figure)),
    ]
    if wants_target:
        columns += [
            ("s to target", lambda point: _ranged(point.time_to_target_s, figure)),
            ("J to target", lambda point: _ranged(point.energy_to_target_j, figure)),
        ]
    rows = [[title for title, _ in columns]]
    return rows + [[show(point) for _, show in columns] for point in curve.points]


def _two(value: float) -> str:
    return f"{value:.2f}"


def _one(value: float) -> str:
    return f"{value:.1f}"


def _ranged(one: Estimate | None, show: Callable[[float], str], unit: str = "") -> str:
    if one is None:
        return _MISSING
    if one.low is None or one.high is None or one.high == one.low:
        return show(one.value) + unit
    if one.is_wide:
        return f"{show(one.value)} (scatters){unit}"
    return f"{show(one.value)} ({show(one.low)} to {show(one.high)}){unit}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _remarks(curve: Curve) -> list[str]:
    """What the figures rest on."""
    repeats = sorted({point.num_repeats for point in curve.points})
    told = "In brackets: 95 % intervals of the means (Student's t); ratios are taken repeat by repeat."
    if repeats == [1]:
        told = "Each number of workers was measured once: there are no intervals; three runs of each would give them."
    elif repeats[0] == 1:
        told += " A number of workers that was measured once has none."
    remarks = [told, *(f"{counted(point.workers, 'worker')}: {point.note}." for point in curve.points if point.note)]
    if any(point.j_per_sample is None for point in curve.points):
        remarks.append(f"Energy: not measured for every number of workers ({curve.energy_reason}).")
    return [line for remark in remarks for line in textwrap.wrap(remark, WIDTH)]


def _bars(curve: Curve, *, plain: bool) -> list[str]:
    """Speed-up as bars, with ideal scaling as a mark at the end of each."""
    if len(curve.points) < 2:
        return []
    base, last = curve.base.workers, curve.points[-1].workers
    top = max(last / base, *(point.speed_up.value for point in curve.points))
    full, mark = ("#", "|") if plain else ("█", "│")
    lines = [f"speed-up against {counted(base, 'worker')} ({mark} ideal)"]
    label = len(str(last))
    for point in curve.points:
        filled = round(point.speed_up.value / top * _BAR_WIDTH)
        ideal = round(point.workers / base / top * _BAR_WIDTH)
        bar = f"{full * filled:<{_BAR_WIDTH + 1}}"
        bar = bar[:ideal] + mark + bar[ideal + 1 :]
        lines.append(f"{point.workers:>{label}} {bar} {point.speed_up.value:.2f}")
    return lines


def _splits(curve: Curve) -> list[str]:
    """Where the workers' time went that ideal scaling would not have taken."""
    told = [(point.workers, point.split) for point in curve.points if point.split is not None]
    if not told:
        return []
    if all(part is None for _, split in told for part in (split.communication, split.input, split.imbalance)):
        lost = ", ".join(f"{100 * split.whole:.1f} % with {workers}" for workers, split in told)
        return textwrap.wrap(
            f"lost efficiency: {lost}; not split, as communication, input wait and imbalance were not measured.", WIDTH
        )
    names = {
        "communication": "communication",
        "input": "input wait",
        "imbalance": "imbalance",
        "rest": "the rest",
    }
    rows = [["workers", "lost", *names.values()]]
    for workers, split in told:
        parts = [getattr(split, name) for name in names]
        rows.append([str(workers), *(_percent(part) for part in (split.whole, *parts))])
    missing = [words for name, words in names.items() if any(getattr(split, name) is None for _, split in told)]
    note = "The rest: smaller kernels and shared hardware."
    if missing:
        note = f"The rest: smaller kernels, shared hardware, and what was not measured here ({', '.join(missing)})."
        if any(one.basis.endswith(("step", "steps")) for one in curve.measurements):
            note += " Only a run measured over a whole epoch tells all parts: a longer --seconds, or fewer samples."
    return ["lost efficiency, as shares of the workers' time", *_aligned(rows), *textwrap.wrap(note, WIDTH)]


def _percent(share: float | None) -> str:
    return _MISSING if share is None else f"{round(100 * share, 1) + 0.0:.1f} %"  # no minus before a zero


def _model(fit: Fit | str) -> list[str]:
    if isinstance(fit, str):
        return [f"model: none, as {fit}"]
    share = f"serial share {_ranged_share(fit.serial_share)}"
    if fit.communication_s is not None:
        share += f", communication {_spanned(fit.communication_s.times(1000.0))} ms a step"
    sure = f"misses the means by at most {100 * fit.misfit:.1f} %"
    if fit.degrees == 0 and fit.misfit < 1e-6:
        sure = "goes through every point, so that it is not tested and has no intervals"
    text = f"model: {share}; {sure}" + (f"; {fit.note}" if fit.note else "")
    return textwrap.wrap(f"{text}.", WIDTH)


def _ranged_share(one: Estimate) -> str:
    return f"{_spanned(one.times(100.0))} %"


def _spanned(one: Estimate) -> str:
    if one.low is None or one.high is None:
        return figure(one.value)
    return f"{figure(one.value)} ({figure(one.low)} to {figure(one.high)})"
