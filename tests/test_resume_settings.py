"""Every optimizer, schedule and noise goes on, from the middle of an epoch, as if the run had never stopped.

What is changed on the way takes effect, is said once, and is the run's own from then on.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from stormo.cli import main

TASK = str(Path(__file__).with_name("tiny_task.py"))
ALWAYS = ["--device", "cpu", "--deterministic", "--task.num-train", "301", "--batch-size", "32", "--epochs", "3"]
ALWAYS += ["--warmup-epochs", "0.7", "--warmup-from", "0.1", "--target-accuracy", "2", "--no-tensorboard"]
ALWAYS += ["--checkpoint-every", "4", "--keep-checkpoints", "99", "--weight-decay", "0.001"]
# Ten steps an epoch; step 8 is in the first one, after warm-up.
CASES = {
    "sgd": "--decay none --nesterov --gradient-noise 0.01",
    "adamw": "--decay linear --base-lr 0.01 --gradient-noise-batch 8",
    "lars": "--decay cosine --base-lr 2 --lr-rule sqrt --base-batch-size 16",
    "larc": "--decay step --decay-every 1 --trust-coefficient 0.02 --nesterov",
    "lamb": "--decay linear --ghost-batch-size 8 --accumulate 2",
    "novograd": "--decay cosine --grad-averaging --gradient-noise 0.01 --gradient-noise-batch 8 --clip-norm 1",
}


@pytest.mark.parametrize("optimizer", CASES)
def test_a_run_goes_on_as_if_it_had_never_stopped(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--optimizer", optimizer, *CASES[optimizer].split(), "--run-name", "run"]
    assert main(["train", TASK, *ALWAYS, *flags]) == 0
    summary = tmp_path / "runs" / "run" / "summary.json"
    whole = json.loads(summary.read_text())
    assert whole["steps"] == (15 if "--accumulate" in flags else 30)
    torch.manual_seed(7)  # nothing may hang on what this process has drawn
    assert main(["train", "--resume", "runs/run/checkpoints/step-00000008", "--device", "cpu"]) == 0
    resumed = json.loads(summary.read_text())
    assert resumed["num_resumes"] == 1
    for key in ("weights_sha256", "sample_order_sha256", "steps", "validation_loss", "noise_scale"):
        assert resumed[key] == whole[key], key


def test_what_is_changed_on_the_way_is_said_once_and_changes_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    begin = ["train", TASK, *ALWAYS, "--optimizer", "adamw", "--run-name", "run"]
    assert main(begin) == 0
    summary, step = tmp_path / "runs" / "run" / "summary.json", "runs/run/checkpoints/step-00000008"
    digests = [json.loads(summary.read_text())["weights_sha256"]]
    capsys.readouterr()
    for flags, said in (
        ("--beta2 0.9", "--beta2 0.9 (0.999 before)"),
        ("--eps 0.001", "--eps 0.001 (1e-08 before)"),
        ("--ghost-batch-size 8", "--ghost-batch-size 8 (not set before)"),
        ("--accumulate 2 --momentum 0.5", "--accumulate 2 (1 before), --momentum 0.5 (0.9 before)"),
        ("--precision bf16", "--precision bf16 (auto before)"),
        ("", None),
    ):
        assert main(["train", "--resume", step, "--device", "cpu", *flags.split()]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed ")]
        assert [line.removeprefix("changed").strip() for line in lines] == ([said] if said else [])
        digests.append(json.loads(summary.read_text())["weights_sha256"])
    assert len(set(digests)) == len(digests) - 1
    assert digests[-1] == digests[-2]  # all of it has stayed with the run
