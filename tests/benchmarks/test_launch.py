"""The start against torchrun's, once each; how long it takes here is not what is tested."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.launch import PROMISED, SIDES, stormo_train, stormo_world
from tests import programs

ROOT = Path(__file__).parents[2]


def test_the_same_script_is_started_by_both_and_the_exit_code_tells_whether_the_promise_was_kept() -> None:
    command = [sys.executable, "-m", "benchmarks.launch", "--pairs", "1", "--warm-ups", "0", "--also", "none"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    last = done.stdout.splitlines()[-1]
    assert last.startswith("RESULT "), done.stderr
    figures = {name: float(value) for name, value in (word.split("=") for word in last.split()[1:])}
    assert figures["pairs"] == 1
    assert 0 < figures["q25"] <= figures["median_ratio"] <= figures["q75"] < math.inf
    assert done.returncode == (0 if figures["median_ratio"] <= PROMISED else 1)
    assert all(line in done.stdout for line in (SIDES["torchrun"][0], SIDES["run"][0]))


@pytest.mark.parametrize("side", [stormo_world, stormo_train])
def test_the_other_sides_leave_the_time_of_their_first_step(tmp_path: Path, side: object) -> None:
    assert callable(side)
    file = tmp_path / "time"
    words = side(file)
    # As workers of torchrun, which takes less time than a launcher of their own.
    words = words[words.index("train") - 2 :] if side is stormo_train else [words[4], *words[words.index("--") + 1 :]]
    at = words.index("--num-gpus") if "--num-gpus" in words else len(words)
    done = programs.run([*words[:at], *words[at + 2 :]], ROOT, num_workers=2)
    assert done.returncode == 0, done.stderr
    assert float(file.read_text()) > 0
