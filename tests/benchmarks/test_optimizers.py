"""The timing of the optimizers, in a tiny setting; how fast they are here is not what is tested."""

from __future__ import annotations

import math

import pytest

from benchmarks import optimizers


def test_all_sides_step_the_same_layers_and_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cpu", "--rounds", "1", "--steps", "2", "--tensors", "4", "--width", "8"]
    assert optimizers.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("RESULT ")
    figures = {name: float(value) for name, value in (word.split("=") for word in lines[-1].split()[1:])}
    rules = ("lars", "lamb", "novograd")
    assert list(figures) == [f"{rule}_vs_{side}" for side in ("timm", "loop") for rule in rules]
    assert all(figures[f"{rule}_vs_loop"] > 0 for rule in rules)
    for rule, name in zip(rules, ("Lars", "Lamb", "NvNovoGrad"), strict=True):
        is_left_out = any(line.startswith(f"timm's {name} is left out: ") for line in lines)
        assert math.isnan(figures[f"{rule}_vs_timm"]) is is_left_out
