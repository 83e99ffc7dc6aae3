"""Two workers that share a GPU: local updates, parameter servers, gradient compression."""

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


def test_strategies_train_as_ddp(tmp_path: Path) -> None:
    expected = _validation_loss(tmp_path, "ddp", "--strategy ddp")
    same = "--strategy server", "--strategy server --servers 2 --clip-norm 1e9", "--strategy local --average-every 1"
    for number, flags in enumerate(same):
        assert _validation_loss(tmp_path, f"same-{number}", flags) == pytest.approx(expected, rel=1e-10)
    others = "--strategy local --average-every 3 --outer-lr 0.7 --outer-momentum 0.5", "--strategy server --staleness 3"
    others += "--compress bf16", "--compress fp16", "--compress powersgd --compress-rank 1"
    for number, flags in enumerate(others):
        assert _validation_loss(tmp_path, f"other-{number}", flags) == pytest.approx(expected, rel=0.2)


SCRIPT = """
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import stormo

world = stormo.World()
torch.manual_seed(0)
dtype = getattr(torch, sys.argv[2])
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to(dtype)
model, optimizer = world.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), compress=sys.argv[1])
x = torch.randn(256, 8).to(dtype)
data = TensorDataset(x, x.sum(dim=1, keepdim=True))
for _ in range(3):
    for rows, sums in world.loader(DataLoader(data, batch_size=32)):
        loss = torch.nn.functional.mse_loss(model(rows), sums)
        world.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
targets = x.to(world.device)
loss = torch.nn.functional.mse_loss(model(targets), targets.sum(dim=1, keepdim=True))
world.print("device", world.device.type, "loss", float(loss))
"""


def _loss_of_script(folder: Path, backend: str, compress: str, dtype: str) -> float:
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    words = ["-m", "stormo", "run", "script.py", "--device", DEVICE, "--num-gpus", "2", "--backend", backend]
    command = [sys.executable, *words, "--", compress, dtype]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    _, device, _, loss = done.stdout.splitlines()[0].split()
    assert device == DEVICE
    return float(loss)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_script_trains_with_gradient_compression(tmp_path: Path, backend: str) -> None:
    expected = _loss_of_script(tmp_path, backend, "none", "float64")
    for compress in ("bf16", "fp16"):
        found = _loss_of_script(tmp_path, backend, compress, "float64")
        assert found == pytest.approx(expected, rel=0.05)
        assert found != expected
    # Weights of 16 bits: what keeps their gradients in range is a number that has more.
    assert _loss_of_script(tmp_path, backend, "fp16", "float16") == pytest.approx(expected, rel=0.1)
