"""The traces of all workers in a few lines that anyone can read, and as `profile/summary.json`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from stormo.errors import counted
from stormo.profiling.summary import PARTS

_MOST_OPERATIONS = 10
_LABELS = {
    "compute": "computing",
    "overlapped": "computing while gradients travel",
    "exposed": "standing still for gradients",
    "input": "waiting for input",
    "idle": "idle, or in Python",
}
# What to do about the largest part that is no computing.
_ADVICE = {
    "exposed": "Most of the rest goes to gradients that nothing hides: larger batches, --accumulate, a faster network, "
    "or workers of equal speed would shorten it.",
    "input": "Most of the rest is spent waiting for data: more --loader-workers, or a data set that fits on the device "
    "(--loader resident), would shorten it.",
    "idle": "Most of the rest is spent in Python, between operations: larger batches, --compile, or on one GPU --graph "
    "would shorten it.",
}


def overview(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join what `summarise` gave for every worker: seconds a step, as the mean over workers, the least and the most."""
    recorded = [rank for rank in ranks if rank["steps"]]
    figures = {
        name: _spread([_mean([step[f"{name}_s"] for step in rank["steps"]]) for rank in recorded])
        for name in ("time", *PARTS)
    }
    return {
        "steps": [step["step"] for step in recorded[0]["steps"]] if recorded else [],
        "step_time_s": figures.pop("time"),
        "parts_s": figures,
        "operations": _operations(recorded),
        "ranks": list(ranks),
    }


def lines(found: Mapping[str, Any]) -> list[str]:
    """What is printed of an overview."""
    ranks, steps = found["ranks"], found["steps"]
    failures = [f"Rank {rank['rank']} has no trace: {rank['failure']}." for rank in ranks if rank.get("failure")]
    failures += [f"Rank {rank['rank']}: {rank['notice']}." for rank in ranks if rank.get("notice")]
    if not steps:
        return failures
    step_s = found["step_time_s"]["mean"]
    kind = "GPU" if any(rank["device"] == "gpu" for rank in ranks if rank["steps"]) else "CPU"
    workers = counted(len(ranks), "worker")
    said = [f"Profile of steps {steps[0]} to {steps[-1]}, {workers}, by {kind} time: {_time(step_s)} a step"]
    head = ("share", "mean", *(("least", "most") if len(ranks) > 1 else ()))
    said.append(f"  {'':34}{''.join(f'{word:>11}' for word in head)}")
    for part in PARTS:
        spread = found["parts_s"][part]
        times = [spread["mean"], *([spread["min"], spread["max"]] if len(ranks) > 1 else [])]
        share = f"{100 * spread['mean'] / step_s:.1f} %" if step_s else "n/a"
        said.append(f"  {_LABELS[part]:34}{share:>11}{''.join(f'{_time(seconds):>11}' for seconds in times)}")
    said.append("The operations that took most of it:")
    for row in found["operations"]:
        share = f"{100 * row['time_s'] / step_s:.1f} %" if step_s else "n/a"
        calls = counted(f"{row['calls']:.1f}".removesuffix(".0"), "call")
        said.append(f"  {_cut(row['name']):56}{share:>8}{_time(row['time_s']):>11}  {calls}")
    return [*said, *_advice(found, step_s), *failures]


def _advice(found: Mapping[str, Any], step_s: float) -> list[str]:
    part = max(_ADVICE, key=lambda name: float(found["parts_s"][name]["mean"]))
    return [_ADVICE[part]] if found["parts_s"][part]["mean"] > 0.1 * step_s else []


def _operations(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A step's mean over all workers, of what took most."""
    times: dict[str, float] = defaultdict(float)
    calls: dict[str, float] = defaultdict(float)
    for rank in ranks:
        for row in rank["operations"]:
            times[row["name"]] += row["time_s"] / len(rank["steps"]) / len(ranks)
            calls[row["name"]] += row["calls"] / len(rank["steps"]) / len(ranks)
    names = sorted(times, key=lambda name: -times[name])[:_MOST_OPERATIONS]
    return [{"name": name, "time_s": times[name], "calls": calls[name]} for name in names]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": _mean(values), "min": min(values), "max": max(values)} if values else {}


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        value = seconds * factor
        if value >= 0.9995:  # what would be rounded to 1000 of the smaller unit
            return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
    return "0"


def _cut(name: str) -> str:
    return name if len(name) <= 54 else name[:53] + "…"
