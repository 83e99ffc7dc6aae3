"""`--grow-batch` in real runs: the same weights however a batch is cut, and whenever the run is stopped and resumed."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from stormo.cli import main
from stormo.distributed.world import World
from stormo.telemetry.events import read_events
from stormo.training import loop
from tests.tiny_run import arrays
from tests.training.test_loop import prepare

TASK = str(Path(__file__).parent.with_name("tiny_task.py"))
# 301 samples: 38 steps of 8, 19 of 16, 10 of 32.
_FLAGS = "--device cpu --precision fp64 --deterministic --task.num-train 301 --task.dropout 0 --no-task.norm "
_FLAGS += "--target-accuracy 2 --epochs 4 --warmup-epochs 1.5 --warmup-from 0.1 --decay cosine --no-tensorboard"
ALWAYS = _FLAGS.split()
GROWS = ["--batch-size", "8", "--grow-batch", "1:2x,2:2x"]

Train = Callable[..., dict[str, Any]]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    monkeypatch.chdir(tmp_path)

    def run(name: str, *flags: str, code: int = 0) -> dict[str, Any]:
        torch.set_default_dtype(torch.float32)  # as in a process of its own
        assert main(["train", TASK, *ALWAYS, "--run-name", name, *flags]) == code
        summary: dict[str, Any] = json.loads((tmp_path / "runs" / name / "summary.json").read_text())
        return summary

    return run


def _weights(name: str) -> dict[str, torch.Tensor]:
    newest = max(Path("runs", name, "checkpoints").glob("step-*"))
    return safetensors.torch.load_file(newest / "model.safetensors")


def test_a_batch_grows_by_accumulation_or_at_once_with_the_same_result(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stormo.training.context._SECONDS_BETWEEN_RECORDS", -1.0)  # a record of every step
    accumulated = train("accumulated", *GROWS, "--keep-checkpoints", "99")
    assert accumulated["steps"] == 38 + 19 + 10 + 10
    assert accumulated["samples_seen"] == 4 * 301
    saved = sorted(int(path.name.removeprefix("step-")) for path in Path("runs/accumulated/checkpoints").glob("step-*"))
    assert saved == [38, 57, 67, 77]  # at the end of every epoch
    at_once = train("at-once", *GROWS, "--max-batch-size", "32")
    assert at_once["sample_order_sha256"] == accumulated["sample_order_sha256"]
    for name, tensor in _weights("at-once").items():
        torch.testing.assert_close(tensor, _weights("accumulated")[name], rtol=1e-11, atol=1e-13)
    steps = [event for event in read_events(Path("runs/accumulated/events.jsonl")) if event["event"] == "step_done"]
    assert {(event["epoch"], event["global_batch_size"]) for event in steps} == {(1, 8), (2, 16), (3, 32), (4, 32)}
    assert main(["train", TASK, *ALWAYS, *GROWS, "--dry-run", "--plot-schedule", "curve.csv"]) == 0
    _, *planned = csv.DictReader(Path("curve.csv").read_text().splitlines())  # the first step has no loss to tell yet
    assert [float(row["learning_rate"]) for row in planned] == [event["learning_rate"] for event in steps]
    assert [int(row["global_batch_size"]) for row in planned] == [event["global_batch_size"] for event in steps]
    said = [
        event["text"]
        for event in read_events(Path("runs/accumulated/events.jsonl"))
        if event["event"] == "notice" and "grown" in event["text"]
    ]
    assert said == [
        "The batch has grown to 16 samples in 2 micro-batches.",
        "The batch has grown to 32 samples in 4 micro-batches.",
    ]
    train("plain", "--batch-size", "8")

    def rates(name: str) -> list[float]:
        events = read_events(Path("runs", name, "events.jsonl"))
        return [event["learning_rate"] for event in events if event["event"] == "epoch_done"]

    # The learning rate follows the epochs, not the steps. The last step of an epoch begins earlier in a larger batch.
    assert rates("accumulated")[0] == rates("plain")[0]
    assert rates("accumulated") == pytest.approx(rates("plain"), abs=5e-4)
    assert rates("accumulated") != rates("plain")


def _grown(world: World) -> dict[str, Any]:
    flags = {"global_batch_size": 9, "grow_batch": "1:2x,2:2x", "epochs": 4, "precision": "fp64", "lr_rule": "none"}
    run = prepare({"norm": False, "dropout": 0.0}, world=world, **flags)
    assert loop.train(run.training) == loop.Outcome("epochs")
    assert run.parts.state.progress.step == 5 + 3 + 2 + 2  # of 9, 18, 36 and 36 of 40 samples
    return arrays(run.parts.strategy.module.named_parameters())


def test_any_number_of_workers_grows_alike(run_ranks: Callable[..., list[Any]]) -> None:
    (alone,) = run_ranks(_grown, 1)
    for weights in run_ranks(_grown, 2) + run_ranks(_grown, 3):
        for name, array in weights.items():
            np.testing.assert_allclose(array, alone[name], rtol=1e-11, atol=1e-13)


def test_a_run_resumes_from_the_middle_of_any_stage(train: Train, tmp_path: Path) -> None:
    whole = train("run", *GROWS, "--checkpoint-every", "3", "--keep-checkpoints", "99")
    for at in (63, 57, 45):  # in the third epoch, at the end of the second, in its middle
        found = tmp_path / "runs" / "run" / "checkpoints" / f"step-{at:08d}"
        torch.set_default_dtype(torch.float32)
        assert main(["train", "--resume", str(found), "--device", "cpu"]) == 0
        resumed = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
        for key in ("weights_sha256", "sample_order_sha256", "steps", "validation_loss"):
            assert resumed[key] == whole[key]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--grow-batch", "2"], "2 is not of the form EPOCHS:FACTORx"),
        (["--max-batch-size", "9"], "--max-batch-size 9 was set without --grow-batch"),
        (["--grow-batch", "2:2x", "--max-batch-size", "7"], "micro-batches of 8 samples a worker"),
        (["--grow-batch", "2:2x", "--graph"], "--graph was set"),
        (
            ["--grow-batch", "2:2x", "--max-batch-size", "9", "--batch-size", "auto"],
            "it needs a number as --batch-size",
        ),
        (["--base-batch-size", "8", "--lr-rule", "none"], "--base-batch-size 8 was set, but it needs --lr-rule"),
        (["--base-batch-size", "0"], "--base-batch-size 0 was set"),
    ],
)
def test_what_cannot_hold(flags: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", TASK, *ALWAYS, "--batch-size", "8", *flags]) == 2
    assert why in capsys.readouterr().err


def test_growth_is_part_of_a_run(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    train("fixed", *GROWS, "--epochs", "1")
    assert main(["train", "--resume", "fixed", "--grow-batch", "3:2x", "--device", "cpu"]) == 2
    assert "--grow-batch 3:2x was set with --resume" in capsys.readouterr().err


def test_a_batch_that_will_not_fit_is_reported_before_the_first_step(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TINY_MEMORY", "* 20")
    assert main(["train", TASK, *ALWAYS, *GROWS, "--max-batch-size", "32"]) == 2
    assert "a micro-batch of 32 samples, once the batch has grown, does not fit in memory" in capsys.readouterr().err
    assert not Path("runs").exists()
    assert train("small", *GROWS, "--max-batch-size", "16", "--epochs", "3")["steps"] == 67
