"""A run that does not fit is told so before it has a folder; one that runs out on its way is told how to go on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.commands.test_train import TASK, here, in_ranks, summary

WAYS = "a smaller --batch-size (with --accumulate the global batch stays) or "


def test_a_pass_that_does_not_fit_is_a_setting_that_cannot_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINY_MEMORY", "* 20")
    assert here("--batch-size", "32") == 2
    assert capfd.readouterr().err.splitlines()[-1] == (
        "stormo: passes of 32 samples were set, but one does not fit into the memory of this host (CUDA out of memory, "
        f"on purpose, with 32 samples); set {WAYS}--checkpoint-activations or --strategy fsdp --offload; "
        f"stormo predict {TASK} says before a start what fits."
    )
    assert not list(tmp_path.glob("runs/*"))


def test_the_worker_that_runs_out_is_heard_and_ends_the_job(tmp_path: Path) -> None:
    flags = ["--batch-size", "32", "--checkpoint-activations", "--run-name", "one"]
    done = in_ranks(tmp_path, *flags, TINY_MEMORY="1 20")
    assert done.returncode == 2
    assert "passes of 32 samples were set, but one does not fit" in done.stderr
    assert f"set {WAYS}--strategy fsdp; stormo predict " in done.stderr
    assert not (tmp_path / "runs" / "one").exists()


def test_a_run_that_runs_out_on_its_way_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINY_FAULT", "memory 0 4")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        here("--run-name", "one", "--checkpoint-every", "1")
    ways = f"{WAYS}--checkpoint-activations or --strategy fsdp --offload"
    assert f"Out of memory: go on by --resume with {ways}." in caught.value.__notes__
    assert summary(tmp_path / "runs" / "one")["stopped_by"] == "error"
