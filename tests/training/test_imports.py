"""What a run does not import: every second of it is a second of every start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TINY = Path(__file__).parents[1] / "tiny_task.py"
SLOW = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.tensor", "sympy")
PROGRAM = f"""
import sys
from stormo.cli import main
code = main(sys.argv[1:])
print("LOADED", *[name for name in {SLOW} if name in sys.modules])
sys.exit(code)
"""


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_run_imports_neither_the_compiler_nor_other_strategies(strategy: str, tmp_path: Path) -> None:
    flags = ["--strategy", strategy, "--num-gpus", "1", "--device", "cpu", "--epochs", "1", "--runs-folder", tmp_path]
    command = [sys.executable, "-c", PROGRAM, "train", str(TINY), *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "LOADED", done.stdout
