"""On a GPU that two workers share by Gloo: local steps, parameter servers, gradients that travel in fewer bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

TASK = str(Path(__file__).parent.with_name("tiny_task.py"))
FLAGS = "--num-gpus 2 --backend gloo --precision fp64 --global-batch-size 64 --epochs 2 --target-accuracy 2"
FLAGS += " --no-task.norm --task.dropout 0 --momentum 0 --no-tensorboard --checkpoint-every 5"
DEVICE = "cuda"


def _validation_loss(folder: Path, name: str, flags: str) -> float:
    words = ["-m", "stormo", "train", TASK, "--run-name", name, "--device", DEVICE, *FLAGS.split(), *flags.split()]
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "runs" / name / "summary.json").read_text())
    assert summary["steps"] == 32
    return float(summary["validation_loss"])


def test_they_train_as_ddp_where_they_promise_it_and_to_the_end_elsewhere(tmp_path: Path) -> None:
    expected = _validation_loss(tmp_path, "ddp", "--strategy ddp")
    same = "--strategy server", "--strategy server --servers 2 --clip-norm 1e9", "--strategy local --average-every 1"
    for number, flags in enumerate(same):
        assert _validation_loss(tmp_path, f"same-{number}", flags) == pytest.approx(expected, rel=1e-10)
    others = "--strategy local --average-every 3 --outer-lr 0.7 --outer-momentum 0.5", "--strategy server --staleness 3"
    others += "--compress bf16", "--compress fp16", "--compress powersgd --compress-rank 1"
    for number, flags in enumerate(others):
        assert _validation_loss(tmp_path, f"other-{number}", flags) == pytest.approx(expected, rel=0.2)
