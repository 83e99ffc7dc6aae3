"""The comparison with DDP, in a tiny setting; how fast it is here is not what is tested."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_both_sides_train_the_same_network_and_are_compared() -> None:
    command = [sys.executable, "-m", "benchmarks.exchange", "--pairs", "2", "--steps", "2", "--layers", "3"]
    done = subprocess.run(
        [*command, "--width", "8"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("RESULT ")
    figures = {name: float(value) for name, value in (word.split("=") for word in last.split()[1:])}
    assert figures["pairs"] == 2
    assert 0 < figures["q25"] <= figures["median_ratio"] <= figures["q75"]
