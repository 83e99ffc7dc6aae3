"""The cost of measuring the noise scale, in a tiny setting; how large it is here is not what is tested."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_all_sides_train_the_same_network_and_are_compared() -> None:
    command = [sys.executable, "-m", "benchmarks.noise_scale", "--pairs", "2", "--steps", "4", "--layers", "2"]
    done = subprocess.run(
        [*command, "--width", "8", "--batch-size", "4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines[-4:-1]] == ["--no-noise-scale", "not measured", "measured"]
    assert lines[-1].startswith("RESULT measured_ratio=")
    figures = {name: float(value) for name, value in (word.split("=") for word in lines[-1].split()[1:])}
    assert figures["pairs"] == 2
    assert figures["measured_ratio"] > 0
    assert figures["unmeasured_ratio"] > 0
