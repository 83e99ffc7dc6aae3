"""The comparison with a hand-written loop, in a tiny setting; how fast it is here is not what is tested."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.overhead import PROMISED
from benchmarks.turns import ratios

ROOT = Path(__file__).parents[2]


def test_ratio_is_above_one_when_stormo_takes_less_time() -> None:
    median, lower, upper = ratios([[1.0, 2.0], [1.0, 3.0], [1.0, 4.0]], 1)
    assert (median, lower, upper) == (3.0, 2.5, 3.5)


def test_both_sides_run_and_the_exit_code_tells_whether_the_promise_was_kept() -> None:
    command = [sys.executable, "-m", "benchmarks.overhead", "--pairs", "2", "--steps", "2", "--batch-size", "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    last = done.stdout.splitlines()[-1]
    assert last.startswith("RESULT "), done.stderr
    figures = {name: float(value) for name, value in (word.split("=") for word in last.split()[1:])}
    assert figures["pairs"] == 2
    assert figures["q25"] <= figures["median_ratio"] <= figures["q75"]
    assert done.returncode == (0 if figures["median_ratio"] >= PROMISED else 1)
