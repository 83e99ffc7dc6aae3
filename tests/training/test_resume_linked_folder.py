"""A folder of runs that is a symbolic link to scratch space, as on most clusters."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stormo.cli import main
from stormo.telemetry.folder import RunFolder, read_summary

TASK = str(Path(__file__).parents[1] / "tiny_task.py")
SMALL = ["--task.num-train", "64", "--task.num-validation", "16", "--device", "cpu"]


def test_every_verb_works_where_runs_is_a_link_and_no_note_of_the_launch_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("scratch").mkdir()
    Path("runs").symlink_to("scratch")
    assert main(["train", TASK, *SMALL, "--run-name", "a", "--epochs", "1"]) == 0
    # The rest of the test is of a torchrun whose note would go through a link that somebody else has made.
    Path("scratch", f".launches-{os.geteuid()}").symlink_to(tmp_path)
    monkeypatch.setattr("stormo.training.records.launch_id", lambda environ: "job")
    assert main(["train", "--resume", "a", "--epochs", "2"]) == 0
    assert "A restart by torchrun would not find this run" in "".join(capfd.readouterr())
    assert (read_summary(RunFolder(Path("scratch/a"))) or {})["stopped_by"] == "epochs"
    for words in (["runs"], ["show", "a"], ["export", "a"]):
        assert main(words) == 0, words
