"""Splits the time of a step into parts from a worker's trace, and joins the traces of all workers into a few lines.

Pure functions over the events of a Chrome trace as torch's profiler writes them. Every nanosecond of a step is in
exactly one part: on a GPU by the intervals of its kernels, on a CPU by the operations of the training thread.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stormo.errors import pluralize
from stormo.telemetry.text import format_time

Interval = tuple[int, int]  # start and end in whole nanoseconds, so that sums are exact
Intervals = list[Interval]


def union(intervals: Iterable[Interval]) -> Intervals:
    """The union, sorted and disjoint."""
    merged: Intervals = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = merged[-1][0], end
        elif end > begin:
            merged.append((begin, end))
    return merged


def intersection(first: Intervals, second: Intervals) -> Intervals:
    """The intersection."""
    shared: Intervals = []
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if end > begin:
            shared.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return shared


def difference(first: Intervals, second: Intervals) -> Intervals:
    """The first set without the second."""
    if not first or not second:
        return first
    low, high = min(first[0][0], second[0][0]), max(first[-1][1], second[-1][1])
    edges = [low, *(edge for interval in second for edge in interval), high]
    return intersection(first, list(zip(edges[::2], edges[1::2], strict=True)))


def lengths(spans: Sequence[Interval], moments: Intervals) -> list[int]:
    """The length of the set within each span; the spans are sorted and disjoint."""
    found, i = [0] * len(spans), 0
    for number, (begin, end) in enumerate(spans):
        while i < len(moments) and moments[i][1] <= begin:
            i += 1
        j = i
        while j < len(moments) and moments[j][0] < end:
            found[number] += min(end, moments[j][1]) - max(begin, moments[j][0])
            j += 1
    return found


def finder(spans: Sequence[Interval]) -> Callable[[int], int | None]:
    """Tells the index of the span that holds a moment; the spans are sorted and disjoint."""
    begins = [begin for begin, _ in spans]

    def find(moment: int) -> int | None:
        index = bisect_right(begins, moment) - 1
        return index if index >= 0 and moment < spans[index][1] else None

    return find


STEP = "ProfilerStep#"  # as torch's own tools name a step
PARTS = ("compute", "overlapped", "exposed", "input", "idle")
_MOST_OPERATIONS = 40
_BETWEEN_STEPS = ("validation", "checkpoint")  # may lie between two steps and belong to none

Event = Mapping[str, Any]


@dataclass
class _Trace:
    """The events of a trace by kind."""

    steps: list[tuple[int, Interval]] = field(default_factory=list)  # by number, on the host
    thread: Any = None  # the training thread
    ranges: dict[str, list[Interval]] = field(default_factory=lambda: defaultdict(list))
    operations: list[tuple[str, Interval]] = field(default_factory=list)  # of that thread
    gloo: list[Interval] = field(default_factory=list)
    device: list[tuple[str, str, Interval, Any]] = field(default_factory=list)  # category, name, when, launch
    launches: dict[Any, int] = field(default_factory=dict)  # start of each, by its number


def summarise(events: Iterable[Event], steps: Iterable[int]) -> dict[str, Any]:
    """The parts of each of these steps in seconds, and the operations that took the most time."""
    trace = _parse(events, set(steps))
    spans, parts = _on_device(trace) if trace.device else _on_host(trace)
    within = {part: lengths(spans, parts.get(part, [])) for part in PARTS[:-1]}
    rows = []
    for index, ((number, _), (begin, end)) in enumerate(zip(trace.steps, spans, strict=True)):
        taken = {part: within[part][index] for part in PARTS[:-1]}
        taken["idle"] = end - begin - sum(taken.values())
        rows.append({"step": number, "time_s": _s(end - begin)} | {f"{p}_s": _s(ns) for p, ns in taken.items()})
    return {
        "device": "gpu" if trace.device else "cpu",
        "steps": rows,
        "operations": _kernel_times(trace, spans) if trace.device else _operation_times(trace, spans),
    }


def _s(nanoseconds: int) -> float:
    return nanoseconds / 1e9


def _parse(events: Iterable[Event], wanted: set[int]) -> _Trace:
    trace, steps = _Trace(), dict[int, tuple[Interval, Any]]()
    operations: list[tuple[str, Interval, Any]] = []
    for event in events:
        if event.get("ph") != "X" or "dur" not in event:
            continue
        begin = round(float(event["ts"]) * 1000)
        when = begin, begin + round(float(event["dur"]) * 1000)
        kind, name, launch = event.get("cat", ""), str(event.get("name", "")), event.get("args", {}).get("correlation")
        if kind == "user_annotation" and name.startswith(STEP):
            # A step that found no batch is opened again later under the same number.
            steps[int(name.removeprefix(STEP))] = when, event.get("tid")
        elif name.startswith("gloo:"):
            trace.gloo.append(when)
        elif kind == "user_annotation":
            trace.ranges[name].append(when)
        elif kind == "cpu_op":
            operations.append((name, when, event.get("tid")))
        elif kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            trace.device.append((kind, name, when, launch))
        elif kind in ("cuda_runtime", "cuda_driver") and launch is not None:
            trace.launches[launch] = begin
    trace.steps = [(number, when) for number, (when, _) in sorted(steps.items()) if number in wanted]
    trace.thread = next((thread for _, thread in steps.values()), None)
    trace.operations = [(name, when) for name, when, thread in operations if thread == trace.thread]
    return trace


def _on_host(trace: _Trace) -> tuple[list[Interval], dict[str, Intervals]]:
    """Steps and their parts, by the training thread."""
    micro_batches = union(trace.ranges["forward+backward"])
    find = finder(micro_batches)
    # Only transfers that a micro-batch started: a vote is always in flight, and nobody waits for it.
    transfers = union(when for when in trace.gloo if find(when[0]) is not None)
    communicating = [when for name, when in trace.operations if name.startswith("c10d::")]
    working = union(when for name, when in trace.operations if not name.startswith("c10d::"))
    # A micro-batch that does nothing during a transfer waits for it.
    exposed = union(
        [*trace.ranges["exchange"], *communicating, *intersection(difference(micro_batches, working), transfers)]
    )
    waiting = difference(union(trace.ranges["input"]), exposed)
    working = difference(difference(working, exposed), waiting)
    return [when for _, when in trace.steps], {
        "compute": difference(working, transfers),
        "overlapped": intersection(working, transfers),
        "exposed": exposed,
        "input": waiting,
    }


def _on_device(trace: _Trace) -> tuple[list[Interval], dict[str, Intervals]]:
    """Steps and their parts, by the GPU."""
    communicating = union(when for kind, name, when, _ in trace.device if _is_nccl(kind, name))
    copying = union(when for _, name, when, _ in trace.device if "HtoD" in name)
    working = union(when for kind, name, when, _ in trace.device if not _is_nccl(kind, name) and "HtoD" not in name)
    spans = _device_spans(trace)
    still = difference(difference(union(spans), working), communicating)
    waiting = intersection(still, union([*trace.ranges["input"], *copying]))
    # While the host waits for sums (Gloo), the device is idle.
    standing = intersection(difference(still, waiting), union(trace.ranges["exchange"]))
    return spans, {
        "compute": difference(working, communicating),
        "overlapped": intersection(working, communicating),
        "exposed": union([*difference(communicating, working), *standing]),
        "input": waiting,
    }


def _device_spans(trace: _Trace) -> list[Interval]:
    """When the device worked on each step: from its first kernel to the first one of the next step.

    The device must be idle when the first step starts, and the host must wait for it after the last.
    """
    host = [when for _, when in trace.steps]
    find = finder(host)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for kind, name, (begin, end), launch in trace.device:
        launched = trace.launches.get(launch)
        index = None if launched is None else find(launched)
        if index is None:
            continue
        last[index] = max(last.get(index, end), end)
        if kind == "kernel" and not _is_nccl(kind, name):  # copies of later batches come early
            first[index] = min(first.get(index, begin), begin)
    between = union(when for name in _BETWEEN_STEPS for when in trace.ranges[name])
    spans: list[Interval] = []
    for index, (begin, end) in enumerate(host):
        is_cut = index == 0 or intersection([(host[index - 1][1], begin)], between) != []
        start = begin if is_cut else max(first.get(index, begin), spans[-1][0])
        if index:
            spans[-1] = spans[-1][0], min(start, spans[-1][1]) if is_cut else start
        spans.append((start, max(start, end, last.get(index, end))))
    return spans


def _is_nccl(kind: str, name: str) -> bool:
    return kind == "kernel" and "nccl" in name.lower()


def _kernel_times(trace: _Trace, spans: Sequence[Interval]) -> list[dict[str, Any]]:
    times_ns, calls, find = Counter[str](), Counter[str](), finder(spans)
    for _, name, (begin, end), _ in trace.device:
        if find(begin) is not None:
            times_ns[_short(name)] += end - begin
            calls[_short(name)] += 1
    return _most(times_ns, calls)


def _operation_times(trace: _Trace, spans: Sequence[Interval]) -> list[dict[str, Any]]:
    """The time of an operation without those that it calls."""
    times_ns, calls, find = Counter[str](), Counter[str](), finder(spans)
    callers: list[tuple[str, int]] = []  # that have not ended, with their end
    for name, (begin, end) in sorted(trace.operations, key=lambda entry: (entry[1][0], -entry[1][1])):
        if find(begin) is None:
            continue
        while callers and callers[-1][1] <= begin:
            callers.pop()
        if callers:
            times_ns[callers[-1][0]] -= end - begin
        times_ns[name] += end - begin
        calls[name] += 1
        callers.append((name, end))
    return _most(times_ns, calls)


def _most(times_ns: Counter[str], calls: Counter[str]) -> list[dict[str, Any]]:
    most = times_ns.most_common(_MOST_OPERATIONS)
    return [{"name": name, "time_s": _s(time_ns), "calls": calls[name]} for name, time_ns in most]


def _short(kernel: str) -> str:
    """A kernel's name without template arguments."""
    plain = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.sub(r"[<(].*", "", plain).strip() or kernel


_MOST_SHOWN = 10
_LABELS = {
    "compute": "computing",
    "overlapped": "computing during communication",
    "exposed": "waiting for gradients",
    "input": "waiting for input",
    "idle": "idle, or in Python",
}
# Advice for the largest part that is not computing.
_ADVICE = {
    "exposed": "Most of the rest is exposed communication: larger batches, --accumulate, a faster network, or workers "
    "of equal speed would shorten it.",
    "input": "Most of the rest is spent waiting for data: more --loader-workers, or a data set that fits on the device "
    "(--loader resident), would shorten it.",
    "idle": "Most of the rest is spent in Python, between operations: larger batches, --compile, or --graph (single, "
    "ddp, fsdp) would shorten it.",
}


def overview(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the summaries of all workers: seconds a step, as mean, least and most over the workers."""
    recorded = [rank for rank in ranks if rank["steps"]]
    figures = {
        name: _mean_min_max([_mean([step[f"{name}_s"] for step in rank["steps"]]) for rank in recorded])
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
    """The lines to print of an overview."""
    ranks, steps = found["ranks"], found["steps"]
    failures = [f"Rank {rank['rank']} has no trace: {rank['failure']}." for rank in ranks if rank.get("failure")]
    failures += [f"Rank {rank['rank']}: {rank['notice']}." for rank in ranks if rank.get("notice")]
    if not steps:
        return failures
    step_s = found["step_time_s"]["mean"]
    kind = "GPU" if any(rank["device"] == "gpu" for rank in ranks if rank["steps"]) else "CPU"
    workers = pluralize(len(ranks), "worker")
    shown = [f"Profile of steps {steps[0]} to {steps[-1]}, {workers}, by {kind} time: {format_time(step_s)} a step"]
    head = ("share", "mean", *(("least", "most") if len(ranks) > 1 else ()))
    shown.append(f"  {'':34}{''.join(f'{word:>11}' for word in head)}")
    for part in PARTS:
        figure = found["parts_s"][part]
        times = [figure["mean"], *([figure["min"], figure["max"]] if len(ranks) > 1 else [])]
        share = f"{100 * figure['mean'] / step_s:.1f} %" if step_s else "n/a"
        shown.append(f"  {_LABELS[part]:34}{share:>11}{''.join(f'{format_time(seconds):>11}' for seconds in times)}")
    shown.append("The operations that took the most time:")
    for row in found["operations"]:
        share = f"{100 * row['time_s'] / step_s:.1f} %" if step_s else "n/a"
        calls = pluralize(f"{row['calls']:.1f}".removesuffix(".0"), "call")
        shown.append(f"  {_cut(row['name']):56}{share:>8}{format_time(row['time_s']):>11}  {calls}")
    return [*shown, *_advice(found, step_s), *failures]


def _advice(found: Mapping[str, Any], step_s: float) -> list[str]:
    part = max(_ADVICE, key=lambda name: float(found["parts_s"][name]["mean"]))
    return [_ADVICE[part]] if found["parts_s"][part]["mean"] > 0.1 * step_s else []


def _operations(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The operations that took the most time, a step's mean over all workers."""
    times: dict[str, float] = defaultdict(float)
    calls: dict[str, float] = defaultdict(float)
    for rank in ranks:
        for row in rank["operations"]:
            times[row["name"]] += row["time_s"] / len(rank["steps"]) / len(ranks)
            calls[row["name"]] += row["calls"] / len(rank["steps"]) / len(ranks)
    names = sorted(times, key=lambda name: -times[name])[:_MOST_SHOWN]
    return [{"name": name, "time_s": times[name], "calls": calls[name]} for name in names]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_min_max(values: Sequence[float]) -> dict[str, float]:
    return {"mean": _mean(values), "min": min(values), "max": max(values)} if values else {}


def _cut(name: str) -> str:
    return name if len(name) <= 54 else name[:53] + "…"
