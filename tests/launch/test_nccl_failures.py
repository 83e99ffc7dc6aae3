"""A rank dies, hangs or strays during NCCL's collectives: all end soon, and the first line says which rank and why.

Real NCCL between slices of one GPU. The same without NCCL is in test_agent.py and tests/system.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.slice_devices import find_slices

pytestmark = [pytest.mark.gpu, pytest.mark.slices(4)]

TASK = str(Path(__file__).parent.with_name("tiny_task.py"))
FLAGS = "--num-gpus 4 --strategy ddp --global-batch-size 64 --epochs 10000 --target-accuracy 2"
FLAGS += " --checkpoint-every 0 --no-graph --no-tensorboard"  # a replayed step would not call the task
TIMEOUT_S = 20
TRACES = ("ProcessGroupNCCL", "Exception raised from", "frame #", "terminate called")


@pytest.fixture
def failed(start_program: Callable[..., Any], tmp_path: Path) -> Callable[[str], list[str]]:
    """Trains on four slices with a fault; the lines on stderr. What is left of it fails the test: see `mark`."""

    def run(fault: str) -> list[str]:
        words = ["-m", "stormo", "train", TASK, *FLAGS.split(), "--timeout", str(TIMEOUT_S)]
        command = [sys.executable, *words, "--runs-folder", str(tmp_path / "runs")]
        slices = ",".join(find_slices().uuids[:4])
        job = start_program(command, TINY_FAULT=fault, CUDA_VISIBLE_DEVICES=slices)
        assert job.wait(120.0) == 1, job.err
        lines: list[str] = job.err.splitlines()
        assert not [line for line in lines if any(trace in line for trace in TRACES)]
        return lines

    return run


Failed = Callable[[str], list[str]]


def test_a_killed_rank(failed: Failed) -> None:
    first = failed("kill 2 30")[0]
    assert first.startswith("stormo: rank 2 on host ")
    assert first.endswith("was killed by SIGKILL (signal 9)")


def test_a_stopped_rank(failed: Failed) -> None:
    lines = failed("stop 2 30")
    assert lines[0].startswith("stormo: rank 2 (pid ")
    assert "has sent no sign of life for 15 s" in lines[0]
    assert lines[1].startswith("stormo: rank 2 ")


def test_a_rank_that_raises(failed: Failed) -> None:
    lines = failed("raise 1 30")
    assert lines[0].startswith("stormo: rank 1 on host ")
    assert lines[0].endswith("failed: ValueError: the tiny task fails on purpose")
    assert lines[1].startswith("Traceback")


def test_a_rank_that_exits(failed: Failed) -> None:
    first = failed("exit 1 30")[0]
    assert first.startswith("stormo: rank 1 on host ")
    assert "ended with exit code 3 and did not report why" in first


def test_a_rank_in_another_collective(failed: Failed) -> None:
    first = failed("collective 1 30")[0]
    assert "rank 1" in first
    assert "waited 20 s" in first or "within 20 s" in first
