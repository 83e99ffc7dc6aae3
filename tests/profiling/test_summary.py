"""What a trace says of its steps, and the arithmetic of intervals under it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormo.profiling.summary import (
    PARTS,
    Interval,
    Intervals,
    difference,
    intersection,
    lengths,
    lines,
    overview,
    summarise,
    union,
)
from stormo.telemetry.text import format_time

INTERVALS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 8)).map(lambda pair: (pair[0], sum(pair))), max_size=8
)


def _numbers(intervals: list[Interval]) -> set[int]:
    return {number for begin, end in intervals for number in range(begin, end)}


def _is_tidy(moments: Intervals) -> bool:
    return all(begin < end for begin, end in moments) and all(
        end <= begin for (_, end), (begin, _) in itertools.pairwise(moments)
    )


@given(first=INTERVALS, second=INTERVALS, spans=INTERVALS)
def test_sets_of_moments_are_those_of_their_numbers(
    first: list[Interval], second: list[Interval], spans: list[Interval]
) -> None:
    a, b, steps = union(first), union(second), union(spans)
    assert _numbers(a) == _numbers(first)
    assert _numbers(intersection(a, b)) == _numbers(first) & _numbers(second)
    assert _numbers(difference(a, b)) == _numbers(first) - _numbers(second)
    assert all(map(_is_tidy, (a, intersection(a, b), difference(a, b))))
    assert lengths(steps, a) == [len(_numbers([span]) & _numbers(a)) for span in steps]


MAIN, OTHER = 1, 2


def event(kind: str, name: str, begin: float, end: float, tid: int = MAIN, launch: int | None = None) -> dict[str, Any]:
    """An event in microseconds, far from zero as in a true trace."""
    args = {} if launch is None else {"correlation": launch}
    ts = 3_890_787_073_952.125 + begin
    return {"ph": "X", "cat": kind, "name": name, "ts": ts, "dur": end - begin, "tid": tid, "args": args}


def span(name: str, begin: float, end: float) -> dict[str, Any]:
    return event("user_annotation", name, begin, end)


def kernel(name: str, begin: float, end: float, launched: float, launch: int, kind: str = "kernel") -> list[Any]:
    runtime = event("cuda_runtime", "cudaLaunchKernel", launched, launched + 1, launch=launch)
    return [runtime, event(kind, name, begin, end, 7, launch)]


def parts(step: dict[str, Any]) -> dict[str, float]:
    """In microseconds."""
    assert sum(step[f"{part}_s"] for part in PARTS) == pytest.approx(step["time_s"], rel=1e-12)
    return {part: round(1e6 * step[f"{part}_s"], 3) for part in PARTS}


def test_the_parts_of_a_step_on_a_cpu() -> None:
    events = [
        {"ph": "M", "name": "process_name"},
        span("ProfilerStep#4", 0, 2),  # begun at the end of an epoch, where no batch was left
        span("ProfilerStep#4", 100, 200),
        span("ProfilerStep#5", 200, 250),  # never done
        span("input", 100, 110),
        event("cpu_op", "aten::index_select", 101, 109),  # is input
        event("user_annotation", "gloo:all_reduce", 110, 190, OTHER),  # a vote, which nobody waits for
        span("forward+backward", 112, 182),
        event("cpu_op", "aten::addmm", 115, 135),
        event("cpu_op", "AddmmBackward0", 135, 155),
        event("cpu_op", "aten::mm", 140, 150),
        event("cpu_op", "c10d::allreduce_", 155, 157),
        event("user_annotation", "gloo:all_reduce", 150, 175, OTHER),
        event("cpu_op", "aten::sum", 157, 165),
        span("exchange", 168, 180),
        event("cpu_op", "aten::add_", 185, 195),
        event("cpu_op", "aten::far", 0, 500, OTHER),  # another thread's
    ]
    found = summarise(events, [4])
    (step,) = found["steps"]
    assert step["step"] == 4
    assert found["device"] == "cpu"
    # 165 to 168: nothing is done while gradients travel.
    assert parts(step) == {"compute": 45.0, "overlapped": 13.0, "exposed": 17.0, "input": 10.0, "idle": 15.0}
    times = {row["name"]: (round(1e6 * row["time_s"], 3), row["calls"]) for row in found["operations"]}
    assert times["AddmmBackward0"] == (10.0, 1)  # without what it calls
    assert times["aten::mm"] == (10.0, 1)
    assert next(iter(times)) == "aten::addmm"
    assert "aten::far" not in times


def gpu_trace() -> list[Any]:
    """Two steps; the host is ahead of the device in the second."""
    return [
        span("ProfilerStep#1", 0, 50),
        span("ProfilerStep#2", 50, 80),
        span("input", 0, 12),
        span("input", 50, 52),
        *kernel("Memcpy HtoD (Pinned -> Device)", 12, 15, 5, 1, "gpu_memcpy"),
        *kernel("void at::native::gemm<float, 4>(int)", 20, 60, 18, 2),
        *kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 50, 75, 30, 3),
        *kernel("void (anonymous namespace)::adam<float>(int)", 75, 80, 40, 4),
        *kernel("Memcpy HtoD (Pinned -> Device)", 70, 78, 51, 5, "gpu_memcpy"),  # of a later batch
        *kernel("void at::native::gemm<float, 4>(int)", 82, 100, 53, 6),
        *kernel("Memcpy DtoD (Device -> Device)", 100, 104, 54, 7, "gpu_memcpy"),
        *kernel("not of these steps", 200, 300, 190, 8),
    ]


def test_the_parts_of_a_step_on_a_gpu() -> None:
    found = summarise(gpu_trace(), [1, 2])
    first, second = found["steps"]
    assert found["device"] == "gpu"
    # The first from the host's begin to the first kernel of the second, at 82; that one to the end of its last work.
    assert parts(first) == {"compute": 35.0, "overlapped": 10.0, "exposed": 15.0, "input": 15.0, "idle": 7.0}
    assert parts(second) == {"compute": 22.0, "overlapped": 0.0, "exposed": 0.0, "input": 0.0, "idle": 0.0}
    times = {row["name"]: (round(1e6 * row["time_s"], 3), row["calls"]) for row in found["operations"]}
    assert times == {
        "at::native::gemm": (58.0, 2),
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL": (25.0, 1),
        "Memcpy HtoD": (11.0, 2),
        "adam": (5.0, 1),
        "Memcpy DtoD": (4.0, 1),
    }


def test_validation_between_two_steps_belongs_to_neither() -> None:
    events = [
        span("ProfilerStep#1", 0, 50),
        *kernel("gemm", 10, 60, 5, 1),
        span("validation", 65, 900),
        *kernel("evaluate", 70, 890, 66, 2),
        span("ProfilerStep#2", 1000, 1050),
        *kernel("gemm", 1010, 1040, 1005, 3),
    ]
    first, second = summarise(events, [1, 2])["steps"]
    assert parts(first) == {"compute": 50.0, "overlapped": 0.0, "exposed": 0.0, "input": 0.0, "idle": 10.0}
    assert parts(second) == {"compute": 30.0, "overlapped": 0.0, "exposed": 0.0, "input": 0.0, "idle": 20.0}


def test_a_device_that_idles_while_the_host_waits_for_sums_stands_still_for_them() -> None:
    events = [span("ProfilerStep#1", 0, 50), *kernel("gemm", 5, 20, 2, 1), span("exchange", 15, 45)]
    (step,) = summarise(events, [1])["steps"]
    assert parts(step) == {"compute": 15.0, "overlapped": 0.0, "exposed": 25.0, "input": 0.0, "idle": 10.0}


def _rank(rank: int, exposed_s: float, **more: Any) -> dict[str, Any]:
    taken = {"compute_s": 0.006, "overlapped_s": 0.001, "exposed_s": exposed_s, "input_s": 0.0, "idle_s": 0.0}
    row = {"step": 10, "time_s": sum(taken.values())} | taken
    operation = {"name": "aten::mm", "time_s": 0.008, "calls": 6}
    return {"rank": rank, "device": "cpu", "steps": [row, row | {"step": 11}], "operations": [operation]} | more


def test_workers_are_joined_by_mean_least_and_most() -> None:
    found = overview([_rank(0, 0.001), _rank(1, 0.005)])
    assert found["steps"] == [10, 11]
    assert found["parts_s"]["exposed"] == pytest.approx({"mean": 0.003, "min": 0.001, "max": 0.005})
    assert found["step_time_s"]["mean"] == pytest.approx(0.010)
    assert found["operations"] == [{"name": "aten::mm", "time_s": pytest.approx(0.004), "calls": 3.0}]
    said = lines(found)
    assert said[0] == "Profile of steps 10 to 11, 2 workers, by CPU time: 10 ms a step"
    assert said[4].split() == ["waiting", "for", "gradients", "30.0", "%", "3", "ms", "1", "ms", "5", "ms"]
    assert said[8].endswith("  3 calls")
    found["operations"][0]["calls"] = 18.3113
    assert lines(found)[8].endswith("  18.3 calls")
    assert "--accumulate" in said[-1]


def test_times_are_said_in_their_own_unit() -> None:
    seconds = (0.0, 4e-7, 9.996e-7, 5.04e-5, 9.996e-4, 0.9994, 0.9996, 61.24, 1234.4)
    said = ["0", "0", "1 µs", "50.4 µs", "1 ms", "999 ms", "1 s", "61.2 s", "1234 s"]
    assert [format_time(value) for value in seconds] == said


def test_a_worker_without_a_trace_is_named() -> None:
    lost = {"rank": 1, "steps": [], "operations": [], "failure": "No space left on device (/x)"}
    assert lines(overview([lost])) == ["Rank 1 has no trace: No space left on device (/x)."]
    assert lines(overview([_rank(0, 0.0, notice="no kernels")]))[-1] == "Rank 0: no kernels."
    assert lines(overview([_rank(0, 0.0), lost]))[-1] == "Rank 1 has no trace: No space left on device (/x)."
