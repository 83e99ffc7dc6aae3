"""The scripts of examples/ give the original's result on one worker and on three."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import programs

EXAMPLES = Path(__file__).parents[2] / "examples"


def _numbers(path: Path, num_workers: int = 1) -> list[float]:
    # In double precision, and printed in full, "to rounding" can be told from "nearly".
    text = (EXAMPLES / path.name).read_text(encoding="utf-8")
    text = text.replace("torch.manual_seed(0)", "torch.set_default_dtype(torch.float64)\ntorch.manual_seed(0)")
    path.write_text(re.sub(r":\.\df\}", ":.15g}", text), encoding="utf-8")
    done = programs.run([path.name], path.parent, num_workers)
    assert done.returncode == 0, done.stderr
    return [float(line.split()[-1]) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("name", ["resnet", "regression"])
def test_converted_script_agrees_with_the_original(name: str, tmp_path: Path) -> None:
    original = _numbers(tmp_path / f"{name}_plain.py")
    assert original[-1] < 0.5 * original[0]  # it does learn
    converted = tmp_path / f"{name}_world.py"
    assert _numbers(converted) == original
    assert _numbers(converted, 3) == pytest.approx(original, rel=1e-10)
