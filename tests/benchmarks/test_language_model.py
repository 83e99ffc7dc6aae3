"""The benchmark of the language model, in the small form that a machine without a GPU runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from stormo.hardware import visible_gpus


@pytest.mark.skipif(bool(visible_gpus()), reason="the form without a GPU is looked at and there is one")
def test_it_prints_both_speeds_and_no_mfu_without_a_gpu() -> None:
    command = [sys.executable, "-m", "benchmarks.language_model", "--batch-size", "1", "--steps", "30"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"RESULT tokens_per_s=\S+ plain_tokens_per_s=\S+ peak_memory_bytes=\d+ loss=\S+", last), last


def test_too_few_steps_are_refused() -> None:
    command = [sys.executable, "-m", "benchmarks.language_model", "--steps", "5"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--steps 5 is too few for a median" in done.stderr
