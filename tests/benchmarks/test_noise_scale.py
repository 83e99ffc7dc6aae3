"""The cost of measuring the noise scale, in a tiny setting; how large it is here is not what is tested."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import noise_scale


def test_all_sides_train_the_same_network_and_are_compared(
    run_ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # test_overhead.py looks at how the workers of such a command are started.
    sizes = {"pairs": 2, "steps": 4, "layers": 2, "width": 8}
    times, _ = run_ranks(noise_scale.measure, 2, Namespace(**sizes, batch_size=4, accumulate=1))
    monkeypatch.setattr(noise_scale, "times_of_workers", lambda module, words: times)
    assert noise_scale.main([word for name, size in sizes.items() for word in (f"--{name}", str(size))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[-4:-1]] == ["--no-noise-scale", "not measured", "measured"]
    assert lines[-1].startswith("RESULT measured_ratio=")
    figures = {name: float(value) for name, value in (word.split("=") for word in lines[-1].split()[1:])}
    assert figures["pairs"] == 2
    assert figures["measured_ratio"] > 0
    assert figures["unmeasured_ratio"] > 0
