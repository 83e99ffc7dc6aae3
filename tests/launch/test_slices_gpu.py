"""Workers on slices of one real GPU, joined by NCCL: needs `stormo doctor --slices 2` or more first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slices(2)]
_ROOT = Path(__file__).parents[2]
_OWN = [sys.executable, "-m", "stormo", "train", "--num-gpus", "2"]
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "stormo", "train"]


@pytest.mark.parametrize("start", [_OWN, _TORCHRUN], ids=["stormo", "torchrun"])
def test_two_slices_train_with_nccl_and_are_named(start: list[str], tmp_path: Path) -> None:
    run = ["--runs-folder", str(tmp_path), "--run-name", "run", "--epochs", "1"]
    command = [*start, "tests/tiny_task.py:Tiny", "--backend", "nccl", *run]
    environ = {**os.environ, "NCCL_DEBUG": "WARN"}
    done = subprocess.run(command, cwd=_ROOT, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert " MIG " in summary["device"]
    assert "2 slices" in done.stdout
