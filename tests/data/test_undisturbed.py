"""A signal that goes to every process of a job leaves the processes that load data at work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from stormo.data.streaming import shut_down, stream

NUM_BATCHES = 40  # far more than are read ahead


def read_all_although_the_whole_group_is_signalled() -> None:
    import os
    import signal

    signal.signal(signal.SIGTERM, lambda number, frame: None)
    batches = [[(index, 0)] for index in range(NUM_BATCHES)]
    loader = stream(TensorDataset(torch.arange(NUM_BATCHES)), batches, torch.device("cpu"), 1)
    read: list[int] = []
    for batch in loader:
        if not read:
            os.killpg(0, signal.SIGTERM)
        read.append(int(batch[0]))
    assert read == list(range(NUM_BATCHES))
    shut_down(loader)


def test_data_is_loaded_to_the_end_although_the_whole_group_is_told_to_stop() -> None:
    done = _run(read_all_although_the_whole_group_is_signalled)
    assert (done.returncode, done.stderr) == (0, "")


def fail_in_the_middle() -> None:
    batches = [[(index, 0)] for index in range(NUM_BATCHES)]
    loader = stream(TensorDataset(torch.arange(NUM_BATCHES)), batches, torch.device("cpu"), 1)
    for _ in loader:
        raise ValueError("of the user")


def test_an_error_ends_the_process_although_its_loading_processes_ignore_what_python_sends_them() -> None:
    done = _run(fail_in_the_middle)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "ValueError: of the user")


def _run(function: Callable[[], None]) -> subprocess.CompletedProcess[str]:
    """In a process, and a group of processes, of its own."""
    return subprocess.run(
        [sys.executable, "-c", f"import {__name__} as test; test.{function.__name__}()"],
        cwd=Path(__file__).parents[2],
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
