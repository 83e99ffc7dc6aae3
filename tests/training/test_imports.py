"""What a run does not import: every second of it is a second of every start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TINY = Path(__file__).parents[1] / "tiny_task.py"
SLOW = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "sympy",
    "triton",
)
PROGRAM = f"""
import sys
from stormo.cli import main
for strategy in ("single", "ddp"):
    code = main(["train", *sys.argv[1:], "--strategy", strategy])
    print("LOADED by", strategy, *[name for name in {SLOW} if name in sys.modules])
import torch
from stormo.layers.norm_act import NormAct
NormAct(3)(torch.randn(4, 3)).sum().backward()
print("LOADED by NormAct", *[name for name in {SLOW} if name in sys.modules])
sys.exit(code)
"""


def test_a_run_imports_neither_the_compiler_nor_other_strategies(tmp_path: Path) -> None:
    flags = ["--num-gpus", "1", "--device", "cpu", "--epochs", "1", "--runs-folder", str(tmp_path)]
    command = [sys.executable, "-c", PROGRAM, str(TINY), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = [line for line in done.stdout.splitlines() if line.startswith("LOADED")]
    assert loaded == ["LOADED by single", "LOADED by ddp", "LOADED by NormAct"]
