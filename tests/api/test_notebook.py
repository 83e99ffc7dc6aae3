"""Tasks and functions that the cells of a notebook define."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.api.notebook import run_cells

TASK = """
class Fit(stormo.Task):
    @dataclass(frozen=True, kw_only=True)
    class Options:
        width: int = 8

    def model(self):
        return nn.Linear(NUM_INPUTS, 1) if self.options.width == 1 else nn.Linear(NUM_INPUTS, 2)

    def train_data(self):
        return points(64)

    def validation_data(self):
        return points(16)

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.mse_loss(model(x).sum(1), y)
"""
CELLS = [
    "import os\nos.environ['OMP_NUM_THREADS'] = '1'\nfrom dataclasses import dataclass",
    "import torch\nfrom torch import nn\nimport stormo\nfrom stormo.data import TensorData",
    "NUM_INPUTS = 2\nx = torch.zeros(3)  # the name of a local variable elsewhere",
    "NUM_INPUTS += 1",
    "def points(n):\n"
    "    x = torch.randn(n, NUM_INPUTS, generator=torch.Generator().manual_seed(n))\n"
    "    return TensorData(x, x.sum(1))",
]


def test_a_task_of_cells_is_trained_twice_resumed_and_loaded(tmp_path: Path) -> None:
    train = "run = stormo.train(Fit(width=1), device='cpu', num_gpus=2, epochs=2, energy=False)"
    after = "print(run.history()['epoch'], run.load_model(), torch.cuda.is_initialized())"
    shown = run_cells([*CELLS, TASK, train, train + "\nrun.resume(epochs=3)", after], tmp_path)
    assert "Epoch = 2: " in shown[6]
    assert "Epoch = 3: " in shown[7]
    assert shown[8].split() == ["[1,", "2,", "3]", "Linear(in_features=3,", "out_features=1,", "bias=True)", "False"]
    runs = sorted((tmp_path / "runs").glob("Fit-*"))
    assert [json.loads((run / "summary.json").read_text())["epochs_run"] for run in runs] == [2, 3]
    assert "torch.zeros" not in (runs[0] / "cell_task.py").read_text()


def test_a_function_of_a_cell_runs_on_all_workers(tmp_path: Path) -> None:
    loop = "def loop(start):\n    open(os.devnull).close()\n    world = stormo.World()\n"
    loop += "    total = world.sum(start + world.rank)\n"
    loop += "    if world.rank == 0:\n        print('total', float(total), NUM_INPUTS)"
    shown = run_cells([*CELLS, loop, "stormo.run(loop, 10, num_gpus=2, device='cpu')"], tmp_path)
    assert "total 21.0 3" in shown[-1]


def test_errors_are_exceptions_in_the_cell(tmp_path: Path) -> None:
    wrong = (
        "try:\n    stormo.train(Fit, batch_size=0, device='cpu')\nexcept ValueError as error:\n    print(error.what)"
    )
    failing = TASK.replace("x, y = batch", "raise KeyError('no y')")
    caught = (
        "try:\n    stormo.train(Fit, num_gpus=2, epochs=1, device='cpu')\nexcept Exception as error:\n    print(error)"
    )
    shown = run_cells([*CELLS, TASK, wrong, failing, caught], tmp_path)
    assert "--batch-size 0 was set\n" in shown[6]
    assert shown[8].rstrip().splitlines()[-1].endswith("failed: KeyError: 'no y'")
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.gpu
def test_a_task_of_cells_is_trained_on_the_gpu(tmp_path: Path) -> None:
    after = "print(run.summary['device'], torch.cuda.is_initialized())"
    shown = run_cells([*CELLS, TASK, "run = stormo.train(Fit, epochs=1)", after], tmp_path)
    assert shown[-1].split()[-1] == "False"
    assert "cpu" not in shown[-1].split()
