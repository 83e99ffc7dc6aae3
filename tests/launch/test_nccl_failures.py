"""A rank dies, hangs, strays or is stopped during NCCL's collectives: all end soon, and the first line says why.

Real NCCL between slices of one GPU, or between workers that share it whole. The same without NCCL is in
test_agent.py and tests/system.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.slice_devices import find_devices

pytestmark = pytest.mark.gpu

TASK = str(Path(__file__).parent.with_name("tiny_task.py"))
UNCOUNTED = str(Path(TASK).with_name("uncounted_task.py"))
TIMEOUT_S = 20
FLAGS = f"--strategy ddp --global-batch-size 64 --epochs 10000 --target-accuracy 2 --timeout {TIMEOUT_S}"
FLAGS += " --backend nccl --checkpoint-every 0 --no-graph --no-tensorboard"  # a replayed step would not call the task
TRACES = ("ProcessGroupNCCL", "Exception raised from", "frame #", "terminate called")
StartProgram = Callable[..., Any]


RAISES_BEFORE_CAPTURE = """
import torch
from tests.uncounted_task import Uncounted

class Raises(Uncounted):
    def loss(self, model, batch):
        if torch.cuda.get_sync_debug_mode() != 0 and torch.distributed.get_rank() == 1:
            raise ValueError("the task fails on purpose")  # others wait for its gradients
        return super().loss(model, batch)
"""


STALLS_ITS_DEVICE = """
import torch
from tests.uncounted_task import Uncounted

class Stalls(Uncounted):
    def on_step_end(self, context):
        if context.step == 40 and torch.distributed.get_rank() == 1:
            torch.cuda._sleep(10**13)  # more than an hour; the process itself is well
"""


def command(folder: Path, *words: str, task: str = TASK) -> list[str]:
    runs = ["--runs-folder", str(folder / "runs")]
    return [sys.executable, "-m", "stormo", "train", task, *FLAGS.split(), *runs, *words]


def lines_of(job: Any) -> list[str]:
    """What a failed job says; what is left of it fails the test: see the fixture `mark`."""
    assert job.wait(120.0) == 1, job.err
    lines: list[str] = job.err.splitlines()
    assert not [line for line in lines if any(trace in line for trace in TRACES)]
    return lines


@pytest.fixture
def failed(start_program: StartProgram, tmp_path: Path) -> Callable[..., list[str]]:
    """Trains with a fault, on four workers unless told otherwise; the lines on stderr."""

    def run(fault: str, count: int = 4) -> list[str]:
        devices = find_devices().take(0, count).of_command()
        return lines_of(start_program(command(tmp_path, "--num-gpus", str(count)), TINY_FAULT=fault, **devices))

    return run


Failed = Callable[..., list[str]]
COUNTS = [2, 4, 7]


@pytest.mark.parametrize("count", COUNTS)
def test_a_killed_rank(failed: Failed, count: int) -> None:
    first = failed("kill 1 30", count)[0]
    assert first.startswith("stormo: rank 1 on host ")
    assert first.endswith("was killed by SIGKILL (signal 9)")


@pytest.mark.parametrize("flags", ["--graph", "--strategy fsdp --graph", "--sync-batch-norm"])
def test_a_killed_rank_whose_steps_are_replayed_or_whose_statistics_are_summed_through_the_host(
    start_program: StartProgram, tmp_path: Path, flags: str
) -> None:
    program = command(tmp_path, "--num-gpus", "4", *flags.split(), task=UNCOUNTED)
    job = start_program(program, **find_devices().take(0, 4).of_command())
    job.wait_for(lambda job: "Epoch = 3:" in job.out, 120.0)
    assert not re.search("not replayed as a CUDA graph|are summed by NCCL", job.out + job.err)
    os.kill(job.worker_pid(2, "\0stormo\0"), signal.SIGKILL)
    first = lines_of(job)[0]
    assert first.startswith("stormo: rank 2 on host ")
    assert first.endswith("was killed by SIGKILL (signal 9)")


@pytest.mark.parametrize("count", COUNTS)
def test_a_stopped_rank(failed: Failed, count: int) -> None:
    lines = failed("stop 1 30", count)
    assert lines[0].startswith("stormo: rank 1 (pid ")
    assert "has sent no sign of life for 15 s" in lines[0]
    assert lines[1].startswith("stormo: rank 1 ")


@pytest.mark.parametrize("count", COUNTS)
def test_a_rank_that_raises(failed: Failed, count: int) -> None:
    lines = failed("raise 1 30", count)
    assert lines[0].startswith("stormo: rank 1 on host ")
    assert lines[0].endswith("failed: ValueError: the tiny task fails on purpose")
    assert lines[1].startswith("Traceback")


def test_a_rank_that_raises_just_before_its_step_is_captured(start_program: StartProgram, tmp_path: Path) -> None:
    task = tmp_path / "raises.py"
    task.write_text(RAISES_BEFORE_CAPTURE)
    devices = find_devices().take(0, 4).of_command()
    lines = lines_of(start_program(command(tmp_path, "--num-gpus", "4", "--graph", task=f"{task}:Raises"), **devices))
    assert lines[0].startswith("stormo: rank 1 on host ")
    assert lines[0].endswith("failed: ValueError: the task fails on purpose")


def test_a_device_that_stalls_while_steps_are_replayed(start_program: StartProgram, tmp_path: Path) -> None:
    task = tmp_path / "stalls.py"
    task.write_text(STALLS_ITS_DEVICE)
    devices = find_devices().take(0, 4).of_command()
    words = ["--num-gpus", "4", "--graph", "--no-noise-scale"]  # whose sums NCCL's watchdog would see
    lines = lines_of(start_program(command(tmp_path, *words, task=f"{task}:Stalls"), **devices))
    assert "waited 20 s" in lines[0]


def test_a_rank_that_exits(failed: Failed) -> None:
    first = failed("exit 1 30")[0]
    assert first.startswith("stormo: rank 1 on host ")
    assert "ended with exit code 3 and did not report why" in first


def test_a_rank_in_another_collective(failed: Failed) -> None:
    first = failed("collective 1 30")[0]
    is_seen_by_nccl = "mismatch in collective sizes" in first  # by any rank; it does not say which one strayed
    assert is_seen_by_nccl or ("rank 1" in first and ("waited 20 s" in first or "within 20 s" in first)), first


def test_a_killed_rank_of_another_node(start_program: StartProgram, tmp_path: Path, free_port: int) -> None:
    devices = find_devices()
    jobs = []
    for node in range(4):
        words = f"--num-nodes 4 --node-id {node} --num-gpus 1 --master-addr 127.0.0.1 --master-port {free_port}"
        program = command(tmp_path, *words.split(), "--run-name", "four-nodes")
        jobs.append(start_program(program, TINY_FAULT="kill 2 30", **devices.of_rank(node)))
    for job in jobs:
        assert lines_of(job)[0].startswith("stormo: rank 2 on host ")


def test_a_training_that_a_signal_has_stopped_is_resumed_on_fewer_workers(
    start_program: StartProgram, tmp_path: Path
) -> None:
    devices = find_devices()
    program = command(tmp_path, "--num-gpus", "4", "--preflight", "--run-name", "stopped")
    stopped = start_program(program, TINY_FAULT="term-job 0 30", **devices.take(0, 4).of_command())
    assert stopped.wait(120.0) == 75, stopped.err
    assert "preflight: 4 workers on 1 node, all-reduce " in stopped.out
    assert not [trace for trace in TRACES if trace in stopped.err]
    program = command(tmp_path, "--num-gpus", "2", "--resume", "stopped", "--epochs", "4")
    resumed = start_program(program, **devices.take(0, 2).of_command())
    assert resumed.wait(120.0) == 0, resumed.err
    summary = json.loads((tmp_path / "runs" / "stopped" / "summary.json").read_text())
    assert (summary["num_resumes"], summary["steps"]) == (1, 64)
