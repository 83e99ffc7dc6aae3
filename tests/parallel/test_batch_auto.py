"""`stormo train --batch-size auto`, from the command to the summary."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest

from stormo.cli import main
from tests.commands.test_train import TASK, in_ranks, summary

# The global batch is that of `SETTINGS`' 64 for each of two workers, at a rate that does not depend on how it is said.
RATE = ["--num-gpus", "2", "--lr-rule", "none", "--warmup-epochs", "0"]
AUTO = [*RATE, "--batch-size", "auto", "--global-batch-size", "128"]


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run of two workers, the second of which has memory for 20 samples only."""
    folder = tmp_path_factory.mktemp("auto")
    done = in_ranks(folder, *AUTO, "--run-name", "auto", TINY_MEMORY="1 20")
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "auto", done


def test_the_batch_is_cut_into_passes_that_fit_and_the_plan_says_why(
    searched: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run, done = searched
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("global batch"))
    assert "128 as set = 4 passes of 16 (auto: 20 fits with " in line
    assert line.endswith(" GiB, 22 does not) × 2 workers")
    result = summary(run)
    assert (result["global_batch_size"], result["batch_per_pass"], result["accumulate"]) == (128, 16, 4)
    assert "batch size" in result["setup_parts_s"]
    batch = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))["batch"]
    assert (batch["batch_size"], batch["global_batch_size"], batch["accumulate"]) == ("auto", 128, 1)


def test_a_resume_keeps_the_batch_and_searches_anew(
    searched: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run, _ = searched
    done = in_ranks(run.parents[1], *AUTO, "--resume", "auto", "--epochs", "3")  # with all memory there is
    assert done.returncode == 0, done.stderr
    assert "128 as before = 1 pass of 64 (auto: 64 fits with " in done.stdout
    result = summary(run)
    assert (result["global_batch_size"], result["accumulate"], result["num_resumes"]) == (128, 1, 1)
    assert result["steps"] == 24


def test_a_dry_run_says_when_the_passes_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", TASK, *RATE, "--batch-size", "auto", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "64 (32 for each of 2 workers), in passes that --batch-size auto finds once the workers hold the" in printed
