"""The benchmark of the language model, in the small form that a machine without a GPU runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stormo.hardware import visible_gpus
from tests import programs

ROOT = Path(__file__).parents[2]
COMMAND = ["-m", "benchmarks.language_model"]


@pytest.mark.skipif(bool(visible_gpus()), reason="the form without a GPU is looked at and there is one")
def test_it_prints_both_speeds_and_no_mfu_without_a_gpu() -> None:
    done = programs.run([*COMMAND, "--batch-size", "1", "--steps", "30"], ROOT)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"RESULT tokens_per_s=\S+ plain_tokens_per_s=\S+ peak_memory_bytes=\d+ loss=\S+", last), last


def test_too_few_steps_are_refused() -> None:
    done = programs.run([*COMMAND, "--steps", "5"], ROOT)
    assert done.returncode == 2
    assert "--steps 5 is too few for a median" in done.stderr
