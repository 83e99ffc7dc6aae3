"""The study as text: the table, bars of the speed-up, lost efficiency, the model, and the paragraph that answers."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence

from stormo.errors import counted
from stormo.study.curve import Curve, Estimate, Point
from stormo.study.fit import Fit
from stormo.telemetry.text import format_duration, format_rate

REACH = 4  # times the largest measured number of workers: no further is anything extrapolated
_MOST_MISFIT = 0.1  # of a model that is extrapolated
_HALF = 0.5
_ONCE_OFF = 0.05  # what is measured once is not told from what is closer to it
_TOO_GOOD = 1.05  # efficiency beyond which the comparison itself is in doubt


def paragraph(curve: Curve, fit: Fit | str) -> str:
    """The whole answer for one mode."""
    if len(curve.points) < 2:
        workers = counted(curve.base.workers, "worker")
        return (
            f"It cannot be told whether more workers pay in {curve.mode} scaling: {workers} alone "
            f"{'was' if curve.base.workers == 1 else 'were'} measured, and at least two numbers of workers are needed."
        )
    sentences = [*_time(curve), *_efficiency(curve, fit), *_energy(curve), *_target(curve)]
    return " ".join(sentences)


def figure(value: float) -> str:
    """Three digits, as many as such a measurement bears."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def _interval(one: Estimate) -> str:
    assert one.low is not None
    assert one.high is not None
    return f"95 % interval {figure(one.low)} to {figure(one.high)}"


def _known(one: Estimate) -> str:
    if one.is_wide:
        return "its runs scatter too widely for an interval"
    return "measured once, so without an interval" if one.low is None else _interval(one)


def _sure(one: Estimate) -> tuple[float, float]:
    """Between what the figure lies: its interval, or what a single measurement may be off by."""
    low = one.value * (1 - _ONCE_OFF) if one.low is None else one.low
    return low, one.value * (1 + _ONCE_OFF) if one.high is None else one.high


def _fastest(curve: Curve) -> Point:
    return max(curve.points[1:], key=lambda point: point.speed_up.value)


def _time(curve: Curve) -> list[str]:
    base, more = curve.base, curve.points[1:]
    best = _fastest(curve)
    fewest, where = counted(base.workers, "worker"), f"In {curve.mode} scaling"
    told = f"{counted(best.workers, 'worker')} train {figure(best.speed_up.value)} times as fast as {fewest}"
    low, high = _sure(best.speed_up)
    if high <= 1:
        others = " and every other number that was measured is slower still" if len(more) > 1 else ""
        return [f"{where} more workers do not pay for time: {told} ({_known(best.speed_up)}){others}."]
    if low <= 1:
        if best.speed_up.is_wide:
            why = "the runs scatter too widely to tell more; more repeats, or a quieter machine, would"
        elif best.speed_up.low is None:
            why = f"what is measured once may be {100 * _ONCE_OFF:.0f} % off; more repeats (--repeats 3) would tell"
        else:
            why = f"the {_interval(best.speed_up)} holds 1; more repeats would narrow it"
        return [f"{where} it cannot be told whether more workers pay for time: {told}, and {why}."]
    share = f"each of them put to {100 * best.efficiency.value:.0f} % use"
    sentences = [f"{where} more workers pay for time: {told} ({_known(best.speed_up)}), {share}."]
    too_good = max(more, key=lambda point: point.efficiency.value)
    if too_good.efficiency.value > _TOO_GOOD:
        above = f"{counted(too_good.workers, 'worker')} do {100 * too_good.efficiency.value:.0f} % of the ideal"
        sentences.append(
            f"That {above} says that something else held {fewest} back, such as too little memory or other programs on "
            "the machine: measure again before you rely on it."
        )
    beyond = [point for point in more if point.workers > best.workers]
    if beyond:
        sentences.append(
            f"Time stops falling there: with {counted(beyond[0].workers, 'worker')} it is "
            f"{figure(beyond[0].speed_up.value)} times ({_known(beyond[0].speed_up)})."
        )
    return sentences


def _efficiency(curve: Curve, fit: Fit | str) -> list[str]:
    """Where efficiency falls under one half, and how far the curve can be drawn out."""
    low = [point for point in curve.points if point.efficiency.value < _HALF and not point.efficiency.is_wide]
    sentences = []
    if low:
        sure = "" if _sure(low[0].efficiency)[1] < _HALF else "probably "
        sentences.append(
            f"Efficiency is {sure}under 50 % from {counted(low[0].workers, 'worker')} on "
            f"({figure(100 * low[0].efficiency.value)} %, {_known(low[0].efficiency.times(100.0))})."
        )
    if any(point.efficiency.value > _TOO_GOOD for point in curve.points):
        return sentences
    if len(curve.points) < 3:
        known = "" if low else "where efficiency falls under 50 % or "
        sentences.append(
            f"Two numbers of workers cannot tell {known}how many more would pay: that takes a third, "
            "with which a model can be tested."
        )
        return sentences
    if isinstance(fit, str):
        return [*sentences, f"There is no model to extrapolate from, as {fit}."]
    if fit.misfit > _MOST_MISFIT:
        sentences.append(
            f"The fitted model misses the measurements by up to {100 * fit.misfit:.0f} %, so nothing is extrapolated "
            "from it."
        )
        return sentences
    return sentences + _extrapolated(curve, fit, is_low=bool(low))


def _extrapolated(curve: Curve, fit: Fit, *, is_low: bool) -> list[str]:
    base, last = curve.base.workers, curve.points[-1].workers
    most = REACH * last
    ahead = fit.speed_up(most, base)
    reach = (
        f"at {most} workers, {REACH} times the most that were measured, the speed-up would be {figure(ahead.value)}"
        f"{'' if ahead.low is None else f' ({_interval(ahead)})'}"
    )
    if is_low:
        return [f"Extrapolated, not measured: {reach}."]
    half = fit.first_below(_HALF, base, most)
    if half is None:
        return [f"Extrapolated, not measured: efficiency stays above 50 % as far as {most} workers, and {reach}."]
    sure = ""
    if half.low is not None and half.high is not None:
        upper = f"more than {most}" if math.isinf(half.high) else f"{half.high:.0f}"
        sure = f" (95 % interval {half.low:.0f} to {upper})"
    return [f"Extrapolated, not measured: efficiency falls under 50 % at {half.value:.0f} workers{sure}, and {reach}."]


def _energy(curve: Curve) -> list[str]:
    base, more = curve.base, curve.points[1:]
    # A repeat that the fewest workers lack is in no ratio, and may be the one without energy.
    told = [point for point in more if point.energy_ratio is not None and point.j_per_sample is not None]
    if base.j_per_sample is None or not told:
        return [f"Energy was not measured ({curve.energy_reason or 'not recorded'}), so nothing is said of it."]
    best = min(told, key=lambda point: point.energy_ratio.value if point.energy_ratio else math.inf)
    assert best.energy_ratio is not None
    low, high = _sure(best.energy_ratio)
    if high < 1:
        too = " too" if _sure(_fastest(curve).speed_up)[0] > 1 else ""
        return [f"They pay for energy{too}: {_cost(curve, best)}; of all measured that is the least."]
    if low <= 1:
        why = ", and the interval holds 0"
        if best.energy_ratio.is_wide or best.energy_ratio.low is None:
            why = ""
        return [f"Whether they pay for energy cannot be told: {_cost(curve, best)}{why}."]
    return [f"For energy they do not pay: {_cost(curve, best)}; it is least with {counted(base.workers, 'worker')}."]


def _cost(curve: Curve, point: Point) -> str:
    """The energy of a sample beside that of the fewest workers."""
    base, ratio = curve.base, point.energy_ratio
    assert base.j_per_sample is not None
    assert point.j_per_sample is not None
    assert ratio is not None
    sure = "its runs scatter too widely for an interval" if ratio.is_wide else "measured once"
    if ratio.low is not None and ratio.high is not None and not ratio.is_wide:
        sure = f"95 % interval {100 * (ratio.low - 1):+.1f} to {100 * (ratio.high - 1):+.1f} %"
    return (
        f"{'an' if curve.energy_per[0] in 'aeiou' else 'a'} {curve.energy_per} takes "
        f"{figure(point.j_per_sample.value)} J with {counted(point.workers, 'worker')} and "
        f"{figure(base.j_per_sample.value)} J with {base.workers}, {100 * (ratio.value - 1):+.1f} % ({sure})"
    )


def _target(curve: Curve) -> list[str]:
    reached = [point for point in curve.points if point.time_to_target_s is not None]
    if not reached:
        return []
    fastest = min(reached, key=_time_to_target_s)
    sentences = [
        f"The target was reached soonest with {counted(fastest.workers, 'worker')}, "
        f"after {format_duration(_time_to_target_s(fastest))} of training."
    ]
    short = [point for point in curve.points if point.num_reached < point.num_repeats]
    if short:
        sentences.append(f"Not every run reached it: {_listed(short)}.")
    frugal = [point for point in reached if point.energy_to_target_j is not None]
    if frugal:
        least = min(frugal, key=_energy_to_target_j)
        sentences.append(
            f"It took the least energy with {counted(least.workers, 'worker')}: {figure(_energy_to_target_j(least))} J."
        )
    return sentences


def _time_to_target_s(point: Point) -> float:
    return math.inf if point.time_to_target_s is None else point.time_to_target_s.value


def _energy_to_target_j(point: Point) -> float:
    return math.inf if point.energy_to_target_j is None else point.energy_to_target_j.value


def _listed(points: Sequence[Point]) -> str:
    return ", ".join(
        f"{point.num_reached} of {point.num_repeats} with {counted(point.workers, 'worker')}" for point in points
    )


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
