"""Workers of `stormo train` that load torch while their agent reads the task."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.processes import MARK, marked
from stormo.ahead import started_ahead, takes_torch

# Says in a file, as it is imported, who has torch already.
_HEAD = """
import os, pathlib, sys
def who():
    return os.environ.get("RANK", "agent")
pathlib.Path(__file__).with_name(who()).write_text(str("torch" in sys.modules))
"""
_TASK = """
import stormo, torch
from stormo.data import TensorData
class Mine(stormo.Task):
    def model(self): return torch.nn.Linear(2, 1)
    def train_data(self): return TensorData(torch.ones(4, 2))
    def validation_data(self): return TensorData(torch.ones(4, 2))
    def loss(self, model, batch): return model(batch[0]).square().mean()
"""


def train(folder: Path, *flags: str, mark: str = "") -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "stormo", "train", "mine.py", "--num-gpus", "2", "--device", "cpu", *flags]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("STORMO_", "SLURM_"))}
    return subprocess.run(
        words, cwd=folder, env=kept | {MARK: mark}, capture_output=True, text=True, check=False, timeout=240
    )


def test_workers_have_torch_before_they_read_the_task(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(_HEAD + _TASK)
    done = train(tmp_path, "--batch-size", "2", "--epochs", "1", "--checkpoint-every", "0")
    assert done.returncode == 0, done.stderr
    assert {name: (tmp_path / name).read_text() for name in ("agent", "0", "1")} == {
        "agent": "False",
        "0": "True",
        "1": "True",
    }


def test_a_mistake_is_one_sentence_and_the_workers_never_read_the_task(tmp_path: Path) -> None:
    # Workers are started, for torch is named; that the agent does not wait for it makes the test short.
    (tmp_path / "mine.py").write_text(
        _HEAD + "if 'pytest' in sys.modules: import torch\nimport stormo\nclass Mine(stormo.Task): pass\n"
    )
    assert takes_torch(tmp_path / "mine.py")
    mark = f"ahead-{os.getpid()}"
    done = train(tmp_path, mark=mark)
    assert done.returncode == 2
    assert done.stderr.startswith("stormo: class Mine was named as the task, but it has no model()")
    assert len(done.stderr.splitlines()) == 1
    assert (tmp_path / "agent").exists()
    assert not (tmp_path / "0").exists()
    assert marked(mark) == set()


@pytest.mark.parametrize(
    ("text", "pays"),
    [
        ("import torch", True),
        ("from torch.nn import functional", True),
        ("import numpy, torch.nn as nn", True),
        ("try:\n    import torch\nexcept ImportError:\n    raise", True),
        ("import os, torch\ndef f(): return os.environ['RANK']", True),
        ("import numpy", False),
        ("def f():\n    import torch", False),  # the agent reads this file without torch
        ("import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch", False),  # read as torch is imported
        ("from os import environ\nimport torch", False),
        ("import torch (", False),
    ],
)
def test_it_pays_where_reading_the_file_takes_torch(tmp_path: Path, text: str, pays: bool) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert takes_torch(path) is pays


@pytest.mark.parametrize(
    "flags",
    [
        {"num_gpus": 1},
        {"num_gpus": 100_000},
        {"num_gpus": 2, "num_nodes": 2},
        {"num_gpus": 2, "config": "c.toml"},
        {"num_gpus": 2, "dry_run": True},
        {"num_gpus": 2, "launcher": "ssh"},
        {"num_gpus": 2, "max_restarts": 3},
        {"num_gpus": 2, "task": "fashion-mnist"},
        {"num_gpus": 2, "task": "nowhere.py"},
    ],
)
def test_nothing_is_started_where_the_command_line_does_not_tell_what(tmp_path: Path, flags: dict[str, object]) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import torch")
    with started_ahead(["/nowhere/python"], {"task": str(path), **flags}) as workers:
        assert workers is None
