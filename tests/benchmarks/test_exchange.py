"""The comparison with DDP, in a tiny setting; how fast it is here is not what is tested."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import exchange


def test_both_sides_train_the_same_network_and_are_compared(
    run_ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # test_overhead.py looks at how the workers of such a command are started.
    sizes = {"pairs": 2, "steps": 2, "layers": 3, "width": 8}
    times, _ = run_ranks(exchange.measure, 2, Namespace(**sizes, batch_size=32))
    monkeypatch.setattr(exchange, "times_of_workers", lambda module, words: times)
    assert exchange.main([word for name, size in sizes.items() for word in (f"--{name}", str(size))]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("RESULT ")
    figures = {name: float(value) for name, value in (word.split("=") for word in last.split()[1:])}
    assert figures["pairs"] == 2
    assert 0 < figures["q25"] <= figures["median_ratio"] <= figures["q75"]
