"""Both sides of the comparison leave the time of their first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.launch import stormo_train, stormo_world
from tests import programs

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("side", [stormo_world, stormo_train])
def test_both_sides_leave_the_time_of_their_first_step(tmp_path: Path, side: object) -> None:
    assert callable(side)
    file = tmp_path / "time"
    words = side(file)
    # As workers of torchrun, which takes less time than a launcher of their own.
    words = words[words.index("train") - 2 :] if side is stormo_train else [words[4], *words[words.index("--") + 1 :]]
    at = words.index("--num-gpus") if "--num-gpus" in words else len(words)
    done = programs.run([*words[:at], *words[at + 2 :]], ROOT, num_workers=2)
    assert done.returncode == 0, done.stderr
    assert float(file.read_text()) > 0
