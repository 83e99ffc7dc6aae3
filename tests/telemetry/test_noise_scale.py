"""The gradient noise scale as a user meets it: in the records of steps, in the summary, and as advice at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stormo.cli import main
from stormo.telemetry.record import StepDone
from stormo.telemetry.tensorboard import scalars_of

TASK = str(Path(__file__).parents[1] / "tiny_task.py") + ":Tiny"


def _run(folder: Path, *flags: str, task: str = TASK) -> dict[str, Any]:
    common = ["--device", "cpu", "--num-gpus", "1", "--target-accuracy", "1.1", "--warmup-epochs", "0"]
    common += ["--runs-folder", str(folder), "--run-name", "a", "--no-tensorboard"]
    assert main(["train", task, *common, *flags]) == 0
    summary: dict[str, Any] = json.loads((folder / "a" / "summary.json").read_text(encoding="utf-8"))
    return summary


def test_a_run_ends_with_its_noise_scale_and_what_it_means(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--global-batch-size", "64", "--accumulate", "2", "--base-lr", "1e-4"]  # near the start, where G is large
    summary = _run(tmp_path, *flags, "--epochs", "20", "--task.num-train", "640", "--no-task.norm")
    assert 1 < summary["noise_scale_low"] < summary["noise_scale"] < summary["noise_scale_high"] < 1000
    assert summary["noise_scale_reason"] is None
    assert summary["noise_scale_advice"] in capsys.readouterr().out.replace("\n", " ")
    assert "you train at 64" in summary["noise_scale_advice"]


def test_a_run_that_cannot_measure_says_why_in_its_summary_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = _run(tmp_path, "--epochs", "1", "--task.num-train", "64")
    assert summary["noise_scale"] is summary["noise_scale_advice"] is None
    assert summary["noise_scale_reason"].startswith("gradients of two batch sizes are compared")
    assert "Gradient noise scale" not in capsys.readouterr().out


SPARSE = """
import torch
from torch import nn
from tests.tiny_task import Tiny

class Sparse(Tiny):
    def model(self):
        return nn.Sequential(nn.Embedding(2, 3, sparse=True), nn.Flatten(), nn.Linear(24, 3))
    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)
    def loss(self, model, batch):
        return nn.functional.cross_entropy(model((batch[0] > 0).long()), batch[1])
    def metrics(self, model, batch):
        return {"loss": self.loss(model, batch) * len(batch[1])}
"""


def test_a_run_with_sparse_gradients_says_so_in_its_summary(tmp_path: Path) -> None:
    (tmp_path / "sparse_task.py").write_text(SPARSE, encoding="utf-8")
    flags = ("--epochs", "1", "--task.num-train", "64", "--accumulate", "2")
    summary = _run(tmp_path, *flags, task=f"{tmp_path / 'sparse_task.py'}:Sparse")
    assert summary["noise_scale"] is summary["noise_scale_advice"] is None
    assert summary["noise_scale_reason"] == "the model has sparse gradients"


@pytest.mark.parametrize("noise_scale", [None, 312.5])
def test_tensorboard_has_it_where_it_is_known(noise_scale: float | None) -> None:
    record = StepDone(
        epoch=1,
        step=1,
        step_in_epoch=1,
        samples_seen=1,
        loss=1.0,
        learning_rate=0.1,
        samples_per_s=1.0,
        units_per_s=1.0,
        input_wait_fraction=0.0,
        train_time_s=1.0,
        noise_scale=noise_scale,
    )
    assert scalars_of(record).get("train/noise_scale") == noise_scale
