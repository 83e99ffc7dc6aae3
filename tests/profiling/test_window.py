"""A window of steps as two workers record it: the files, the parts of a step, and no trace in the training."""

from __future__ import annotations

import gzip
import json
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.profiler import profile

from stormo.config.plan.steps import ProfileSpec, parse_profile
from stormo.distributed.world import World
from stormo.energy import read_bill
from stormo.launch import alone
from stormo.profiling import ranges
from stormo.profiling.ranges import range_of
from stormo.profiling.window import ProfileWindow
from stormo.telemetry.record import Notice
from stormo.training.loop import train
from tests.energy.test_node_recorder import Desk
from tests.tiny_run import Parts, assert_same_bits, build, whole_state
from tests.training.test_loop import Run, prepare

Ranks = Callable[..., list[Any]]


def _train(parts: Parts, window: ProfileWindow, num_steps: int) -> list[str]:
    """Steps as the loop does them, over the ends of epochs; what is to be printed."""
    progress, said = parts.state.progress, window.before_step(parts.state.progress.step + 1)
    while True:
        for batch in window.batches(parts.loader.epoch(progress.epoch, progress.position), progress):
            with range_of("forward+backward"):
                parts.strategy.micro_step(batch)
            if not batch.span.is_last:
                continue
            with range_of("optimizer"):
                parts.strategy.step(0.1)
            progress.advance(parts.loader.samples(batch.span))
            if window.step_done(progress.step):
                said += window.before_step(progress.step + 1)
            if progress.step == num_steps:
                return said
        progress.epoch, progress.position = progress.epoch + 1, 0


def _profiled(world: World, text: str, folder: str, num_steps: int = 8) -> dict[str, Any]:
    parts = build(world, {"num_train": 64, "width": 256}, global_batch_size=16, accumulate=2)
    parts.strategy.warm_up(parts.loader)
    window = ProfileWindow(parse_profile(text) if text else None, world, Path(folder))
    said = _train(parts, window, num_steps)
    left = window.close()
    assert range_of("input") is ranges._OFF
    return {"state": whole_state(parts), "said": said, "left": left}


def test_two_workers_record_the_steps_that_were_named(run_ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "rank-5.pt.trace.json.gz").touch()  # of an earlier start
    main, other = run_ranks(_profiled, 2, "3:7", str(tmp_path))  # the epoch's end is between the steps 4 and 5
    for plain, seen in zip(run_ranks(_profiled, 2, "", str(tmp_path)), (main, other), strict=True):
        assert_same_bits(plain["state"], seen["state"])
    assert other["said"] == main["left"] == other["left"] == []
    assert main["said"][0].startswith("Profile of steps 3 to 6, 2 workers, by CPU time: ")
    files = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert files == ["rank-0.pt.trace.json.gz", "rank-1.pt.trace.json.gz", "summary.json"]
    summary = json.loads((tmp_path / "profile" / "summary.json").read_text())
    assert summary["steps"] == [3, 4, 5, 6]
    for rank in summary["ranks"]:
        assert [step["step"] for step in rank["steps"]] == [3, 4, 5, 6]
        for step in rank["steps"]:
            parts = [step[f"{part}_s"] for part in ("compute", "overlapped", "exposed", "input", "idle")]
            assert sum(parts) == pytest.approx(step["time_s"], rel=1e-12)
            assert step["compute_s"] + step["overlapped_s"] > 0
            assert step["exposed_s"] > 0
            assert step["input_s"] > 0
            assert min(parts) >= 0
        # Which of its operations took most depends on what else the machine does; how often each was called does not.
        events = _events(tmp_path, rank["rank"])
        names = {event.get("name") for event in events}
        assert {"ProfilerStep#3", "ProfilerStep#6", "input", "forward+backward", "exchange", "optimizer"} <= names
        assert not {"ProfilerStep#2", "ProfilerStep#7"} & names
        calls = _calls(events)
        assert calls["aten::addmm"] == 4 * 2 * 2  # steps, passes, layers
        counted = {row["name"]: row["calls"] for row in rank["operations"]}
        assert counted == {name: calls[name] for name in counted}
        assert len(counted) == min(40, len(calls))
    times_s = [row["time_s"] for row in summary["operations"]]
    assert len(times_s) == 10
    assert times_s == sorted(times_s, reverse=True)


def _events(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Those of a worker's trace."""
    with gzip.open(folder / "profile" / f"rank-{rank}.pt.trace.json.gz", "rt", encoding="utf-8") as file:
        trace = json.load(file)
    assert trace["distributedInfo"]["rank"] == rank
    return cast(list[dict[str, Any]], trace["traceEvents"])


def _calls(events: list[dict[str, Any]]) -> Counter[str]:
    """How often each operation was called within the steps, by their thread."""
    steps = {event["name"]: event for event in events if str(event.get("name")).startswith("ProfilerStep#")}
    return Counter(
        event["name"]
        for event in events
        if event.get("cat") == "cpu_op"
        and any(
            event["tid"] == step["tid"] and step["ts"] <= event["ts"] < step["ts"] + step["dur"]
            for step in steps.values()
        )
    )


@pytest.mark.parametrize(
    ("text", "starting_j", "idle_j"),
    [
        ("5:6", 0.0, 3000.0),  # made ready after step 2, begun after step 4, written after step 5
        ("1:3", 2000.0, 1000.0),  # made ready and begun before the first step
    ],
)
def test_what_the_profiler_takes_for_itself_is_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, starting_j: float, idle_j: float
) -> None:
    desk = Desk()
    for name in ("prepare_trace", "start_trace", "stop_trace"):
        real = getattr(profile, name)

        def slow(profiler: profile, real: Callable[[profile], None] = real) -> None:
            desk.after(100.0, 1000.0)
            real(profiler)

        monkeypatch.setattr(profile, name, slow)
    monkeypatch.setattr("stormo.training.clock.time.perf_counter", desk.clock)

    def take_time(run: Run, step: int) -> None:  # six steps, and four rounds of validation
        desk.after(1.0, 300.0)

    run = prepare(on_step=take_time)
    desk.recorder.attach(tmp_path / "nodes" / "3.jsonl", None, 0)
    run.training.node_recorder = desk.recorder
    run.training.profile = ProfileWindow(parse_profile(text), run.training.world, tmp_path)
    assert train(run.training).stopped_by == "epochs"
    desk.recorder.close()
    assert run.training.profile.close() == []
    assert run.parts.state.progress.train_time_s == 6.0
    parts_j = read_bill(tmp_path).parts_j
    assert parts_j["training"] + parts_j["waiting"] == 6 * 300.0
    assert (parts_j["starting"], parts_j["validation"], parts_j["idle"]) == (starting_j, 4 * 300.0, idle_j)
    last = parse_profile(text).window(1)[-1]
    assert {notice.after_step for notice in run.of(Notice)} == {last}


def test_a_word_about_cycles_is_kept_from_the_user_and_no_other_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = profile.prepare_trace

    def warn(profiler: profile) -> None:
        warnings.warn("Warning: Profiler clears events at the end of each cycle.Only events from", stacklevel=2)
        warnings.warn("CUDA is not available, disabling CUDA profiling", stacklevel=2)
        real(profiler)

    monkeypatch.setattr(profile, "prepare_trace", warn)
    window = ProfileWindow(parse_profile("1:3"), World(alone(), torch.device("cpu")), tmp_path)
    with pytest.warns(UserWarning, match="CUDA") as caught:
        window.before_step(1)
    window.close()
    assert [str(warning.message) for warning in caught] == ["CUDA is not available, disabling CUDA profiling"]


@pytest.mark.parametrize(
    ("text", "num_steps", "said", "left"),
    [
        ("1:3", 4, "Profile of steps 1 to 2, 1 worker, ", ""),  # without a step for the profiler's own warm-up
        ("2", 9, "Profile of steps 7 to 8, ", ""),
        ("3:9", 4, "", "Profile of steps 3 to 4, "),  # the run ends within the window
        ("5:9", 3, "", "--profile recorded nothing: no step from 5 to 8 was done"),
        ("5:9", 4, "", "--profile recorded nothing: no step from 5 to 8 was done"),  # made ready
    ],
)
def test_windows_at_the_ends_of_a_run(
    run_ranks: Ranks, tmp_path: Path, text: str, num_steps: int, said: str, left: str
) -> None:
    (found,) = run_ranks(_profiled, 1, text, str(tmp_path), num_steps)
    for lines, expected in ((found["said"], said), (found["left"], left)):
        assert lines[0].startswith(expected) if expected else not lines
    assert (tmp_path / "profile" / "rank-0.pt.trace.json.gz").exists() is (not left.startswith("--profile"))


def _resumed(world: World, folder: str) -> list[str]:
    parts = build(world, {"num_train": 64}, global_batch_size=16)
    parts.state.progress.step = 20
    window = ProfileWindow(ProfileSpec(first=3, num_steps=4), world, Path(folder))
    assert _train(parts, window, 22) == []
    return window.close()


def test_steps_that_were_done_before_a_resume_are_not_waited_for(run_ranks: Ranks, tmp_path: Path) -> None:
    (left,) = run_ranks(_resumed, 1, str(tmp_path))
    assert left == ["--profile recorded nothing: no step from 3 to 6 was done since this start."]
    assert list(tmp_path.iterdir()) == []


class _HalfWritten:
    """A profiler whose disk is full, of which it says nothing."""

    def __init__(self, ending: str) -> None:
        self._ending = ending

    def export_chrome_trace(self, path: str) -> None:
        Path(path + self._ending).write_text('{"traceEvents": [', encoding="utf-8")


@pytest.mark.parametrize("ending", ["", ".tmp"])
def test_half_a_trace_is_not_left_behind(tmp_path: Path, ending: str) -> None:
    window = ProfileWindow(ProfileSpec(first=3, num_steps=4), cast(World, SimpleNamespace(rank=0)), tmp_path)
    window._profiler = cast(Any, _HalfWritten(ending))
    with pytest.raises(OSError, match="the disk may be full"):
        window._write_trace()
    assert list((tmp_path / "profile").iterdir()) == []


def _in_the_way(world: World, folder: str) -> dict[str, Any]:
    return _profiled(world, "2:4", f"{folder}/{world.rank}", 4)


def test_a_trace_that_cannot_be_written_does_not_end_the_training(run_ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "1").touch()  # where the folder of rank 1 should be
    main, _ = run_ranks(_in_the_way, 2, str(tmp_path))
    assert main["said"][0].startswith("Profile of steps 2 to 3, ")
    assert any(line.startswith("Rank 1 has no trace: Not a directory (") for line in main["said"])
