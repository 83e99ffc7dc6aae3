"""Every optimizer, schedule and noise resumes, from the middle of an epoch, as if the run had never stopped.

What is changed on the way takes effect, is said once, and is the run's own from then on.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from stormo.cli import main

TASK = str(Path(__file__).parent.with_name("tiny_task.py"))
ALWAYS = ["--device", "cpu", "--deterministic", "--task.num-train", "301", "--batch-size", "32", "--epochs", "2"]
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
def test_a_run_resumes_as_if_it_had_never_stopped(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--optimizer", optimizer, *CASES[optimizer].split(), "--run-name", "run"]
    assert main(["train", TASK, *ALWAYS, *flags]) == 0
    summary = tmp_path / "runs" / "run" / "summary.json"
    whole = json.loads(summary.read_text())
    assert whole["steps"] == (10 if "--accumulate" in flags else 20)
    torch.manual_seed(7)  # nothing may hang on what this process has drawn
    assert main(["train", "--resume", "runs/run/checkpoints/step-00000008", "--device", "cpu"]) == 0
    resumed = json.loads(summary.read_text())
    assert resumed["num_resumes"] == 1
    for key in ("weights_sha256", "sample_order_sha256", "steps", "validation_loss", "noise_scale"):
        assert resumed[key] == whole[key], key


def test_what_is_changed_on_the_way_is_shown_once_and_changes_the_weights(
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


def _files(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_fewer_epochs_than_are_done_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", TASK, *ALWAYS, "--epochs", "3", "--run-name", "run"]) == 0
    before = _files(tmp_path / "runs" / "run")
    capsys.readouterr()
    for named, done in (("run", 3), ("runs/run/checkpoints/step-00000024", 2)):  # the newest, and an older one
        assert main(["train", "--resume", named, "--epochs", "1", "--device", "cpu"]) == 0
        said = (
            f"run has done {done} epochs already, of 1 now; it is left as it is: set --epochs above {done} to train on"
        )
        assert capsys.readouterr().out == f"{said}\n"
        assert _files(tmp_path / "runs" / "run") == before
    # Nor does the number it has done already: nobody has trained on.
    assert main(["train", "--resume", "run", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == "run has done its 3 epochs; raise --epochs to train on\n"
    assert _files(tmp_path / "runs" / "run") == before
    # A run that was killed at its very end has yet to end, also where an earlier ending has left a summary.
    path = tmp_path / "runs" / "run" / "summary.json"
    ended = path.read_text()
    assert main(["train", "--resume", "run", "--device", "cpu", "--epochs", "4"]) == 0
    steps = json.loads(path.read_text())["steps"]
    path.write_text(ended)
    assert main(["train", "--resume", "run", "--device", "cpu"]) == 0
    assert json.loads(path.read_text())["steps"] == steps > json.loads(ended)["steps"]


ONE_LEFT = ["train", TASK, "--device", "cpu", "--target-accuracy", "2", "--no-tensorboard", "--run-name", "run"]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--task.num-train 33 --batch-size 8", id="last batch"),
        pytest.param("--task.num-train 49 --batch-size 7 --grow-batch 2:2.3x", id="last batch once it has grown"),
    ],
)
def test_a_sample_that_batch_norm_gets_alone_is_found_before_the_first_step(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*ONE_LEFT, *flags.split(), "--epochs", "3"]) == 2
    said = capsys.readouterr().err
    assert "but the last step of an epoch is a single sample, and batch norm needs two" in said
    assert "--sync-batch-norm" not in said  # on one worker, or of one sample, it changes nothing
    assert not Path("runs").exists()
    # Where no layer minds, or no such batch will come, it is no matter.
    assert (
        main([*ONE_LEFT, *flags.split(), *("--epochs 2" if "grow" in flags else "--no-task.norm --epochs 1").split()])
        == 0
    )


def test_a_batch_that_is_over_when_a_run_resumes_may_leave_one_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = "--task.num-train 50 --batch-size 8 --grow-batch 1:3.125x --loader streamed --loader-workers 0"
    assert main([*ONE_LEFT, *flags.split(), "--epochs", "1", "--checkpoint-every", "5"]) == 0
    again = ["train", "--device", "cpu", "--epochs", "2", "--accumulate", "2", "--resume"]
    assert main([*again, "runs/run/checkpoints/step-00000005"]) == 2  # the last 2 samples of the epoch are to come
    assert "a batch of 2 leaves one of them a single sample" in capsys.readouterr().err
    assert main([*again, "run"]) == 0  # only batches of 25


def test_a_whole_batch_that_is_over_when_a_run_resumes_may_leave_one_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = "--task.num-train 48 --batch-size 2 --grow-batch 1:4x --max-batch-size 4"
    assert main([*ONE_LEFT, *flags.split(), "--epochs", "1", "--checkpoint-every", "20"]) == 0
    again = ["train", "--device", "cpu", "--epochs", "2", "--accumulate", "2", "--resume"]
    assert main([*again, "runs/run/checkpoints/step-00000020"]) == 2  # 4 batches of 2 are to come
    assert "a batch of 2 leaves one of them a single sample" in capsys.readouterr().err
    assert main([*again, "run"]) == 0  # only batches of 8


def test_a_batch_changed_in_the_middle_of_an_epoch_that_leaves_one_sample_changes_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = "--task.num-train 40 --batch-size 8 --epochs 1 --checkpoint-every 1 --keep-checkpoints 99"
    assert main([*ONE_LEFT, *flags.split()]) == 0
    before = _files(tmp_path / "runs" / "run")
    again = ["train", "--resume", "runs/run/checkpoints/step-00000002", "--device", "cpu", "--epochs", "2"]
    assert main([*again, "--batch-size", "23"]) == 2  # 24 samples are left of the epoch
    assert "the last step of an epoch is a single sample" in capsys.readouterr().err
    assert _files(tmp_path / "runs" / "run") == before
    assert main([*again, "--batch-size", "22"]) == 0
