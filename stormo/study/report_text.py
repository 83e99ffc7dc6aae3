"""The study as text: table, speed-up as bars, lost efficiency, model, and a paragraph with the answer."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable

from stormo.errors import pluralize
from stormo.study.curve import Curve, Estimate, Point
from stormo.study.fit import Fit
from stormo.telemetry.runs_folder import align
from stormo.telemetry.text import format_duration, format_rate

REACH = 4  # nothing is extrapolated beyond this many times the most workers measured
_MOST_MISFIT = 0.1  # a model that misses by more is not extrapolated
_HALF = 0.5
_ONCE_OFF = 0.05  # how far a single measurement may be off
_TOO_GOOD = 1.05  # an efficiency above this puts the comparison itself in doubt
_WIDTH = 100
_BAR_WIDTH = 50
_TITLES = {
    "strong": "Strong scaling: the same global batch at every number of workers",
    "weak": "Weak scaling: the same batch for each worker",
}
LOSSES = {"communication": "communication", "input": "input wait", "imbalance": "imbalance", "rest": "the rest"}


def report_lines(curve: Curve, fit: Fit | str) -> list[str]:
    """Everything about one mode."""
    sections = [
        [_TITLES[curve.mode]],
        _table(curve),
        _remarks(curve),
        _bars(curve),
        _losses(curve),
        _model(fit),
        textwrap.wrap(paragraph(curve, fit), _WIDTH),
    ]
    return [line for section in sections if section for line in [*section, ""]]


def figure(value: float) -> str:
    """Three digits, as many as such a measurement bears."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def _workers(count: int) -> str:
    return pluralize(count, "worker")


def _table(curve: Curve) -> list[str]:
    columns: list[tuple[str, Callable[[Point], str]]] = [
        ("workers", lambda point: str(point.workers)),
        ("runs", lambda point: str(point.num_repeats)),
        (f"{curve.unit}/s", lambda point: _ranged(point.units_per_s, format_rate)),
        ("speed-up", lambda point: _ranged(point.speed_up, lambda value: f"{value:.2f}")),
        ("efficiency", lambda point: _ranged(point.efficiency.times(100.0), lambda value: f"{value:.1f}", " %")),
        (f"J/{curve.energy_per}", lambda point: _ranged(point.j_per_sample, figure)),
    ]
    if any(point.time_to_target_s is not None for point in curve.points):
        columns += [
            ("s to target", lambda point: _ranged(point.time_to_target_s, figure)),
            ("J to target", lambda point: _ranged(point.energy_to_target_j, figure)),
        ]
    rows = [[title for title, _ in columns], *([show(point) for _, show in columns] for point in curve.points)]
    return align(rows, num_text_columns=0)


def _ranged(one: Estimate | None, show: Callable[[float], str], unit: str = "") -> str:
    if one is None:
        return "n/a"
    if one.low is None or one.high is None or one.high == one.low:
        return show(one.value) + unit
    if one.is_wide:
        return f"{show(one.value)} (scatters){unit}"
    return f"{show(one.value)} ({show(one.low)} to {show(one.high)}){unit}"


def _remarks(curve: Curve) -> list[str]:
    """Notes below the table."""
    repeats = sorted({point.num_repeats for point in curve.points})
    intervals = "In brackets: 95 % intervals of the means (Student's t). Ratios are taken repeat by repeat."
    if repeats == [1]:
        intervals = "Each number of workers was measured once, so there are no intervals; three runs of each give them."
    elif repeats[0] == 1:
        intervals += " A number of workers that was measured once has none."
    remarks = [intervals, *(f"{_workers(point.workers)}: {point.note}." for point in curve.points if point.note)]
    if any(point.j_per_sample is None for point in curve.points):
        remarks.append(f"Energy was not measured for every number of workers ({curve.energy_reason}).")
    return [line for remark in remarks for line in textwrap.wrap(remark, _WIDTH)]


def _bars(curve: Curve) -> list[str]:
    """Speed-up as bars in ASCII, each with a mark at the ideal."""
    if len(curve.points) < 2:
        return []
    base, last = curve.base.workers, curve.points[-1].workers
    top = max(last / base, *(point.speed_up.value for point in curve.points))
    lines = [f"speed-up against {_workers(base)} (| ideal)"]
    for point in curve.points:
        filled = round(point.speed_up.value / top * _BAR_WIDTH)
        ideal = round(point.workers / base / top * _BAR_WIDTH)
        bar = f"{'#' * filled:<{_BAR_WIDTH + 1}}"
        bar = bar[:ideal] + "|" + bar[ideal + 1 :]
        lines.append(f"{point.workers:>{len(str(last))}} {bar} {point.speed_up.value:.2f}")
    return lines


def _losses(curve: Curve) -> list[str]:
    """Where the workers' time went that ideal scaling would not have taken."""
    splits = [(point.workers, point.split) for point in curve.points if point.split is not None]
    if not splits:
        return []
    missing = [label for name, label in LOSSES.items() if any(getattr(split, name) is None for _, split in splits)]
    if all(part is None for _, split in splits for part in (split.communication, split.input, split.imbalance)):
        lost = ", ".join(f"{100 * split.whole:.1f} % with {workers}" for workers, split in splits)
        text = f"lost efficiency: {lost}; not split, as communication, input wait and imbalance were not measured."
        return textwrap.wrap(text, _WIDTH)
    rows = [["workers", "lost", *LOSSES.values()]]
    for workers, split in splits:
        rows.append([str(workers), *(_percent(getattr(split, name)) for name in ("whole", *LOSSES))])
    note = "The rest: smaller kernels and shared hardware."
    if missing:
        note = f"The rest: smaller kernels, shared hardware, and what was not measured here ({', '.join(missing)})."
        if any(one.is_of_steps for one in curve.measurements):
            note += " Only a run measured over a whole epoch shows all parts: set a longer --seconds, or fewer samples."
    return [
        "lost efficiency, as shares of the workers' time",
        *align(rows, num_text_columns=0),
        *textwrap.wrap(note, _WIDTH),
    ]


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{round(100 * share, 1) + 0.0:.1f} %"  # no minus before a zero


def _model(fit: Fit | str) -> list[str]:
    if isinstance(fit, str):
        return [f"model: none, as {fit}"]
    share = f"serial share {_spanned(fit.serial_share.times(100.0))} %"
    if fit.communication_s is not None:
        share += f", communication {_spanned(fit.communication_s.times(1000.0))} ms a step"
    test = f"misses the means by at most {100 * fit.misfit:.1f} %"
    if fit.degrees == 0 and fit.misfit < 1e-6:
        test = "passes through every point, so it is not tested and has no intervals"
    return textwrap.wrap(f"model: {share}; {test}{f'; {fit.note}' if fit.note else ''}.", _WIDTH)


def _spanned(one: Estimate) -> str:
    if one.low is None or one.high is None:
        return figure(one.value)
    return f"{figure(one.value)} ({figure(one.low)} to {figure(one.high)})"


def paragraph(curve: Curve, fit: Fit | str) -> str:
    """Whether more workers pay: what was measured, how certain it is, what is extrapolated."""
    if len(curve.points) < 2:
        return (
            f"{curve.mode.capitalize()} scaling: only one number of workers ({curve.base.workers}) was measured. "
            "A comparison needs at least two."
        )
    return " ".join([*_time(curve), *_efficiency(curve, fit), *_energy(curve), *_target(curve)])


def _interval(one: Estimate, show: Callable[[float], str] = figure, unit: str = "") -> str:
    assert one.low is not None
    assert one.high is not None
    return f"95 % interval {show(one.low)} to {show(one.high)}{unit}"


def _certainty(one: Estimate, show: Callable[[float], str] = figure, unit: str = "") -> str:
    if one.is_wide:
        return "its runs scatter too widely for an interval"
    return "measured once" if one.low is None else _interval(one, show, unit)


def _bounds(one: Estimate) -> tuple[float, float]:
    """The interval, or how far a single measurement may be off."""
    low = one.value * (1 - _ONCE_OFF) if one.low is None else one.low
    return low, one.value * (1 + _ONCE_OFF) if one.high is None else one.high


def _fastest(curve: Curve) -> Point:
    return max(curve.points[1:], key=lambda point: point.speed_up.value)


def _time(curve: Curve) -> list[str]:
    base, more, best = curve.base, curve.points[1:], _fastest(curve)
    scaling = f"{curve.mode.capitalize()} scaling"
    speed = f"{_workers(best.workers)} train {figure(best.speed_up.value)} times as fast as {_workers(base.workers)}"
    low, high = _bounds(best.speed_up)
    if high <= 1:
        others = " Every other number that was measured is slower still." if len(more) > 1 else ""
        return [f"{scaling}: more workers save no time. {speed} ({_certainty(best.speed_up)}).{others}"]
    if low <= 1:
        if best.speed_up.is_wide:
            why = "the runs scatter too widely. More repeats, or a quieter machine, would tell"
        elif best.speed_up.low is None:
            why = f"one measurement may be {100 * _ONCE_OFF:.0f} % off. More repeats (--repeats 3) would tell"
        else:
            why = f"the {_interval(best.speed_up)} includes 1. More repeats would narrow it"
        return [f"{scaling}: it is not certain that more workers save time. {speed}, but {why}."]
    sentences = [
        f"{scaling}: more workers save time. {speed} ({_certainty(best.speed_up)}), "
        f"at {100 * best.efficiency.value:.0f} % efficiency."
    ]
    too_good = max(more, key=lambda point: point.efficiency.value)
    if too_good.efficiency.value > _TOO_GOOD:
        sentences.append(
            f"{_workers(too_good.workers)} reach {100 * too_good.efficiency.value:.0f} % of the ideal, so something "
            f"else slowed {_workers(base.workers)} down, such as too little memory or other programs on the machine: "
            "measure again before you rely on it."
        )
    beyond = next((point for point in more if point.workers > best.workers), None)
    if beyond is not None:
        sentences.append(
            f"Beyond that, more workers are slower: {_workers(beyond.workers)} train "
            f"{figure(beyond.speed_up.value)} times as fast ({_certainty(beyond.speed_up)})."
        )
    return sentences


def _efficiency(curve: Curve, fit: Fit | str) -> list[str]:
    """Where efficiency falls under one half, and how far the curve can be extrapolated."""
    low = [point for point in curve.points if point.efficiency.value < _HALF and not point.efficiency.is_wide]
    sentences = []
    if low:
        probably = "" if _bounds(low[0].efficiency)[1] < _HALF else "probably "
        sentences.append(
            f"Efficiency is {probably}under 50 % from {_workers(low[0].workers)} on "
            f"({figure(100 * low[0].efficiency.value)} %, {_certainty(low[0].efficiency.times(100.0))})."
        )
    if any(point.efficiency.value > _TOO_GOOD for point in curve.points):
        return sentences
    if len(curve.points) < 3:
        sentences.append("Two numbers of workers cannot show how many more would pay: a third would test the model.")
    elif isinstance(fit, str):
        sentences.append(f"Nothing is extrapolated, as {fit}.")
    elif fit.misfit > _MOST_MISFIT:
        sentences.append(
            f"Nothing is extrapolated, as the model misses the measurements by up to {100 * fit.misfit:.0f} %."
        )
    else:
        sentences.append(f"Extrapolated, not measured: {_extrapolated(curve, fit, is_low=bool(low))}.")
    return sentences


def _extrapolated(curve: Curve, fit: Fit, *, is_low: bool) -> str:
    base, most = curve.base.workers, REACH * curve.points[-1].workers
    ahead = fit.speed_up(most, base)
    interval = "" if ahead.low is None else f" ({_interval(ahead)})"
    reach = f"the speed-up at {most} workers, {REACH} times the most measured, would be {figure(ahead.value)}{interval}"
    if is_low:
        return reach
    half = fit.first_below(_HALF, base, most)
    if half is None:
        return f"efficiency stays above 50 % up to {most} workers, and {reach}"
    interval = ""
    if half.low is not None and half.high is not None:
        upper = f"more than {most}" if math.isinf(half.high) else f"{half.high:.0f}"
        interval = f" (95 % interval {half.low:.0f} to {upper})"
    return f"efficiency falls under 50 % at {half.value:.0f} workers{interval}, and {reach}"


def _energy(curve: Curve) -> list[str]:
    base, more = curve.base, curve.points[1:]
    # A repeat that the fewest workers lack is in no ratio, and may be the one without energy.
    known = [(p.energy_ratio, p) for p in more if p.energy_ratio is not None and p.j_per_sample is not None]
    if base.j_per_sample is None or not known:
        return [f"Energy was not measured ({curve.energy_reason or 'not recorded'})."]
    ratio, best = min(known, key=lambda pair: pair[0].value)
    assert best.j_per_sample is not None
    certainty = _certainty(ratio, lambda value: f"{100 * (value - 1):+.1f}", " %")
    cost = (
        f"{'An' if curve.energy_per[0] in 'aeiou' else 'A'} {curve.energy_per} takes "
        f"{figure(best.j_per_sample.value)} J with {_workers(best.workers)} and "
        f"{figure(base.j_per_sample.value)} J with {base.workers}: {100 * (ratio.value - 1):+.1f} % ({certainty})"
    )
    low, high = _bounds(ratio)
    if high < 1:
        too = " too" if _bounds(_fastest(curve).speed_up)[0] > 1 else ""
        return [f"They save energy{too}. {cost}; no other number that was measured takes less."]
    if low <= 1:
        why = "" if ratio.is_wide or ratio.low is None else ", and the interval includes 0"
        return [f"It is not certain that they save energy. {cost}{why}."]
    return [f"They save no energy. {cost}; it is least with {_workers(base.workers)}."]


def _target(curve: Curve) -> list[str]:
    times = [(p.time_to_target_s.value, p) for p in curve.points if p.time_to_target_s is not None]
    if not times:
        return []
    time_s, fastest = min(times, key=lambda pair: pair[0])
    sentences = [f"{_workers(fastest.workers)} reached the target first, after {format_duration(time_s)} of training."]
    short = [point for point in curve.points if point.num_reached < point.num_repeats]
    if short:
        counts = (f"{p.num_reached} of {p.num_repeats} with {_workers(p.workers)}" for p in short)
        sentences.append(f"Not every run reached it: {', '.join(counts)}.")
    energies = [(p.energy_to_target_j.value, p) for p in curve.points if p.energy_to_target_j is not None]
    if energies:
        energy_j, least = min(energies, key=lambda pair: pair[0])
        sentences.append(f"{_workers(least.workers)} took the least energy to it: {figure(energy_j)} J.")
    return sentences
