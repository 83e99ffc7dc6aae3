"""On a GPU: the time that its stream stands still, and a window of steps by its kernels."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stormo.config.plan.steps import ProfileSpec
from stormo.data.loaders import Batch
from stormo.data.order import MicroBatch
from stormo.distributed.world import World
from stormo.launch import alone
from stormo.parallel.exposed import ExposedWait
from stormo.profiling.ranges import range_of
from stormo.profiling.window import ProfileWindow

pytestmark = pytest.mark.gpu
CYCLES, FASTEST_HZ = 1_000_000_000, 4e9  # no GPU runs faster, and no busy host is stopped for so long


def test_the_wait_of_a_stream_is_read_without_waiting_for_it() -> None:
    device = torch.device("cuda", 0)
    wait, weight = ExposedWait(device), torch.ones(8, device=device, requires_grad=True)

    def exchange(gradient: Tensor) -> None:
        # As DDP does it: once the gradients are there, the stream, not the host, waits for others.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: torch.cuda._sleep(CYCLES))

    weight.register_hook(exchange)
    for _ in range(3):
        loss = weight.square().sum()
        wait.watch_backward(loss)
        loss.backward()
    before_s = wait.total_s
    total_s = _settled_s(wait)
    assert total_s > 3 * CYCLES / FASTEST_HZ
    assert before_s < total_s
    quiet = torch.ones(8, device=device, requires_grad=True)
    loss = quiet.square().sum()
    wait.watch_backward(loss)
    loss.backward()
    assert _settled_s(wait) - total_s < CYCLES / FASTEST_HZ  # nobody was waited for
    wait.reset()
    assert _settled_s(wait) == 0.0


def _settled_s(wait: ExposedWait) -> float:
    """The total once the device has done all; a read shows the one that was asked for before."""
    for _ in range(2):
        torch.cuda.synchronize()
        found_s = wait.total_s
    torch.cuda.synchronize()
    return max(found_s, wait.total_s)


def test_a_replayed_graph_counts_its_waits() -> None:
    device = torch.device("cuda", 0)
    wait, graph = ExposedWait(device), torch.cuda.CUDAGraph()
    with wait.waiting():  # compiles the kernels
        pass
    wait.reset()
    with torch.cuda.graph(graph), wait.waiting():
        torch.cuda._sleep(CYCLES)
    assert _settled_s(wait) == 0.0
    for _ in range(2):
        graph.replay()
    assert _settled_s(wait) > 2 * CYCLES / FASTEST_HZ


class _Clock:
    step = 0


def test_a_window_by_kernels(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    world, clock = World(alone(), device), _Clock()
    window = ProfileWindow(ProfileSpec(first=3, num_steps=3), world, tmp_path)
    weight = torch.randn(2048, 2048, device=device, requires_grad=True)

    def batches() -> Any:
        for step in range(6):
            time.sleep(0.02)  # the device has nothing to do meanwhile
            span = MicroBatch(
                step_start=step, step_stop=step + 1, start=step, stop=step + 1, is_first=True, is_last=True
            )
            yield Batch(torch.randn(512, 2048).pin_memory().to(device, non_blocking=True), span, is_padding=False)

    said = window.before_step(1)
    for batch in window.batches(batches(), clock):
        with range_of("forward+backward"):
            (batch.data @ weight).square().mean().backward()
        with range_of("optimizer"), torch.no_grad():
            weight -= 0.01 * weight.grad
            weight.grad = None
        clock.step += 1
        if window.step_done(clock.step):
            said += window.before_step(clock.step + 1)
    assert window.close() == []
    assert said[0].startswith("Profile of steps 3 to 5, 1 worker, by GPU time: ")
    summary = json.loads((tmp_path / "profile" / "summary.json").read_text())
    (rank,) = summary["ranks"]
    for step in rank["steps"]:
        parts = [step[f"{part}_s"] for part in ("compute", "overlapped", "exposed", "input", "idle")]
        assert sum(parts) == pytest.approx(step["time_s"], rel=1e-12)
        assert min(parts) >= 0
        assert step["compute_s"] > 0
        assert step["overlapped_s"] == step["exposed_s"] == 0
    assert sum(step["input_s"] for step in rank["steps"]) > 0.05
    names = " ".join(row["name"].lower() for row in rank["operations"])
    assert any(word in names for word in ("gemm", "nvjet", "cutlass")), names
