"""Every task on docs/data.md trains, on two workers, and does what the page says of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "data.md"


@pytest.mark.parametrize(
    ("name", "flags", "says"),
    [
        ("Words", ("--base-lr", "0.3", "--target-loss", "0.4", "--patience", "1"), "Early stopping"),
        ("Fit", ("--epoch-samples", "400", "--base-lr", "0.1"), "400 samples are an epoch, and the next one goes on"),
        ("Points", (), "learning rates 0.001, 0.003 are for one worker's batch, × 2 for the global batch"),
    ],
)
def test_the_tasks_of_the_page_train(tmp_path: Path, name: str, flags: tuple[str, ...], says: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (text,) = (block for block in blocks if f"class {name}(Task)" in block)
    (tmp_path / "my_task.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "stormo", "train", "my_task.py", *flags]
    done = subprocess.run(
        [*command, "--epochs", "3", "--warmup-epochs", "0", "--num-gpus", "2", "--no-tensorboard"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
    if name == "Words":  # it stops once its loss is low, maybe at once
        return
    losses = [float(loss) for loss in re.findall(r"Validation Loss = ([\d.]+)", done.stdout)]
    scores = [float(score) for score in re.findall(r"Validation F1 = ([\d.]+)", done.stdout)]
    assert losses[-1:] < losses[:1] or scores[-1] > scores[0]
