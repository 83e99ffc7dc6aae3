"""What a worker's trace says of its steps: every nanosecond of a step is in exactly one part.

A pure function over the events of a Chrome trace as torch's profiler writes them. On a GPU the parts are those of the
device, by the intervals of its kernels; on a CPU those of the thread that trains, by its operations.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stormo.profiling.intervals import Interval, Moments, both, lengths, union, without

STEP = "ProfilerStep#"  # as torch's own tools call a step
PARTS = ("compute", "overlapped", "exposed", "input", "idle")
_MOST_OPERATIONS = 40
_APART = ("validation", "checkpoint")  # what may lie between two steps and belongs to none

Event = Mapping[str, Any]


@dataclass
class _Trace:
    """The events of a trace by what they are."""

    steps: list[tuple[int, Interval]] = field(default_factory=list)  # by number, on the host
    thread: Any = None  # the one that trains
    ranges: dict[str, list[Interval]] = field(default_factory=lambda: defaultdict(list))
    operations: list[tuple[str, Interval]] = field(default_factory=list)  # of that thread
    gloo: list[Interval] = field(default_factory=list)
    device: list[tuple[str, str, Interval, Any]] = field(default_factory=list)  # category, name, when, launch
    launches: dict[Any, int] = field(default_factory=dict)  # when each was, by its number


def summarise(events: Iterable[Event], steps: Iterable[int]) -> dict[str, Any]:
    """The parts of each of these steps in seconds, and the operations that took most."""
    trace = _sorted_out(events, set(steps))
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


def _sorted_out(events: Iterable[Event], wanted: set[int]) -> _Trace:
    trace, steps = _Trace(), dict[int, tuple[Interval, Any]]()
    operations: list[tuple[str, Interval, Any]] = []
    for event in events:
        if event.get("ph") != "X" or "dur" not in event:
            continue
        begin = round(float(event["ts"]) * 1000)
        when = begin, begin + round(float(event["dur"]) * 1000)
        kind, name, launch = event.get("cat", ""), str(event.get("name", "")), event.get("args", {}).get("correlation")
        if kind == "user_annotation" and name.startswith(STEP):
            # A step that was begun and found no batch is begun again later, under the same number.
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


def _on_host(trace: _Trace) -> tuple[list[Interval], dict[str, Moments]]:
    """Steps and their parts by what the training thread does."""
    passes = union(trace.ranges["forward+backward"])
    begins = [begin for begin, _ in passes]
    # Of what travels, only what a pass has sent: a vote is under way all the time, and nobody waits for it.
    travelling = union(
        when for when in trace.gloo if (index := bisect_right(begins, when[0]) - 1) >= 0 and when[0] < passes[index][1]
    )
    talking = [when for name, when in trace.operations if name.startswith("c10d::")]
    working = union(when for name, when in trace.operations if not name.startswith("c10d::"))
    # In a pass that does nothing while something travels, the thread waits for it.
    exposed = union([*trace.ranges["exchange"], *talking, *both(without(passes, working), travelling)])
    waiting = without(union(trace.ranges["input"]), exposed)
    working = without(without(working, exposed), waiting)
    return [when for _, when in trace.steps], {
        "compute": without(working, travelling),
        "overlapped": both(working, travelling),
        "exposed": exposed,
        "input": waiting,
    }


def _on_device(trace: _Trace) -> tuple[list[Interval], dict[str, Moments]]:
    """Steps and their parts by what runs on the GPU."""
    talking = union(when for kind, name, when, _ in trace.device if _is_nccl(kind, name))
    copying = union(when for _, name, when, _ in trace.device if "HtoD" in name)
    working = union(when for kind, name, when, _ in trace.device if not _is_nccl(kind, name) and "HtoD" not in name)
    spans = _device_spans(trace)
    still = without(without(union(spans), working), talking)
    waiting = both(still, union([*trace.ranges["input"], *copying]))
    # Where the host itself waits for sums (Gloo), the device has nothing to do.
    standing = both(without(still, waiting), union(trace.ranges["exchange"]))
    return spans, {
        "compute": without(working, talking),
        "overlapped": both(working, talking),
        "exposed": union([*without(talking, working), *standing]),
        "input": waiting,
    }


def _device_spans(trace: _Trace) -> list[Interval]:
    """When the device worked on each step: from the first kernel that the host launched in it to that of the next.

    The device must have been idle when the host began the first one, and the host must have waited for it after the
    last.
    """
    host = [when for _, when in trace.steps]
    begins = [begin for begin, _ in host]
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for kind, name, (begin, end), launch in trace.device:
        launched = trace.launches.get(launch)
        index = -1 if launched is None else bisect_right(begins, launched) - 1
        if index < 0 or launched is None or launched >= host[index][1]:
            continue
        last[index] = max(last.get(index, end), end)
        if kind == "kernel" and not _is_nccl(kind, name):  # copies of later batches run ahead
            first[index] = min(first.get(index, begin), begin)
    apart = union(when for name in _APART for when in trace.ranges[name])
    spans: list[Interval] = []
    for index, (begin, end) in enumerate(host):
        is_cut = index == 0 or both([(host[index - 1][1], begin)], apart) != []
        start = begin if is_cut else max(first.get(index, begin), spans[-1][0])
        if index:
            spans[-1] = spans[-1][0], min(start, spans[-1][1]) if is_cut else start
        spans.append((start, max(start, end, last.get(index, end))))
    return spans


def _is_nccl(kind: str, name: str) -> bool:
    return kind == "kernel" and "nccl" in name.lower()


def _kernel_times(trace: _Trace, spans: Sequence[Interval]) -> list[dict[str, Any]]:
    times_ns: dict[str, int] = defaultdict(int)
    calls: dict[str, int] = defaultdict(int)
    begins = [begin for begin, _ in spans]
    for _, name, (begin, end), _ in trace.device:
        index = bisect_right(begins, begin) - 1
        if index >= 0 and begin < spans[index][1]:
            times_ns[_short(name)] += end - begin
            calls[_short(name)] += 1
    return _most(times_ns, calls)


def _operation_times(trace: _Trace, spans: Sequence[Interval]) -> list[dict[str, Any]]:
    """By the time of an operation without those that it calls."""
    times_ns: dict[str, int] = defaultdict(int)
    calls: dict[str, int] = defaultdict(int)
    begins = [begin for begin, _ in spans]
    callers: list[tuple[str, int]] = []  # those that have not ended, with their end
    for name, (begin, end) in sorted(trace.operations, key=lambda entry: (entry[1][0], -entry[1][1])):
        index = bisect_right(begins, begin) - 1
        if index < 0 or begin >= spans[index][1]:
            continue
        while callers and callers[-1][1] <= begin:
            callers.pop()
        if callers:
            times_ns[callers[-1][0]] -= end - begin
        times_ns[name] += end - begin
        calls[name] += 1
        callers.append((name, end))
    return _most(times_ns, calls)


def _most(times_ns: Mapping[str, int], calls: Mapping[str, int]) -> list[dict[str, Any]]:
    names = sorted(times_ns, key=lambda name: -times_ns[name])[:_MOST_OPERATIONS]
    return [{"name": name, "time_s": _s(times_ns[name]), "calls": calls[name]} for name in names]


def _short(kernel: str) -> str:
    """A kernel's name without the types that it was made for."""
    plain = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.sub(r"[<(].*", "", plain).strip() or kernel
